"""TOVA: at every step, drops the entry that the latest query attends to least."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvbench.method import BudgetKind, Card, Step, Upstream
from kvbench.selection import RollingMethod
from kvbench.store import LayerKV
from kvbench.store.scores import attention_mass_of


@dataclass(frozen=True)
class TOVA(RollingMethod):
    """Keeps the entries that the last query attends to most, the same for all heads of a layer, at every step."""

    card: ClassVar[Card] = Card(
        name="tova",
        title="Transformers are Multi-State RNNs",
        idea="A decoder with a bounded cache is an RNN with several states. "
        "At every step the state that the latest query, averaged over heads, attends to least is dropped.",
        arxiv="2401.06104",
        year=2024,
        family="eviction",
        stages=("compression",),
        budget=BudgetKind.STORED,
        paper_budget="512",
        heads="pooled",
        upstream=Upstream(repo="schwartz-lab-NLP/TOVA", commit=None, license=None),
        deviations=("The prompt is compressed once, by its last query, as in the authors' code.",),
        limits=("No entry is protected, not even the newest.",),
    )

    graphable: ClassVar[str | None] = None

    def layer(self, index: int) -> LayerKV:
        """A store in which entries are dropped in place."""
        return LayerKV(bounded=True)

    def score(self, kv: LayerKV, step: Step, entries: int) -> Tensor:
        """Attention of the last query, mean over heads. [B, H_kv, n]"""
        mass = attention_mass_of(step.query[:, :, -1:], kv, step)
        return mass.mean(1, keepdim=True).expand(-1, kv.keys.shape[1], -1)
