"""IndexCache: some layers choose pages, and the layers after them read the same ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from kvbench.constraints import Positive
from kvbench.errors import UserError
from kvbench.kernels.page_select import page_scores, select_pages
from kvbench.method import Budget, BudgetKind, Card, Shape, Step, Upstream
from kvbench.methods.retrieval.quest import Quest
from kvbench.store import LayerKV
from kvbench.store.paged import PagedKV


@dataclass(frozen=True)
class IndexCache(Quest):
    """Quest whose bounds exist in some layers only; layers between them reuse the pages of the last one before."""

    every: Positive = 4
    """The first two of the layers that select choose for themselves; after them, one layer in this many does."""
    pattern: str | None = None
    """F for a layer that chooses and S for one that shares, for each layer that selects; None: by `every`."""
    sets: Literal["layer", "head"] = "layer"
    """Whether all heads of a layer read the same pages, or head h of a sharing layer those of head h."""

    shares_layers: ClassVar[bool] = True
    card: ClassVar[Card] = Card(
        name="indexcache",
        title="IndexCache: Accelerating Sparse Attention via Cross-Layer Index Reuse",
        idea="Neighboring layers choose nearly the same entries, so only some of them need an index. "
        "The others read the entries that the last of these layers chose.",
        arxiv="2603.12201",
        year=2026,
        family="retrieval",
        stages=("retrieval",),
        budget=BudgetKind.READ,
        heads="pooled",
        upstream=Upstream(repo="THUDM/IndexCache", commit="08d22d6", license="Apache-2.0"),
        deviations=(
            ("The paper's index is the trained one of DeepSeek's sparse attention, which chooses single entries. Here "
            "it is Quest's bounds of pages, which need no training."),
            ("Heads of different layers do not correspond, so by default all heads read the pages with the largest "
            "mean share of their bounds."),
            "The pattern is regular unless it is given; the paper's search removes the layers that cost least.",
            "A prompt is run with full attention; the paper shares indices there, too.",
            ("By default one layer in sixteen, and at most two, reads everything, as in quest; the authors' pattern "
            "starts with the model's first layer."),
            "Each token of a question chooses its own pages, as if it were decoded.",
        ),
        limits=(
            "It saves reads, not memory: every entry is stored, and the bounds of the layers that choose in addition.",
            "All layers must have the same sliding window, or none.",
        ),
    )

    def fit(self, budget: Budget | None, shape: Shape) -> Self:
        """Resolve the budget and check the pattern (`UserError`)."""
        fitted = super().fit(budget, shape)
        if len({(x.window, x.query_heads) for x in shape.layers}) > 1:
            raise UserError(
                "indexcache: layers of this model have different windows or numbers of heads, so they cannot read the "
                "same pages. Use quest."
            )
        layers = len(shape.layers) - (fitted.dense_layers or 0)
        pattern = self.pattern
        if pattern is not None and (len(pattern) != layers or set(pattern) - set("FS") or pattern[0] != "F"):
            raise UserError(
                f"indexcache: pattern must be F and then F or S for each of the {layers} layers that select, got "
                f"{pattern}. Leave it out for the regular one."
            )
        return fitted

    def chooses(self, layer: int) -> bool:
        """Whether a layer chooses pages."""
        number = layer - (self.dense_layers or 0)
        return max(number - 1, 0) % self.every == 0 if self.pattern is None else self.pattern[number] == "F"

    def layer(self, index: int) -> LayerKV:
        """A store of pages, with bounds where the layer chooses."""
        if index < (self.dense_layers or 0):
            return LayerKV()
        return PagedKV(page=self.page, choosing=self.chooses(index))

    def attend(self, kv: LayerKV, step: Step) -> Tensor:
        """Attention over the chosen pages; over all entries in the context. [B, H_q, T, D_v]"""
        entries = self.entries_in(step.layer, step.window)
        if entries is None or not isinstance(kv, PagedKV) or not kv.selective:
            return kv.attend(step)
        if self.chooses(step.layer):
            step.shared["pages"] = self.choose(kv, step, self._pages(entries))
        return kv.attend_pages(step, step.shared["pages"])

    def choose(self, kv: PagedKV, step: Step, count: int) -> Tensor:
        """The pages that each new query reads in this layer and the sharing ones. [B, H_q, T, k]"""
        if self.sets == "head":
            return kv.select(step, count)
        before = kv.count_before(step)
        scores = page_scores(step.query, kv.get_bounds()) * step.scale  # [B, H_q, T, pages]
        at = before + torch.arange(step.query.shape[2], device=scores.device)[:, None]
        page = torch.arange(scores.shape[3], device=scores.device)
        unseen = (page + 1) * self.page > at
        if step.window is not None:
            unseen = unseen | ((page + 1) * self.page <= at - step.window + 1)
        shares = scores.masked_fill(unseen, -torch.inf).softmax(-1).nan_to_num(0.0)  # no full page yet: no share
        mean = shares.mean(1, keepdim=True)
        pages = select_pages(mean, count=count, page=self.page, before=before, window=step.window)
        return pages.expand(-1, scores.shape[1], -1, -1).contiguous()
