"""SnapKV: keeps the entries that the last tokens of the prompt attend to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import Tensor

from kvbench.constraints import Ge, Odd, Positive
from kvbench.method import BudgetKind, Card, Step, Upstream
from kvbench.selection import Pool, ScoredMethod, group_mean, pool_before
from kvbench.store import LayerKV
from kvbench.store.scores import attention_mass_of


@dataclass(frozen=True)
class SnapKV(ScoredMethod):
    """Keeps, per KV head, the observation window and the entries that its queries put most attention on."""

    window: Positive = 32
    kernel: Annotated[int, Ge(1), Odd] = 7
    pool: Pool = "max"

    card: ClassVar[Card] = Card(
        name="snapkv",
        version="2",
        title="SnapKV: LLM Knows What You are Looking for Before Generation",
        idea="The attention of the last prompt tokens predicts which entries generation will attend to. "
        "Scores are pooled so that neighbors of a peak are kept too, and each head keeps its best entries.",
        arxiv="2404.14469",
        year=2024,
        family="eviction",
        stages=("compression",),
        budget=BudgetKind.STORED,
        paper_budget="1024",
        heads="independent",
        upstream=Upstream(repo="FasterDecoding/SnapKV", commit="e216ddc8", license="MIT"),
        deviations=(
            ("Scores are averaged over the query heads of a KV head, then pooled, and entries are kept per KV head, as "
            "in the grouped code of PyramidKV's and Ada-KV's authors; SnapKV's own code repeats keys and keeps entries "
            "per query head. kvpress pools first, which is the same for its average pooling only."),
            "Scores stay in float32 through top-k; the authors' code casts to the model's type, which creates ties.",
            "Defaults are those of the paper's LongBench tables (window 32, kernel 7, max).",
        ),
        limits=("Entries are chosen by the last tokens: a question that is asked later does not affect the choice.",),
    )

    def minimum_entries(self) -> int:
        """The window and one entry to choose."""
        return self.window + 1

    def layer(self, index: int) -> LayerKV:
        """A store that also keeps the last queries, until the compression."""
        return LayerKV(queries=self.window)

    def score(self, kv: LayerKV, step: Step) -> Tensor:
        """Pooled mean attention of the window's queries; infinite in the window. [B, H_kv, n]"""
        assert kv.recent_queries is not None
        mass = group_mean(attention_mass_of(kv.recent_queries, kv, step), kv.keys.shape[1])
        return pool_before(mass / self.window, self.window, self.kernel, self.pool)
