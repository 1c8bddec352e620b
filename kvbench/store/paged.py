"""Entries in pages with bounds of their keys, of which each query reads the pages that it selects."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.budget import LayerShape, Shape
from kvbench.kernels.page_attention import page_attention
from kvbench.kernels.page_select import page_bounds, page_scores, select_pages
from kvbench.step import Step
from kvbench.store.blocks import AppendedBlock
from kvbench.store.facts import Fact
from kvbench.store.layer import LayerKV
from kvbench.store.selective import SelectiveKV

COUNTER_BYTES = 8


@dataclass
class PagedKV(SelectiveKV):
    """Dense entries and, once indexed, the minimum and maximum of the keys of every full page, also of later ones.

    The page that is being filled has no bounds and needs none: the queries of its entries always read it.
    """

    page: int = 16
    choosing: bool = True
    """Whether pages are chosen by bounds of this layer; otherwise by another layer's, and it stores none."""

    blocks: ClassVar[tuple[str, ...]] = ("_bounds",)
    proof: ClassVar[str | None] = "pages_skipped"
    distinct: Tensor | None = field(default=None, init=False)
    """Pages read, those that heads of a group share once; on the device, so that no step waits for it. []"""
    _bounds: AppendedBlock | None = field(default=None, init=False)
    """Of the full pages. [B, H_kv, pages, 2 * D]"""

    def bytes_for(self, layer: LayerShape, shape: Shape, entries: int) -> int:
        """Every entry, two bounds for every full page, and the counter."""
        return super().bytes_for(layer, shape, entries) + self._bound_bytes(layer, shape, entries) + COUNTER_BYTES

    def later_bytes_for(self, layer: LayerShape, shape: Shape, tokens: int) -> int:
        """Upper bound of the room for later tokens, in whole pages with bounds."""
        return self.bytes_for(layer, shape, self._whole(tokens + self.page - 1))

    def read_bytes_for(self, layer: LayerShape, shape: Shape, entries: int, *, pages: int) -> int:
        """Bytes that a step reads: every bound, and this many pages for every query head."""
        read = layer.query_heads * pages * self.page * (layer.key_dim + layer.value_dim) * shape.itemsize
        return read + self._bound_bytes(layer, shape, entries)

    def least_read_bytes_for(self, layer: LayerShape, shape: Shape, entries: int, *, pages: int) -> int:
        """As `read_bytes_for`, with no more pages than these entries fill or begin."""
        return self.read_bytes_for(layer, shape, entries, pages=min(pages, -(-entries // self.page)))

    def _bound_bytes(self, layer: LayerShape, shape: Shape, entries: int) -> int:
        return entries // self.page * layer.kv_heads * 2 * layer.key_dim * shape.itemsize if self.choosing else 0

    def index(self) -> None:
        """The context is complete: from now on attention may select."""
        self.selective = True
        self.distinct = torch.zeros((), dtype=torch.int64, device=self.keys.device)
        self._start_bounds()

    def append(self, step: Step) -> None:
        """Add a forward's entries, and the bounds of the pages that they fill."""
        if self._buffer is None:
            self.capacity = self._whole(max(self.capacity, step.key.shape[2]))
        super().append(step)
        if not self.selective:  # no page has bounds, with a budget of the whole context for good
            return
        if self.length is not None:
            self._bound_touched(step.key.shape[2])
        else:
            self._bound_full()

    def _whole(self, entries: int) -> int:
        return -(-entries // self.page) * self.page

    def _replace(self, entries: dict[str, Tensor], capacity: int) -> None:
        super()._replace(entries, self._whole(max(capacity, next(iter(entries.values())).shape[2])))
        if self.selective:
            self._start_bounds()

    def _start_bounds(self) -> None:
        assert self._buffer is not None
        for x in self._buffer.tensors.values():
            x[:, :, self.n :].zero_()  # pages are read whole, with weight zero: NaN there would be NaN in the output
        keys = self._buffer.tensors["key"]
        none = {"bounds": keys.new_empty((*keys.shape[:2], 0, 2 * keys.shape[3] if self.choosing else 0))}
        if self._bounds is not None:
            self._bounds.close()
        self._bounds = AppendedBlock(none, keys.shape[2] // self.page)
        self._bounds.whole()["bounds"].zero_()  # static steps read bounds of pages to come, too
        self._bound_full()

    def _bound_full(self) -> None:
        assert self._bounds is not None and self._buffer is not None
        full = self.n // self.page
        if full > self._bounds.n:
            keys = self._buffer.tensors["key"][:, :, self._bounds.n * self.page : full * self.page]
            self._bounds.append({"bounds": self._bound(keys)})

    def _bound(self, keys: Tensor) -> Tensor:
        """Bounds of whole pages of keys, without any numbers where another layer chooses. [B, H_kv, pages, 2 * D]"""
        if self.choosing:
            return page_bounds(keys, self.page)
        return keys.new_empty((*keys.shape[:2], keys.shape[2] // self.page, 0))

    def _bound_touched(self, count: int) -> None:
        """Bounds of every page that `count` entries may have touched; those not full yet are bounded again later."""
        assert self._bounds is not None and self._buffer is not None and self.length is not None
        touched = (count + self.page - 2) // self.page + 1
        pages = (self.length - count) // self.page + torch.arange(touched, device=self.length.device)
        bounds = self._bounds.whole()["bounds"]
        pages = pages.clamp_max(bounds.shape[2] - 1)
        keys = self._buffer.tensors["key"].unflatten(2, (-1, self.page)).index_select(2, pages).flatten(2, 3)
        bounds.index_copy_(2, pages, self._bound(keys))
        self._bounds.n = self.n // self.page

    def select(self, step: Step, count: int) -> Tensor:
        """The pages that each new query should read: `count` of them, its own included. [B, H_q, T, k]"""
        return select_pages(
            page_scores(step.query, self.get_bounds()), count=count, page=self.page, before=self.count_before(step),
            window=step.window,
        )

    def get_bounds(self) -> Tensor:
        """Minimum and maximum of the keys of each full page; of later pages too where steps have static shapes.

        Returns [B, H_kv, pages, 2 * D].
        """
        assert self._bounds is not None
        return (self._bounds.whole() if self.length is not None else self._bounds.held())["bounds"]

    def attend_pages(self, step: Step, pages: Tensor, before: int | None = None) -> Tensor:
        """Attention of the new queries over these pages and nothing else. [B, H_q, T, D_v]

        before: entries before the first query; None: the queries are those of the last entries.
        """
        assert self._buffer is not None
        self._count(step, pages, before)
        return page_attention(
            step.query, self._buffer.tensors["key"], self._buffer.tensors["value"], pages, page=self.page,
            before=self.count_before(step) if before is None else before, scale=step.scale, window=step.window,
            softcap=step.softcap, sinks=step.sinks,
        )

    def count_before(self, step: Step) -> int | Tensor:
        """Entries before the first of a step's queries; on the device where steps have static shapes."""
        return (self.n if self.length is None else self.length) - step.query.shape[2]

    def _count(self, step: Step, pages: Tensor, before: int | None) -> None:
        """Count pages gathered for every query head, those that differ per KV head, and those left alone."""
        assert self._bounds is not None and self.distinct is not None and self._buffer is not None
        batch, heads, n_query, chosen = pages.shape
        bounds = self._bounds.whole()["bounds"]
        kv_heads = bounds.shape[1]
        start = self.n - n_query if before is None else before
        places, seen = range(start, start + n_query), self.seen - self.n + start
        first = [0 if step.window is None else max(0, row - step.window + 1) // self.page for row in places]
        skipped = sum(max(0, row // self.page + 1 - low - chosen) for row, low in zip(places, first, strict=True))
        bound_bytes = batch * kv_heads * self._bounds.n * bounds.shape[3] * bounds.itemsize
        self.reads.update({
            "queries": n_query, "pages_read": pages.numel(), "pages_skipped": skipped * batch * heads,
            "bytes": pages.numel() * self.page * self.entry_bytes + n_query * bound_bytes,
            "seen": sum(range(seen, seen + n_query)) + n_query,
        })
        by_group = pages.unflatten(1, (kv_heads, -1)).transpose(2, 3).flatten(3)  # [B, H_kv, T, G * k]
        marks = pages.new_zeros((*by_group.shape[:3], bounds.shape[2] + 1), dtype=torch.bool)
        self.distinct.add_(marks.scatter_(3, by_group, True).sum())

    def distinct_read_bytes(self) -> int:
        """As `read_bytes`, with a page counted once that several heads of a group select."""
        if self.distinct is None:
            return super().distinct_read_bytes()
        again = self.reads["pages_read"] - int(self.distinct)
        return (self.reads["bytes"] - again * self.page * self.entry_bytes) // max(1, self.reads["queries"])

    def fork(self) -> LayerKV:
        """An independent copy with its own counters. Bounds are shared like entries."""
        other = super().fork()
        assert isinstance(other, PagedKV)
        other.distinct = None if self.distinct is None else torch.zeros_like(self.distinct)
        return other

    def credit(self, branch: LayerKV) -> None:
        """Add a fork's read counters to this store."""
        super().credit(branch)
        assert isinstance(branch, PagedKV)
        if self.distinct is not None and branch.distinct is not None:
            self.distinct.add_(branch.distinct)

    def facts(self) -> dict[str, Fact]:
        """Counters of the reads; pages that the heads of a group share count once in `pages_distinct`."""
        distinct = {} if self.distinct is None else {"pages_distinct": Fact(int(self.distinct), restarts=True)}
        return {**super().facts(), **distinct}

    def tensors(self) -> list[Tensor]:
        """Every tensor that the layer keeps alive."""
        return [*super().tensors(), *([] if self.distinct is None else [self.distinct])]
