"""KVzip+: KVzip's attention, weighed by what an entry adds to the hidden state of the query that attends to it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from kvbench.errors import UserError
from kvbench.kernels.column_sums import column_maxima
from kvbench.method import BudgetKind, Card, Step, Upstream
from kvbench.methods.eviction.criticalkv import projected_norms
from kvbench.methods.eviction.kvzip import KVzip, Repeat
from kvbench.store import LayerKV

if TYPE_CHECKING:
    from kvbench.engine.session import Session


@dataclass(frozen=True)
class KVzipPlus(KVzip):
    """Keeps the entries with the highest attention times projected value, relative to the query's hidden state."""

    card: ClassVar[Card] = Card(
        name="kvzip-plus",
        version="2",
        title="KVzap: Fast, Adaptive, and Faithful KV Cache Pruning (the scores KVzip+, of which KVzap is trained)",
        idea="An entry adds its attention times its projected value to the hidden state of a query. "
        "So KVzip's attention is multiplied by the value's length and divided by that of the hidden state.",
        arxiv="2601.07891",
        year=2026,
        family="eviction",
        stages=("compression",),
        budget=BudgetKind.STORED,
        paper_budget="30%",
        heads="pooled",
        upstream=Upstream(repo="NVIDIA/kvpress", commit="8bb29b9", license="Apache-2.0"),
        deviations=(
            *KVzip.card.deviations,
            "The hidden state of a query is the one that its attention layer takes, after the norm, as in kvpress.",
        ),
        limits=(*KVzip.card.limits,
                "It needs the weights of the output projection in memory, in floating point."),
    )

    reads_hidden: ClassVar[bool] = True

    def evict(self, kv: LayerKV, step: Step) -> None:
        """Drop nothing; measure the projected values while the output projection is at hand."""
        if step.moment.compresses and self.rows is not None and self.rows < step.seen:
            kv.state["norm"] = projected_norms(kv.values, step, self.card.name, order=2)

    def prefill(self, session: Session, chunks: Iterable[Tensor]) -> Tensor:
        """As KVzip; the norms are not needed any more afterwards. [B, V]"""
        logits = super().prefill(session, chunks)
        for store in session.layers:
            store.state.pop("norm", None)
        return logits

    def make_pass(self, start: int, stop: int, context: int, protected: int) -> Repeat:
        """The pass that repeats a chunk and weighs its attention."""
        return WeighedRepeat(start, stop, context, protected)


@dataclass(frozen=True)
class WeighedRepeat(Repeat):
    """Records the highest contribution of an entry to any query's hidden state."""

    reads_hidden: ClassVar[bool] = True

    def weigh(self, kv: LayerKV, step: Step, positions: Tensor, gone: int) -> Tensor:
        """The highest weighed attention to the entries at these positions, 0 to those of the repeat. [B, H_kv, n]"""
        if step.hidden is None:
            raise UserError(
                f"kvzip-plus needs the hidden states of layer {step.layer}, and kvbench does not find its attention "
                "module. Use kvzip, which does not need them."
            )
        norms = kv.state["norm"]  # [B, H_kv, G, n]
        group = norms.shape[2]
        keys = kv.keys[:, :, positions - gone].repeat_interleave(group, dim=1)  # a norm per query head
        lengths = step.hidden.float().norm(dim=-1)
        maxima = column_maxima(
            step.query, keys, scale=step.scale, seen=step.seen, window=step.window,
            positions=positions.expand(*keys.shape[:2], -1), softcap=step.softcap, sinks=step.sinks,
            factors=(1 / lengths).masked_fill(lengths == 0, 0.0),  # a query without a hidden state counts as 0
        ).unflatten(1, (-1, group))
        scored = positions < self.context
        maxima[..., scored] *= norms[..., positions[scored] - gone]
        maxima[..., ~scored] = 0
        best: Tensor = maxima.amax(2)
        return best
