"""Quest: each query reads the pages whose keys could match it best, according to bounds on the keys of each page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from torch import Tensor

from kvbench.constraints import Natural, Positive
from kvbench.errors import UserError
from kvbench.method import Budget, BudgetKind, Card, Method, Shape, Step, Upstream, resolved
from kvbench.store import LayerKV
from kvbench.store.paged import PagedKV

LEAST_PAGES = 3
"""The authors' code never selects fewer pages."""


@dataclass(frozen=True)
class Quest(Method):
    """Stores every entry; each query head of each token reads its own top pages, which include the last page."""

    page: Positive = 16
    """Entries per page."""
    skip_layers: Natural | None = None
    """Number of first layers that read everything, 2 in the paper. None: one in 16 layers, at most 2."""

    dense_layers: int | None = resolved()
    """Number of first layers that read everything, as resolved."""

    recompressible: ClassVar[str | None] = "every entry is stored, and each token selects again which pages it reads."
    card: ClassVar[Card] = Card(
        name="quest",
        title="Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference",
        idea="The minimum and maximum of each channel over a page's keys bound every logit that the page can give. "
        "Each query reads only the pages with the highest bounds, and no entry is ever dropped.",
        arxiv="2406.10774",
        year=2024,
        family="retrieval",
        stages=("retrieval",),
        budget=BudgetKind.READ,
        paper_budget="1024",
        heads="independent",
        upstream=Upstream(repo="mit-han-lab/Quest", commit="01c1623", license="MIT"),
        deviations=(
            ("Each token of a question selects its own pages, as if it were decoded, which is how the paper feeds it; "
            "the authors' evaluation reads everything when it is given several tokens at once."),
            ("The page that is still being filled is always read and counts as one of the selected pages, as in the "
            "authors' kernels; their evaluation ranks it, and may leave out the current token."),
            ("In the paper 2 of 32 layers read everything. In a small model 2 layers would be a large share, so by "
            "default one layer in sixteen reads everything, and at most two do."),
        ),
        limits=(
            "It saves reads, not memory: every entry is stored, and the bounds in addition.",
            "The prompt is run with full attention.",
            ("A page that two heads of a group select is read twice; `pages_distinct` of the effect check counts it "
            "once."),
        ),
    )

    def minimum_entries(self) -> int:
        """Three pages."""
        return LEAST_PAGES * self.page

    def fit(self, budget: Budget | None, shape: Shape) -> Self:
        """Resolve the budget and the number of layers that read everything."""
        layers = len(shape.layers)
        skip = min(2, layers // 16) if self.skip_layers is None else self.skip_layers
        if skip >= layers:
            raise UserError(
                f"quest: skip_layers={skip} leaves none of the model's {layers} layers to select pages in. "
                f"Use 0 to {layers - 1}."
            )
        return replace(super().fit(budget, shape), dense_layers=skip)

    def layer(self, index: int) -> LayerKV:
        """A store of pages with bounds, or a plain store in the first layers."""
        return LayerKV() if index < (self.dense_layers or 0) else PagedKV(page=self.page)

    def evict(self, kv: LayerKV, step: Step) -> None:
        """Drop nothing; compute the bounds of the pages at the end of the context."""
        if step.moment.compresses and self.rows is not None and isinstance(kv, PagedKV) and not kv.selective:
            kv.index()

    def attend(self, kv: LayerKV, step: Step) -> Tensor:
        """Attention over the top pages of each query head; over all entries in the context. [B, H_q, T, D_v]"""
        entries = self.entries_in(step.layer, step.window)
        if entries is None or not isinstance(kv, PagedKV) or not kv.selective:
            return kv.attend(step)
        return kv.attend_pages(step, kv.select(step, self._pages(entries)))

    def declared_bytes(self, shape: Shape) -> int:
        """Bytes of every entry and of the bounds."""
        if self.rows is None:
            return shape.full_bytes
        return sum(self.layer_bytes(i, shape, shape.entries(x)) for i, x in enumerate(shape.layers))

    def later_bytes(self, shape: Shape, tokens: int) -> int:
        """Room for whole pages."""
        return super().later_bytes(shape, tokens + self.page)

    def declared_read_bytes(self, shape: Shape) -> int:
        """Bytes of all bounds and of each query head's own pages; all bytes of the layers that read everything."""
        return self._read_bytes(shape, PagedKV.read_bytes_for)

    def least_read_bytes(self, shape: Shape) -> int:
        """The same, with no more pages than the context has."""
        return self._read_bytes(shape, PagedKV.least_read_bytes_for)

    def _read_bytes(self, shape: Shape, in_layer: Callable[..., int]) -> int:
        total = 0
        for index, layer in enumerate(shape.layers):
            store, entries = self.layer(index), self.entries_in(index, layer.window)
            if entries is None or not isinstance(store, PagedKV):
                total += shape.layer_bytes(layer)
            else:
                total += in_layer(store, layer, shape, shape.entries(layer), pages=self._pages(entries))
        return total

    def _pages(self, entries: int) -> int:
        return max(LEAST_PAGES, entries // self.page)
