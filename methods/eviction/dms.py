"""DMS with KVzap's scores: every entry is dropped or kept for good when it leaves a window, also while decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from kvbench.constraints import Positive
from kvbench.method import BudgetKind, Card, Step, Upstream
from kvbench.methods.eviction.kvzap import KVzap
from kvbench.selection import mark_best, protect_last
from kvbench.store import LayerKV
from kvbench.store.entries import FlatEntries
from kvbench.store.layer import SCORE_BYTES

if TYPE_CHECKING:
    from kvbench.method import Shape


@dataclass(frozen=True)
class DMS(KVzap):
    """Keeps the last tokens, and of all earlier ones those whose predicted score reaches the context's threshold."""

    period: Positive = 64
    """Tokens that leave the window between two evictions."""

    card: ClassVar[Card] = Card(
        name="dms",
        version="2",
        title="Inference-Time Hyper-Scaling with KV Cache Compression (Dynamic Memory Sparsification)",
        idea="A threshold decides on every entry, so heads keep unequal numbers. The decision takes effect when the "
        "entry leaves a window, so that the next tokens can still use it, and eviction goes on while decoding.",
        arxiv="2506.05345",
        year=2025,
        family="eviction",
        stages=("compression",),
        budget=BudgetKind.STORED,
        calibration="a linear predictor of KVzip+ scores, trained on Python's manual",
        heads="pooled",
        upstream=Upstream(repo="NVIDIA/kvpress", commit="8bb29b9", license="Apache-2.0"),
        deviations=(
            ("Decisions come from KVzap's predictor (arXiv 2601.07891), as in its authors' experiments; the paper "
            "retrains the model so that it decides itself."),
            "The context is run with full attention and evicted at its end, as in kvpress; the paper evicts within it.",
            ("The budget decides the threshold: the lowest score that is stored of the context. Later entries are held "
            "against the same threshold, so their share follows from the text."),
            "Entries that leave the window are examined together, `period` at a time.",
            *KVzap.card.deviations[:1],
            KVzap.card.deviations[-1],
        ),
        limits=(
            *KVzap.card.limits,
            "Up to `period` entries are stored beyond the window between two evictions; end_bytes counts them.",
            "A context within the budget sets no threshold, and nothing is dropped after it.",
            "In layers with a sliding window, entries after the context are kept while they are in the window.",
        ),
    )

    graphable: ClassVar[str | None] = "entries are dropped now and then, and the store counts its entries on the host."

    def layer(self, index: int) -> LayerKV:
        """A store of a dense window and a ragged rest; a plain one for other layers."""
        if self.pooled is None or index not in self.pooled:
            return super().layer(index)
        return DelayedKV(ragged=True, bounded=True, slack=self.period, entry_state=("score",))

    def layer_bytes(self, index: int, shape: Shape, entries: int) -> int:
        """Bytes of the entries, of the scores in the window, and of the threshold."""
        layer = shape.layers[index]
        if self.pooled is None or index not in self.pooled:
            return super().layer_bytes(index, shape, entries)
        plain = LayerKV(ragged=True).bytes_for(layer, shape, entries)
        return plain + (min(self.window, entries // 2) * layer.kv_heads + 1) * SCORE_BYTES

    def attend(self, kv: LayerKV, step: Step) -> Tensor:
        """Attention over every entry; predicts the new entries' scores. [B, H_q, T, D_v]"""
        if not isinstance(kv, DelayedKV):
            return super().attend(kv, step)
        kv.get_entry_state("score")[:, :, kv.n - step.key.shape[2] :] = self.predict(step)
        return kv.attend(step)

    def score(self, kv: LayerKV, step: Step) -> Tensor:
        """Predicted scores; infinite for the last tokens. [B, H_kv, n]"""
        if not isinstance(kv, DelayedKV):
            return super().score(kv, step)
        return protect_last(kv.get_entry_state("score"), self.last(step))

    def end_of_layer(self, layers: Sequence[LayerKV], step: Step) -> None:
        """After the last layer, find the threshold over all heads and layers, and drop what lies below it."""
        stores = self.scored(layers, step)
        if self.pooled is None or len(stores) < len(self.pooled):
            return
        assert self.rows is not None
        scores = [x.state.pop("score") for x in stores]
        masks = mark_best(scores, self.rows)
        lowest = [x.masked_fill(~mask, torch.inf).amin((1, 2)).to(scores[0].device)
                  for x, mask in zip(scores, masks, strict=True)]
        threshold = torch.stack(lowest).amin(0)[:, None, None]  # [B, 1, 1]
        for store, mask in zip(stores, masks, strict=True):
            assert isinstance(store, DelayedKV)
            store.retire(mask[..., : store.n - self.last(step)])
            store.state["threshold"] = threshold.to(store.keys.device, copy=True)

    def evict(self, kv: LayerKV, step: Step) -> None:
        """Where a whole period has left the window, keep what reaches the threshold."""
        if step.moment.in_context or not isinstance(kv, DelayedKV):
            super().evict(kv, step)
        elif "threshold" in kv.state and step.moment.is_last:
            late = kv.n - self.last(step)
            if late >= self.period:
                kv.retire(kv.get_entry_state("score")[..., :late] >= kv.state["threshold"])


class DelayedKV(LayerKV):
    """A dense block of the last entries, before it a ragged one that grows as entries leave the dense one."""

    def retire(self, mask: Tensor) -> None:
        """Move the marked ones of the first entries into the ragged block, and drop the others. mask: [B, H_kv, m]"""
        held, first = self._held_with_holes(), mask.shape[2]
        heads = torch.arange(mask.shape[0] * mask.shape[1], device=mask.device).view(*mask.shape[:2], 1)
        parts = [{"head": heads.expand_as(mask)[mask]}]
        parts[0] |= {name: held[name][:, :, :first][mask] for name in ("key", "value", "position") if name in held}
        if (old := self.frozen) is not None:
            parts.insert(0, {"head": torch.repeat_interleave(heads.flatten(), old.offsets.diff().long()),
                             "key": old.key, "value": old.value})
            if old.position is not None:
                parts[0]["position"] = old.position
        joined = {name: torch.cat([x[name] for x in parts]) for name in parts[-1]}
        order = joined.pop("head").argsort(stable=True)
        flat = {name: x[order] for name, x in joined.items()}
        counts = mask.sum(-1).flatten() + (0 if old is None else old.offsets.diff())
        offsets = torch.zeros(counts.numel() + 1, dtype=torch.int32, device=counts.device)
        offsets[1:] = counts.cumsum(0)
        self.frozen = FlatEntries(flat["key"], flat["value"], offsets, counts.tolist(), flat.get("position"), None)
        self.dropped += mask.numel() - int(mask.sum())
        rest = {name: x[:, :, first:] for name, x in held.items()}
        self._replace(rest, self.n - first + self.slack)
