"""Key norm: keeps entries with small keys, which receive much attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.method import BudgetKind, Card, Step, Upstream
from kvbench.selection import ScoredMethod
from kvbench.store import LayerKV


@dataclass(frozen=True)
class Knorm(ScoredMethod):
    """Keeps, per KV head, the entries with the smallest key norm."""

    card: ClassVar[Card] = Card(
        name="knorm",
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
            "Every layer is compressed, as in kvpress; the paper does not compress the first layers.",
            "Norms are rounded to four decimals, so that equal tokens in layer 0 tie and the first one is kept.",
        ),
        unverified=("The layers that the paper leaves out are stated from memory.",),
    )

    def score(self, kv: LayerKV, step: Step) -> Tensor:
        """The negative norm of each key; rounded, so that equal tokens of the first layer tie. [B, H_kv, n]"""
        norm: Tensor = torch.linalg.vector_norm(kv.keys.float(), dim=-1)
        return -norm.round(decimals=4)
