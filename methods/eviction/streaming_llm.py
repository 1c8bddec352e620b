"""StreamingLLM: the first tokens, which collect attention, and a rolling window of the last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import torch
from torch import Tensor

from kvbench.constraints import Natural
from kvbench.errors import UserError
from kvbench.method import BudgetKind, Card, Method, Shape, Step, Upstream
from kvbench.store import LayerKV

if TYPE_CHECKING:
    from kvbench.hf import Model


@dataclass(frozen=True)
class StreamingLLM(Method):
    """Keeps `sinks` first entries and the last entries up to the budget, while decoding too."""

    sinks: Natural = 4
    positions: Literal["cache", "original"] = "cache"
    """Distances as in the cache (the paper), or as in the text."""

    card: ClassVar[Card] = Card(
        name="streaming-llm",
        title="Efficient Streaming Language Models with Attention Sinks",
        idea="The first few tokens collect attention whatever they say, and dropping them breaks the model. "
        "Keeping them next to a sliding window of recent tokens streams for ever in constant memory.",
        arxiv="2309.17453",
        year=2023,
        family="eviction",
        stages=("compression",),
        budget=BudgetKind.STORED,
        paper_budget="2004",
        heads="pooled",
        upstream=Upstream(repo="mit-han-lab/streaming-llm", commit=None, license="MIT"),
        deviations=(
            ("The prompt is run with full attention and pruned at its end, as SCBench and kvpress do; "
            "the authors' chat driver evicts before a turn."),
            ("Keys are cached with their rotation. Only relative distance matters, so the sinks are turned towards the "
            "window, from their original keys, instead of every key towards zero."),
        ),
        limits=(
            "The middle of the text is gone for ever.",
            ("Sliding layers whose window is shorter than the context keep recent entries only: the first tokens are "
            "outside. Those with a longer window keep sinks, which go out of sight once the conversation outgrows it."),
        ),
    )

    recompressible: ClassVar[str | None] = "the oldest entries are dropped after every forward as it is."
    graphable: ClassVar[str | None] = "an entry is dropped in every step, and the store counts its entries on the host."

    def minimum_entries(self) -> int:
        """The sinks and a recent entry."""
        return self.sinks + 1

    def bind(self, model: Model) -> Self:
        """Refuse distances as in the cache where a model's keys cannot be moved."""
        if self.positions == "cache" and not all(rope.trusted and rope.movable for rope in model.ropes):
            raise UserError(
                f"streaming-llm with positions=cache moves keys, and those of {model.id} cannot be moved: its "
                "positions are learned, or its rotation is not understood. Use --set positions=original."
            )
        return self

    def layer(self, index: int) -> LayerKV:
        """Entries whose slots are reused while decoding; positions tell which is oldest."""
        return LayerKV(track=True, bounded=True)

    def layer_bytes(self, index: int, shape: Shape, entries: int) -> int:
        """The entries, and the sinks' original keys where others were dropped."""
        total, layer = super().layer_bytes(index, shape, entries), shape.layers[index]
        if self.positions == "cache" and entries < shape.rows(layer):
            total += self._sinks(entries, layer.window) * layer.kv_heads * layer.key_dim * shape.itemsize
        return total

    def _sinks(self, rows: int, window: int | None) -> int:
        """First entries kept of a budget: a window may hide them, and one entry is always a recent one."""
        return min(self.sinks, rows - 1) if self.sees_context(window) else 0

    def attend(self, kv: LayerKV, step: Step) -> Tensor:
        """Attention with the sinks as near as the cache has them. [B, H_q, T, D_v]"""
        if "sinks" in kv.state:
            original = kv.state["sinks"]
            gone = torch.full_like(step.positions[:, :1], step.seen - kv.n).expand(-1, original.shape[2])
            kv.keys[:, :, : original.shape[2]] = step.rope.shift(original, gone)
        return kv.attend(step)

    def evict(self, kv: LayerKV, step: Step) -> None:
        """The oldest entries after the sinks, at the end of the context and after every later forward."""
        rows = self.entries_in(step.layer, step.window)
        if rows is None or rows >= kv.n or not step.moment.is_last:
            return
        batch, heads = kv.keys.shape[:2]
        sinks = self._sinks(rows, step.window)
        if self.positions == "cache" and sinks and "sinks" not in kv.state:
            kv.state["sinks"] = kv.keys[:, :, :sinks].clone()
        if step.moment.in_context:
            index = torch.arange(kv.n, device=kv.keys.device)
            kept = torch.cat([index[:sinks], index[kv.n - (rows - sinks) :]])
            kv.keep(kept.expand(batch, heads, -1))
            return
        assert kv.positions is not None
        recent = kv.positions[..., sinks:].topk(kv.n - rows, dim=-1, largest=False).indices
        kv.drop(recent + sinks)
