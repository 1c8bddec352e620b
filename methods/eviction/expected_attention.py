"""Expected attention: scores entries by the attention that queries at future positions are expected to give them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import Tensor

from kvbench.constraints import Natural, Positive
from kvbench.method import BudgetKind, Card, Shape, Step, Upstream
from kvbench.selection import ScoredMethod, group_mean, require_inverse_rotation
from kvbench.store import LayerKV

if TYPE_CHECKING:
    from kvbench.engine.session import Session
    from kvbench.hf import Model

MOMENT_BYTES = 8
"""Per element, in float64."""
AT_ONCE = 512
"""Queries that are rotated back, and keys that are repeated for every query head, at a time: few stay in the cache."""


@dataclass(frozen=True)
class ExpectedAttention(ScoredMethod):
    """Keeps, per KV head, the sinks and the entries with the highest expected attention times value norm."""

    future: Positive = 512
    """Positions after the context over which the rotation is averaged."""
    sinks: Natural = 4
    covariance: bool = True
    value_norm: bool = True
    epsilon: float = 0.0
    """Added to the expected attention before the value's norm weighs it; kvpress has 0 by default, and 0.01 in the
    variant with head budgets that its authors evaluate (`expected_attention` in evaluation/evaluate_registry.py)."""

    card: ClassVar[Card] = Card(
        name="expected-attention",
        title="Expected Attention: KV Cache Compression by Estimating Attention from Future Queries Distribution",
        idea="Future queries are modeled as Gaussian, with the moments of the prompt's queries. "
        "The expected attention to each entry then has a closed form, and the question need not be known.",
        arxiv="2510.00636",
        year=2025,
        family="eviction",
        stages=("compression",),
        budget=BudgetKind.STORED,
        heads="independent",
        upstream=Upstream(repo="NVIDIA/kvpress", commit="8bb29b9", license="Apache-2.0"),
        deviations=(
            ("Queries before rotation are computed by inverse rotation, and their moments accumulate over chunks; "
            "kvpress projects the hidden states again."),
        ),
        limits=("It needs rotary embeddings that kvbench can invert.",),
    )

    def minimum_entries(self) -> int:
        """The sinks and one entry to choose."""
        return self.sinks + 1

    def running_bytes(self, shape: Shape) -> int:
        """Bytes of the moments: a sum and a matrix of outer products per query head, and a count per layer."""
        moments = sum(MOMENT_BYTES * (x.query_heads * x.key_dim * (x.key_dim + 1) + 1) for x in shape.layers)
        return super().running_bytes(shape) + moments

    def bind(self, model: Model) -> Self:
        """Refuse a model whose rotary embedding cannot be inverted (`UserError`)."""
        require_inverse_rotation(model, self.card.name)
        return self

    def attend(self, kv: LayerKV, step: Step) -> Tensor:
        """Attention over every entry; adds the context's queries to the moments. [B, H_q, T, D_v]"""
        if not kv.settled:
            self._observe(kv, step)
        return kv.attend(step)

    def _observe(self, kv: LayerKV, step: Step) -> None:
        parts = zip(step.query.split(AT_ONCE, dim=2), step.positions.split(AT_ONCE, dim=1), strict=True)
        for query, positions in parts:
            plain = step.rope.rotate(query, positions, inverse=True).double()
            plain = plain[:, :, (positions[0] >= self.sinks).nonzero()[:, 0]]
            for name, moment in (
                ("count", torch.tensor(float(plain.shape[2]), dtype=torch.float64, device=plain.device)),
                ("sum", plain.sum(2)),  # [B, H_q, D]
                ("outer", plain.transpose(-1, -2) @ plain),  # [B, H_q, D, D]
            ):
                kv.state[name] = kv.state[name] + moment if name in kv.state else moment

    def end_of_context(self, session: Session) -> None:
        """Drop the moments, unless later compressions need them."""
        if not session.recompress:
            for store in session.layers:
                store.state.clear()

    def score(self, kv: LayerKV, step: Step) -> Tensor:
        """Expected attention times value norm; infinite for the sinks. [B, H_kv, n]"""
        count = kv.state["count"].clamp_min(1)
        mean = kv.state["sum"] / count  # [B, H_q, D]
        spread = kv.state["outer"] / count - mean[..., None] * mean[..., None, :]
        turn = self._mean_rotation(step)
        mean = (turn @ mean[..., None])[..., 0]
        logits = self._logits(kv, mean, turn @ spread @ turn.transpose(-1, -2), step.scale)
        # The first entries are the first tokens, unless a window has slid past them.
        places = torch.arange(kv.n, device=kv.keys.device) if step.window is None else kv.logical_positions()
        protected = (places < self.sinks).expand(kv.keys.shape[:3])
        group = logits.shape[1] // kv.keys.shape[1]
        logits = logits.masked_fill(protected.repeat_interleave(group, dim=1), -torch.inf)
        weights = group_mean(logits.softmax(-1), kv.keys.shape[1]).float()  # [B, H_kv, n]
        if self.value_norm:
            weights = (weights + self.epsilon) * kv.values.float().norm(dim=-1)
        return weights.masked_fill(protected, torch.inf)

    def _mean_rotation(self, step: Step) -> Tensor:
        """The mean rotation over future positions, as a matrix on the head dimension. [D, D]"""
        found = torch.eye(step.query.shape[-1], dtype=torch.float64, device=step.query.device)
        positions = torch.arange(step.seen, step.seen + self.future, device=found.device)
        if (terms := step.rope.terms(positions[None])) is not None:
            cos, sin = (x[0].double().mean(0) for x in terms[:2])
            channel = torch.arange(len(cos), device=found.device)
            found[channel, channel] = cos
            found[channel, terms[2]] = sin
        return found

    def _logits(self, kv: LayerKV, mean: Tensor, spread: Tensor, scale: float) -> Tensor:
        """The log of the expected exponential of the logit of each entry. [B, H_q, n]"""
        parts = []
        for block in kv.keys.split(AT_ONCE, dim=2):
            keys = block.double().repeat_interleave(mean.shape[1] // block.shape[1], dim=1)
            logits = (keys @ mean[..., None])[..., 0] * scale
            if self.covariance:
                logits = logits + ((keys @ spread) * keys).sum(-1) * scale**2 / 2
            parts.append(logits)
        return torch.cat(parts, dim=-1)
