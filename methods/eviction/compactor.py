"""Compactor: blends leverage scores of keys with non-causal attention within blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

import torch
from torch import Tensor

from kvbench.constraints import Ge, Gt, Natural, Positive
from kvbench.method import BudgetKind, Card, Step, Upstream
from kvbench.methods.eviction.leverage import leverage_scores
from kvbench.methods.eviction.noncausal import BlockAttention
from kvbench.selection import require_inverse_rotation
from kvbench.store import LayerKV

if TYPE_CHECKING:
    from kvbench.hf import Model


@dataclass(frozen=True)
class Compactor(BlockAttention):
    """Keeps, per KV head, the outermost tokens and the entries with the best blend of leverage and attention."""

    first: Natural = 8
    """First tokens, which are always kept."""
    last: Natural = 4
    """Last tokens, which are always kept."""
    sketch: Positive = 48
    """Channels of the random projection of the keys; heads with at most as many channels are not projected."""
    ridge: Annotated[float, Gt(0)] = 0.01
    """Added to the diagonal of the keys' Gram matrix."""
    blending: Annotated[float, Ge(0)] | None = None
    """Weight of the leverage score; None: the share of the context that is evicted."""
    seed: int = 0

    signed: ClassVar[bool] = True
    card: ClassVar[Card] = Card(
        name="compactor",
        title="Compactor: Calibrated Query-Agnostic KV Cache Compression with Approximate Leverage Scores",
        idea="Outliers among the keys and tokens that their neighborhood attends to are both worth keeping. "
        "Both scores are standardized and added, and neither needs a question.",
        arxiv="2507.08143",
        year=2025,
        family="eviction",
        stages=("compression",),
        budget=BudgetKind.STORED,
        heads="pooled",
        upstream=Upstream(repo="NVIDIA/kvpress", commit="8bb29b9", license="Apache-2.0"),
        deviations=(
            "Scores are standardized over the heads of a sequence; kvpress does so over the batch.",
            ("All heads and sequences share one projection, and heads of at most `sketch` channels have none; kvpress "
            "draws one for each."),
            "Keys are rotated back, in float64; kvpress projects the hidden states again.",
            ("Tokens that fill up the last block are left out. kvpress sets their logits to 0 as queries and to -1e-9 "
            "as keys, which leaves both in its sums."),
            ("Logits have the model's scale. kvpress and the authors' engine leave it out, and the paper's formula has "
            "none (scaled=false)."),
        ),
        unverified=(
            "We did not have the paper: its numbers and its formula are from summaries of it.",
            ("blending: the paper has 0.3, the authors' engine (vnchari/compactor-vllm) 0.5; the share that is evicted "
            "is kvpress's."),
            "first, last, and value norms as a factor of attention: kvpress's; the paper's formula has no norms.",
        ),
        limits=(
            "It needs rotary embeddings that kvbench can invert.",
            "Soft caps and learned sink logits of the model are not applied: this is not its own attention.",
        ),
    )

    def minimum_entries(self) -> int:
        """The outermost tokens and one entry to choose."""
        return self.first + self.last + 1

    def outer_tokens(self) -> tuple[int, int]:
        """The tokens that are always kept."""
        return self.first, self.last

    def bind(self, model: Model) -> Self:
        """Refuse a model whose rotary embedding cannot be inverted (`UserError`)."""
        require_inverse_rotation(model, self.card.name)
        return self

    def score(self, kv: LayerKV, step: Step) -> Tensor:
        """The blend of both scores; infinite for the outermost tokens. [B, H_kv, n]"""
        attention = self.weigh(kv)
        stop = max(0, kv.n - self.last)
        start = stop - attention.shape[-1]
        scores = torch.full(kv.keys.shape[:3], torch.inf, device=kv.keys.device)
        if start < stop:
            leverage = leverage_scores(
                kv, step, sketch=self.sketch, ridge=self.ridge, seed=self.seed, start=start, stop=stop
            )
            scores[..., start:stop] = self._blend() * standardize(leverage) + standardize(attention)
        return scores

    def _blend(self) -> float:
        if self.blending is not None:
            return self.blending
        assert self.rows is not None and self.length is not None
        return 1 - self.rows / self.length


def standardize(scores: Tensor) -> Tensor:
    """Scores with mean 0 and deviation 1 over the heads and entries of each sequence. [B, H_kv, n]"""
    flat = scores.flatten(1)
    centered = flat - flat.mean(1, keepdim=True)
    deviation = centered.square().sum(1, keepdim=True).div(max(1, flat.shape[1] - 1)).sqrt()
    return (centered / deviation.clamp_min(1e-6)).view_as(scores)
