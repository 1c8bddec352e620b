"""StreamingLLM: keeps the first tokens, which receive much attention, and a rolling window of the last."""

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
    """Keeps `sinks` first entries and the last entries up to the budget, also while decoding."""

    sinks: Natural = 4
    positions: Literal["cache", "original"] = "cache"
    """Positions for distances: those in the cache (the paper), or those in the text."""

    card: ClassVar[Card] = Card(
        name="streaming-llm",
        title="Efficient Streaming Language Models with Attention Sinks",
        idea="The first few tokens receive much attention whatever they are, and dropping them breaks the model. "
        "Keeping them and a sliding window of recent tokens allows endless streaming in constant memory.",
        arxiv="2309.17453",
        year=2023,
        family="eviction",
        stages=("compression",),
        budget=BudgetKind.STORED,
        paper_budget="2004",
        heads="pooled",
        upstream=Upstream(repo="mit-han-lab/streaming-llm", commit=None, license="MIT"),
        deviations=(
            ("The prompt is run with full attention and pruned at its end, as SCBench and kvpress do, and so is a "
            "later question, on the entries that are left; the authors' chat driver makes room before a turn."),
            ("Keys are cached after rotation. Only relative distance matters, so the original keys of the sinks are "
            "rotated towards the window, instead of every key to its position in the cache."),
        ),
        limits=(
            "The middle of the text is lost.",
            ("Sliding layers whose window is shorter than the context keep only recent entries: the first tokens are "
            "outside. Longer windows keep sinks until the conversation outgrows them."),
        ),
    )

    recompressible: ClassVar[str | None] = "the oldest entries are already dropped after every forward pass."
    stepwise: ClassVar[bool] = True

    def minimum_entries(self) -> int:
        """The sinks and one recent entry."""
        return self.sinks + 1

    def bind(self, model: Model) -> Self:
        """Refuse `positions=cache` for a model whose keys cannot be moved (`UserError`)."""
        if self.positions == "cache" and not all(rope.trusted and rope.movable for rope in model.ropes):
            raise UserError(
                f"streaming-llm with positions=cache moves keys, and those of {model.id} cannot be moved: its "
                "positions are learned, or its rotation is not understood. Use --set positions=original."
            )
        return self

    def layer(self, index: int) -> LayerKV:
        """A store with positions, whose slots are reused while decoding."""
        return LayerKV(track=True, bounded=True)

    def layer_bytes(self, index: int, shape: Shape, entries: int) -> int:
        """Declared bytes of the entries and, if entries are dropped, of the sinks' original keys."""
        total, layer = super().layer_bytes(index, shape, entries), shape.layers[index]
        if self.positions == "cache" and entries < shape.entries(layer):
            total += self._sinks(entries, layer.window) * layer.kv_heads * layer.key_dim * shape.itemsize
        return total

    def _sinks(self, entries: int, window: int | None) -> int:
        """Number of sinks in a budget: none if a window hides them, and at least one entry is a recent one."""
        return min(self.sinks, entries - 1) if self.sees_context(window) else 0

    def attend(self, kv: LayerKV, step: Step) -> Tensor:
        """Attention with the sinks rotated to their distance in the cache. [B, H_q, T, D_v]"""
        if "sinks" in kv.state:
            original, positions = kv.state["sinks"], kv.positions
            assert positions is not None
            gone = (step.positions[:, -1:] - positions[:, 0, :1] + 1 - kv.n).expand(-1, original.shape[2])
            kv.keys[:, :, : original.shape[2]] = step.rope.shift(original, gone)
        return kv.attend(step)

    def evict(self, kv: LayerKV, step: Step) -> None:
        """Drop the oldest entries after the sinks, at the end of the context and after every later forward pass."""
        entries = self.entries_in(step.layer, step.window)
        if entries is None or entries >= kv.n or not step.moment.is_last:
            return
        batch, heads = kv.keys.shape[:2]
        sinks = self._sinks(entries, step.window)
        if self.positions == "cache" and sinks and "sinks" not in kv.state:
            kv.state["sinks"] = kv.keys[:, :, :sinks].clone()
        if step.moment.in_context:
            index = torch.arange(kv.n, device=kv.keys.device)
            kept = torch.cat([index[:sinks], index[kv.n - (entries - sinks) :]])
            kv.keep(kept.expand(batch, heads, -1))
            return
        assert kv.positions is not None
        recent = kv.positions[..., sinks:].topk(kv.n - entries, dim=-1, largest=False).indices
        kv.drop(recent + sinks)
