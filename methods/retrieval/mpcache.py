"""MPCache: drops entries once for all heads, and reads clusters of the rest in two levels."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench.constraints import Gt, Le, Positive, Share
from kvbench.errors import UserError
from kvbench.kernels.page_select import select_pages
from kvbench.kernels.window_scores.torch import window_weights
from kvbench.method import Budget, BudgetKind, Card, Method, Shape, Step, Upstream, resolved
from kvbench.selection import rank, top_entries
from kvbench.store import LayerKV
from kvbench.store.paged import PagedKV

LEAST_PAGES = 3
"""The first cluster, the query's own, and one to choose."""
QUERY_BLOCK = 16


@dataclass(frozen=True)
class MPCache(Method):
    """Stores the entries that some late query attends to; each token reads the best clusters among the best parents."""

    static: Annotated[float, Gt(0), Le(1)] | None = None
    """Share of the context that stays stored. None: the root of the budget's share, so that both stages keep the
    same share."""
    observed: Annotated[float, Gt(0), Le(1)] = 0.2
    """Share of the context, its last part, whose queries decide what stays stored."""
    page: Positive = 16
    """Entries of a cluster; a parent has two clusters."""
    parents: Annotated[float, Gt(0), Le(1)] = 0.5
    """Share of the parents before a query whose clusters are compared; more where the budget needs them."""
    alpha: Share = 0.6
    """Weight of a cluster's maximum; its minimum has the rest."""

    stored: int | None = resolved()
    """Entries per KV head that stay stored."""

    recompressible: ClassVar[str | None] = "entries are dropped once, and each token selects again which it reads."
    card: ClassVar[Card] = Card(
        name="mpcache",
        title="MPCache: MPC-Friendly KV Cache Eviction for Efficient Private LLM Inference",
        idea="Entries that no late query attends to are dropped once, the same in all heads. "
        "Each token then reads the clusters of keys that match it best, chosen in two levels from minimum and maximum.",
        arxiv="2501.06807",
        year=2025,
        version="2",
        family="retrieval",
        stages=("compression", "retrieval"),
        budget=BudgetKind.READ,
        heads="pooled",
        upstream=Upstream(repo="zwxandy/MPCache", commit="55e401b", license="MIT"),
        deviations=(
            "The algorithm only, without the protocols of private inference that the paper designs it for.",
            ("The paper tunes a threshold of attention for every data set. Here a share of the context stays: the "
            "entries with the highest attention from any late query."),
            "Attention is scaled and causal when entries are dropped; the authors' code does neither there.",
            ("The last fifth of every context decides; in the authors' code it is the last tenth above 24,000 tokens."),
            ("The first cluster and the last one are a part of both shares; the authors' code adds them to the chosen "
            "ones."),
            "Minimum and maximum of a parent are those of its two clusters, and are not stored again.",
            ("Dropped entries are freed. The authors' code keeps all entries and gathers those that stay in every "
            "step."),
            "With grouped-query attention, a KV head's queries select by their mean score; the paper has no groups.",
            "Each token of a question chooses its own clusters, as if it were decoded.",
            "Adjacent layers do not share clusters: the paper proposes it, and the released code does not do it.",
        ),
        unverified=(
            "static: no share is published; the authors' thresholds keep 15 to 66 % of five data sets.",
        ),
        limits=(
            "Layers with a sliding window drop nothing, and only select.",
            "The prompt is run with full attention.",
        ),
    )

    def minimum_entries(self) -> int:
        """Three clusters."""
        return LEAST_PAGES * self.page

    def fit(self, budget: Budget | None, shape: Shape) -> Self:
        """Resolve the entries that each token reads, and those that stay stored."""
        fitted = super().fit(budget, shape)
        if fitted.rows is None or fitted.rows >= shape.length:
            return replace(fitted, stored=None)
        share = math.sqrt(fitted.rows / shape.length) if self.static is None else self.static
        stored = round(share * shape.length)
        if stored < fitted.rows:
            raise UserError(
                f"mpcache: static={share:g} stores {stored} of {shape.length} tokens per KV head, and the budget reads "
                f"{fitted.rows}. Use --set static={math.ceil(fitted.rows / shape.length * 100) / 100:g} or more, or a "
                "smaller --budget."
            )
        return replace(fitted, stored=stored)

    def layer(self, index: int) -> LayerKV:
        """A store of pages with bounds, which also keeps the late queries."""
        del index
        late = 0 if self.stored is None or self.length is None else max(1, int(self.observed * self.length))
        return PagedKV(page=self.page, queries=late)

    def evict(self, kv: LayerKV, step: Step) -> None:
        """Drop entries at the end of the context, and compute the clusters of the others."""
        if not step.moment.compresses or self.stored is None:
            return
        assert isinstance(kv, PagedKV)
        if step.window is None and self.stored < kv.n:
            kv.keep(top_entries(self.score(kv, step), self.stored))
        kv.index()

    def score(self, kv: LayerKV, step: Step) -> Tensor:
        """The highest attention from a late query, mean over all heads. [B, H_kv, n]"""
        queries = kv.recent_queries
        assert queries is not None
        late = queries.shape[2]
        best = torch.zeros(kv.keys.shape[0], kv.n, device=kv.keys.device)
        for start in range(0, late, QUERY_BLOCK):
            stop = min(start + QUERY_BLOCK, late)
            after = late - stop  # queries that follow the block; their own entries are not visible to it
            weights = window_weights(
                queries[:, :, start:stop], kv.keys[:, :, : kv.n - after], scale=step.scale, seen=step.seen - after,
                window=step.window, softcap=step.softcap, sinks=step.sinks,
            )
            found = torch.cat([x.mean((1, 2)).amax(1) for x in weights], dim=-1)  # [B, n - after]
            best[:, : kv.n - after] = torch.maximum(best[:, : kv.n - after], found)
        return best[:, None].expand(kv.keys.shape[:3])

    def attend(self, kv: LayerKV, step: Step) -> Tensor:
        """Attention over the chosen clusters of each KV head; over all entries in the context. [B, H_q, T, D_v]"""
        entries = self.entries_in(step.layer, step.window)
        if entries is None or not isinstance(kv, PagedKV) or not kv.selective:
            return kv.attend(step)
        count, before = self._pages(entries), kv.count_before(step)
        bounds = kv.get_bounds()
        scores = self.similarities(step.query, bounds)  # [B, H_kv, T, pages]
        if scores.shape[3]:
            chosen = self.choose_parents(step, bounds, count, before)
            scores = scores.masked_fill(~chosen, -torch.inf)
            scores[..., 0] = torch.inf
        pages = select_pages(scores, count=count, page=self.page, before=before, window=step.window)
        group = step.query.shape[1] // pages.shape[1]
        return kv.attend_pages(step, pages.repeat_interleave(group, dim=1))

    def similarities(self, query: Tensor, bounds: Tensor) -> Tensor:
        """Each query times the weighed mean of the bounds, mean over the group's heads. [B, H_kv, T, pages] float32

        query: [B, H_q, T, D]. bounds: [B, H_kv, pages, 2 * D], minima first.
        """
        low, high = bounds.float().chunk(2, dim=-1)
        center = (1 - self.alpha) * low + self.alpha * high
        mean = query.float().unflatten(1, (bounds.shape[1], -1)).mean(2)
        scores: Tensor = mean @ center.mT
        return scores

    def choose_parents(self, step: Step, bounds: Tensor, count: int, before: int | Tensor) -> Tensor:
        """Marks the clusters whose parent is among the best, the first or the query's own. [B, H_kv, T, pages] bool"""
        pages = bounds.shape[2]
        padded = F.pad(bounds, (0, 0, 0, pages % 2), mode="replicate")  # the last cluster may have no sibling yet
        low, high = padded.unflatten(2, (-1, 2)).chunk(2, dim=-1)
        scores = self.similarities(step.query, torch.cat([low.amin(3), high.amax(3)], dim=-1))
        index = torch.arange(scores.shape[3], device=scores.device)
        at = before + torch.arange(step.query.shape[2], device=scores.device)[:, None]  # [T, 1]
        own = at // (2 * self.page)
        unseen = index > own
        if step.window is not None:
            unseen = unseen | ((index + 1) * 2 * self.page <= at - step.window + 1)
        kept = ((index == 0) | (index == own)) & ~unseen
        ranked = scores.masked_fill(kept | unseen, -torch.inf)
        most = (self.parents * (own + 1)).ceil().clamp_min(math.ceil(count / 2) + 2)  # so that enough are left
        first = ~unseen[:, :1] & (own > 0)  # whether the first parent is another than the query's own, and in sight
        most = most - 1 - first.int()  # the own parent counts before its first cluster is complete, too
        return (kept | ((rank(ranked) < most) & ~unseen)).repeat_interleave(2, dim=-1)[..., :pages]

    def declared_bytes(self, shape: Shape) -> int:
        """Bytes of the stored entries and of the bounds; of all entries in sliding layers."""
        if self.stored is None:
            return shape.full_bytes
        return sum(self.layer_bytes(i, shape, self._stored(i, shape)) for i in range(len(shape.layers)))

    def later_bytes(self, shape: Shape, tokens: int) -> int:
        """Room for whole pages and their bounds."""
        return sum(PagedKV(page=self.page).later_bytes_for(x, shape, tokens) for x in shape.layers)

    def declared_read_bytes(self, shape: Shape) -> int:
        """Bytes of all bounds and of each query head's clusters."""
        return self._read_bytes(shape, PagedKV.read_bytes_for)

    def least_read_bytes(self, shape: Shape) -> int:
        """The same, with no more clusters than the stored entries make."""
        return self._read_bytes(shape, PagedKV.least_read_bytes_for)

    def _read_bytes(self, shape: Shape, in_layer: Callable[..., int]) -> int:
        if self.stored is None:
            return shape.full_bytes
        total = 0
        for index, layer in enumerate(shape.layers):
            store, entries = self.layer(index), self.entries_in(index, layer.window)
            assert isinstance(store, PagedKV) and entries is not None
            total += in_layer(store, layer, shape, self._stored(index, shape), pages=self._pages(entries))
        return total

    def _stored(self, index: int, shape: Shape) -> int:
        assert self.stored is not None
        layer = shape.layers[index]
        return shape.entries(layer) if layer.window is not None else min(self.stored, shape.length)

    def _pages(self, entries: int) -> int:
        return max(LEAST_PAGES, entries // self.page)
