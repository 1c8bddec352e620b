"""Key norm: small keys receive much attention, so they stay."""

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
        idea="Keys with a small norm tend to receive much attention, whatever the query. "
        "So the norm ranks entries before any question is known, at the cost of reading the keys once.",
        arxiv="2406.11430",
        year=2024,
        family="eviction",
        stages=("compression",),
        budget=BudgetKind.STORED,
        heads="independent",
        upstream=Upstream(repo="alessiodevoto/l2compress", commit=None, license=None),
        deviations=(
            "Every layer is compressed, as kvpress does; the paper leaves the first layers whole.",
            "Norms are rounded to four decimals, so that equal tokens of the first layer tie and the first one stays.",
        ),
        unverified=("Which layers the paper leaves out is from memory.",),
    )

    def score(self, kv: LayerKV, step: Step) -> Tensor:
        """The negative norm of each key; rounded, so that equal tokens of the first layer tie. [B, H_kv, n]"""
        norm: Tensor = torch.linalg.vector_norm(kv.keys.float(), dim=-1)
        return -norm.round(decimals=4)
