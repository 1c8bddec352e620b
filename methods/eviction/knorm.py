"""Key norm: keeps entries with small keys, which receive much attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.method import BudgetKind, Card, Step, Upstream
from kvbench.selection import ScoredMethod
from kvbench.store import LayerKV

ROUNDING = 1e-6
"""The relative difference below which two norms tie."""


@dataclass(frozen=True)
class Knorm(ScoredMethod):
    """Keeps, per KV head, the entries with the smallest key norm."""

    signed: ClassVar[bool] = True
    card: ClassVar[Card] = Card(
        name="knorm",
        version="2",
        title="A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression",
        idea="Keys with a small norm tend to receive much attention from any query. "
        "So the norm ranks entries before the question is known, and the keys need to be read only once.",
        arxiv="2406.11430",
        year=2024,
        family="eviction",
        stages=("compression",),
        budget=BudgetKind.STORED,
        heads="independent",
        upstream=Upstream(repo="alessiodevoto/l2compress", commit=None, license=None),
        deviations=(
            ("Every layer is compressed, as in kvpress. The authors' README leaves out the first two, and their needle "
            "script the first one."),
            ("Norms that differ by less than a millionth of their size tie, and the first entry is kept: a rotation "
            "changes the norms of equal tokens in layer 0 by rounding alone."),
        ),
    )

    def score(self, kv: LayerKV, step: Step) -> Tensor:
        """The negative norm of each key. [B, H_kv, n]"""
        return -tie(torch.linalg.vector_norm(kv.keys.float(), dim=-1))


def tie(norms: Tensor) -> Tensor:
    """Replace norms that differ by rounding alone by the smallest of them. [..., n]"""
    ordered, order = norms.sort(dim=-1)
    differs = ordered.diff(dim=-1, prepend=torch.full_like(ordered[..., :1], -torch.inf)) > ordered * ROUNDING
    smallest = torch.where(differs, ordered, 0).cummax(dim=-1).values
    return torch.empty_like(norms).scatter_(-1, order, smallest)
