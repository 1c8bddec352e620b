"""KeyDiff: keeps entries whose keys differ from the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from kvbench.method import BudgetKind, Card, Step
from kvbench.selection import ScoredMethod
from kvbench.store import LayerKV


@dataclass(frozen=True)
class KeyDiff(ScoredMethod):
    """Keeps, per KV head, the entries whose keys are least similar to the mean direction of all keys."""

    signed: ClassVar[bool] = True
    card: ClassVar[Card] = Card(
        name="keydiff",
        title="KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference",
        idea="Geometrically distinctive keys receive much attention, and similar keys can replace each other. "
        "Entries whose keys are least similar to the mean direction are kept.",
        arxiv="2504.15364",
        year=2025,
        family="eviction",
        stages=("compression",),
        budget=BudgetKind.STORED,
        heads="independent",
        upstream=None,
        deviations=(
            "Compressed once, at the end of the context; the paper also evicts while a prompt arrives in blocks.",
        ),
    )

    def score(self, kv: LayerKV, step: Step) -> Tensor:
        """The negative cosine of each key to the mean of the normalized keys. [B, H_kv, n]"""
        keys = F.normalize(kv.keys.float(), dim=-1)
        return -F.cosine_similarity(keys, keys.mean(dim=2, keepdim=True), dim=-1)
