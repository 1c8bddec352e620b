"""Leverage scores: keeps the entries whose keys before rotation are outliers of the head's keys."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

import torch
from torch import Tensor

from kvbench.constraints import Gt, Positive
from kvbench.method import BudgetKind, Card, Step, Upstream
from kvbench.selection import ScoredMethod, require_inverse_rotation
from kvbench.store import LayerKV
from kvbench.store.scores import plain_keys

if TYPE_CHECKING:
    from kvbench.hf import Model

AT_ONCE = 4096
"""Keys converted to float64 at a time."""


@dataclass(frozen=True)
class Leverage(ScoredMethod):
    """Keeps, per KV head, the entries with the highest statistical leverage of their keys before rotation."""

    sketch: Positive = 48
    """Channels of the random projection of the keys; heads with at most as many channels are not projected."""
    ridge: Annotated[float, Gt(0)] = 0.01
    """Added to the diagonal of the keys' Gram matrix."""
    seed: int = 0

    card: ClassVar[Card] = Card(
        name="leverage",
        title="Compactor: Calibrated Query-Agnostic KV Cache Compression with Approximate Leverage Scores",
        idea="A key with high leverage cannot be written as a combination of the others. "
        "Such keys are kept, without regard to any query; a random projection makes the scores cheap.",
        arxiv="2507.08143",
        year=2025,
        family="eviction",
        stages=("compression",),
        budget=BudgetKind.STORED,
        heads="independent",
        upstream=Upstream(repo="NVIDIA/kvpress", commit="8bb29b9", license="Apache-2.0"),
        deviations=(
            "One part of Compactor alone, as kvpress offers it.",
            ("All heads and sequences share one projection, and heads of at most `sketch` channels have none; kvpress "
            "draws one for each."),
            "Keys are rotated back, in float64; kvpress projects the hidden states again.",
        ),
        unverified=("ridge: kvpress's; the authors' engine (vnchari/compactor-vllm) has 0.005.",),
        limits=("It needs rotary embeddings that kvbench can invert.",),
    )

    def bind(self, model: Model) -> Self:
        """Refuse a model whose rotary embedding cannot be inverted (`UserError`)."""
        require_inverse_rotation(model, self.card.name)
        return self

    def score(self, kv: LayerKV, step: Step) -> Tensor:
        """Approximate leverage of each key. [B, H_kv, n]"""
        return leverage_scores(kv, step, sketch=self.sketch, ridge=self.ridge, seed=self.seed)


def leverage_scores(
    kv: LayerKV, step: Step, *, sketch: int, ridge: float, seed: int, start: int = 0, stop: int | None = None
) -> Tensor:
    """Diagonal of X (X'X + ridge)^-1 X' for the centered and projected keys X of some entries. [B, H_kv, n]"""
    stop = kv.n if stop is None else stop
    blocks = [(low, min(low + AT_ONCE, stop)) for low in range(start, stop, AT_ONCE)]
    width = kv.keys.shape[3]
    project = torch.eye(width, dtype=torch.float64)
    if sketch < width:
        generator = torch.Generator().manual_seed(seed)
        project = torch.randn(width, sketch, generator=generator, dtype=torch.float64) / math.sqrt(sketch)
    project = project.to(kv.keys.device)

    @functools.lru_cache(maxsize=1)  # a context of one block is rotated back once and not three times
    def read(low: int, high: int) -> Tensor:
        return plain_keys(kv, step, low, high).double() @ project

    mean = sum((read(*x).sum(2, keepdim=True) for x in blocks), start=project.new_zeros(())) / (stop - start)
    gram = ridge * torch.eye(project.shape[1], dtype=torch.float64, device=project.device)
    for block in blocks:
        centered = read(*block) - mean
        gram = gram + centered.mT @ centered  # [B, H_kv, k, k]
    root = torch.linalg.cholesky(gram)
    parts = []
    for block in blocks:  # |L^-1 x|^2 = x' (LL')^-1 x
        solved = torch.linalg.solve_triangular(root, (read(*block) - mean).mT, upper=False)
        parts.append(solved.square().sum(-2).float())
    return torch.cat(parts, dim=-1)
