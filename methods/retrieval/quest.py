"""Quest: each query reads the pages whose keys could match it best, judged by bounds of every page's keys."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from torch import Tensor

from kvbench.constraints import Natural, Positive
from kvbench.errors import UserError
from kvbench.method import Budget, BudgetKind, Card, Method, Shape, Step, Upstream, resolved
from kvbench.store import LayerKV
from kvbench.store.paged import PagedKV

LEAST_PAGES = 3
"""The authors' code never selects fewer."""


@dataclass(frozen=True)
class Quest(Method):
    """Holds every entry; every query head of every token reads its own top pages, its own page always among them."""

    page: Positive = 16
    """Entries per page."""
    skip_layers: Natural | None = None
    """First layers that read everything: 2 in the paper, none: 2 of models with 32 layers or more, fewer of smaller."""

    dense_layers: int | None = resolved()
    """First layers that read everything, as resolved."""

    recompressible: ClassVar[str | None] = "every entry is held, and each token selects anew what it reads."
    card: ClassVar[Card] = Card(
        name="quest",
        title="Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference",
        idea="The minimum and maximum of each channel over a page's keys bound every logit that the page can give. "
        "Each query reads only the pages with the highest bounds, and nothing is ever thrown away.",
        arxiv="2406.10774",
        year=2024,
        family="retrieval",
        stages=("retrieval",),
        budget=BudgetKind.READ,
        paper_budget="1024",
        heads="independent",
        upstream=Upstream(repo="mit-han-lab/Quest", commit=None, license=None),
        deviations=(
            ("A question's tokens select one by one, as if they were decoded, which is how the paper feeds them; "
            "the authors' evaluation reads everything when it is given several tokens at once."),
            ("The page that is still written to is always read and counts as one of the selected, as in the authors' "
            "kernels; their evaluation ranks it, and may leave out the current token."),
            ("Two dense layers of the paper's 32 would be most of a small model, so by default one layer in sixteen is "
            "dense, and two at most."),
        ),
        limits=(
            "Saves reads, not memory: every entry is held, and the bounds next to them.",
            "The prompt itself is run with full attention.",
            ("A page that two heads of a group select is read for both; `pages_distinct` of the effect counts it "
            "once."),
        ),
    )

    def minimum_entries(self) -> int:
        """Three pages."""
        return LEAST_PAGES * self.page

    def fit(self, budget: Budget | None, shape: Shape) -> Self:
        """Resolve the budget and the dense layers."""
        layers = len(shape.layers)
        skip = min(2, layers // 16) if self.skip_layers is None else self.skip_layers
        if skip >= layers:
            raise UserError(
                f"quest: skip_layers={skip} leaves none of the model's {layers} layers to select pages in. "
                f"Use 0 to {layers - 1}."
            )
        return replace(super().fit(budget, shape), dense_layers=skip)

    def layer(self, index: int) -> LayerKV:
        """Pages with bounds, but plain entries in the first layers."""
        return LayerKV() if index < (self.dense_layers or 0) else PagedKV(page=self.page)

    def evict(self, kv: LayerKV, step: Step) -> None:
        """Nothing is dropped. At the end of the context, pages get their bounds."""
        if step.moment.compresses and self.rows is not None and isinstance(kv, PagedKV) and not kv.selective:
            kv.index()

    def attend(self, kv: LayerKV, step: Step) -> Tensor:
        """Attention over each query head's top pages, and over everything before the context is complete."""
        rows = self.entries_in(step.layer, step.window)
        if rows is None or not isinstance(kv, PagedKV) or not kv.selective:
            return kv.attend(step)
        return kv.attend_pages(step, kv.select(step, self._pages(rows)))

    def declared_bytes(self, shape: Shape) -> int:
        """Every entry, and the bounds of the pages."""
        if self.rows is None:
            return shape.full_bytes
        return sum(self.layer_bytes(i, shape, shape.rows(x)) for i, x in enumerate(shape.layers))

    def declared_read_bytes(self, shape: Shape) -> int:
        """All bounds, and every query head's own pages; dense layers whole."""
        total = 0
        for index, layer in enumerate(shape.layers):
            store, entries = self.layer(index), self.entries_in(index, layer.window)
            if entries is None or not isinstance(store, PagedKV):
                total += shape.layer_bytes(layer)
            else:
                total += store.read_bytes_for(layer, shape, shape.rows(layer), pages=self._pages(entries))
        return total

    def _pages(self, entries: int) -> int:
        return max(LEAST_PAGES, entries // self.page)
