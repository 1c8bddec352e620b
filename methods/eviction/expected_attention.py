"""Expected attention: what queries like those so far would attend to from the positions to come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import Tensor

from kvbench.constraints import Natural, Positive
from kvbench.errors import UserError
from kvbench.method import BudgetKind, Card, Shape, Step, Upstream
from kvbench.selection import ScoredMethod, group_mean
from kvbench.store import LayerKV

if TYPE_CHECKING:
    from kvbench.engine.session import Session
    from kvbench.hf import Model

MOMENT_BYTES = 8
AT_ONCE = 4096
"""Entries whose keys stand in float64, one copy for every query head, at a time."""


@dataclass(frozen=True)
class ExpectedAttention(ScoredMethod):
    """Keeps, per KV head, the sinks and the entries with the greatest expected attention times value norm."""

    future: Positive = 512
    """Positions after the context over which the rotation is averaged."""
    sinks: Natural = 4
    covariance: bool = True
    value_norm: bool = True
    epsilon: float = 0.0

    card: ClassVar[Card] = Card(
        name="expected-attention",
        title="Expected Attention: KV Cache Compression by Estimating Attention from Future Queries Distribution",
        idea="Future queries are taken to be Gaussian, with the moments of the prompt's. "
        "The expected attention of each entry then has a closed form, and no question needs to be known.",
        arxiv="2510.00636",
        year=2025,
        family="eviction",
        stages=("compression",),
        budget=BudgetKind.STORED,
        heads="independent",
        upstream=Upstream(repo="NVIDIA/kvpress", commit="8bb29b9", license="Apache-2.0"),
        deviations=(
            ("Queries before rotation come from inverse rotation of the rotated ones, as running moments over chunks; "
            "kvpress projects the hidden states again."),
        ),
        limits=("Needs rotary embeddings that kvbench understands.",),
    )

    def minimum_entries(self) -> int:
        """The sinks and an entry to choose."""
        return self.sinks + 1

    def running_bytes(self, shape: Shape) -> int:
        """The moments of every layer, in float64: a mean and a covariance for each query head, and a count."""
        return sum(MOMENT_BYTES * (x.query_heads * x.key_dim * (x.key_dim + 1) + 1) for x in shape.layers)

    def bind(self, model: Model) -> Self:
        """Refuse a model whose rotation cannot be taken off its queries."""
        if not all(rope.trusted for rope in model.ropes):
            raise UserError(
                f"expected-attention takes the rotation off queries, and that of {model.id} is not understood on every "
                "layer. Use a method that leaves it on, such as knorm."
            )
        return self

    def attend(self, kv: LayerKV, step: Step) -> Tensor:
        """Attention over every entry; the context's queries leave their moments behind. [B, H_q, T, D_v]"""
        if not kv.settled:
            self._observe(kv, step)
        return kv.attend(step)

    def _observe(self, kv: LayerKV, step: Step) -> None:
        plain = step.rope.rotate(step.query, step.positions, inverse=True).double()
        plain = plain[:, :, (step.positions[0] >= self.sinks).nonzero()[:, 0]]
        for name, moment in (
            ("count", torch.tensor(float(plain.shape[2]), dtype=torch.float64, device=plain.device)),
            ("sum", plain.sum(2)),  # [B, H_q, D]
            ("outer", plain.transpose(-1, -2) @ plain),  # [B, H_q, D, D]
        ):
            kv.state[name] = kv.state[name] + moment if name in kv.state else moment

    def end_of_context(self, session: Session) -> None:
        """The moments go, unless later compressions are to rank the context's entries by its queries too."""
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
        # The first entries are the first tokens, which always stay, but where a window slides past them.
        places = torch.arange(kv.n, device=kv.keys.device) if step.window is None else kv.logical_positions()
        certain = (places < self.sinks).expand(kv.keys.shape[:3])
        group = logits.shape[1] // kv.keys.shape[1]
        logits = logits.masked_fill(certain.repeat_interleave(group, dim=1), -torch.inf)
        weights = group_mean(logits.softmax(-1), kv.keys.shape[1]).float()  # [B, H_kv, n]
        if self.value_norm:
            weights = (weights + self.epsilon) * kv.values.float().norm(dim=-1)
        return weights.masked_fill(certain, torch.inf)

    def _mean_rotation(self, step: Step) -> Tensor:
        """The average of the rotations of the positions to come, as a matrix on the head dimension. [D, D]"""
        width = step.query.shape[-1]
        positions = torch.arange(step.seen, step.seen + self.future, device=step.query.device)
        units = torch.eye(width, device=step.query.device)[None, :, None].expand(1, -1, self.future, -1)  # [1, D, F, D]
        return step.rope.rotate(units, positions[None]).double().mean(2)[0].T

    def _logits(self, kv: LayerKV, mean: Tensor, spread: Tensor, scale: float) -> Tensor:
        """The log of the expected exponential of each entry's logit. [B, H_q, n]"""
        parts = []
        for rows in kv.keys.split(AT_ONCE, dim=2):
            keys = rows.double().repeat_interleave(mean.shape[1] // rows.shape[1], dim=1)
            logits = (keys @ mean[..., None])[..., 0] * scale
            if self.covariance:
                logits = logits + ((keys @ spread) * keys).sum(-1) * scale**2 / 2
            parts.append(logits)
        return torch.cat(parts, dim=-1)
