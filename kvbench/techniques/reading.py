"""Base classes of methods that store every entry and let each token read some, and the choice of whole units."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

import torch

from kvbench.constraints import Positive
from kvbench.errors import UserError
from kvbench.method import Budget, LayerShape, Method, Shape
from kvbench.store.chosen import ChosenKV, Tier
from kvbench.store.layer import OFFSET_BYTES
from kvbench.techniques.clustering import count_clusters, sort_by_label

if TYPE_CHECKING:
    from torch import Tensor

    from kvbench.kernels.ragged_attention import Partial
    from kvbench.step import Step
    from kvbench.store import LayerKV


@dataclass(frozen=True)
class ReadingMethod(Method):
    """Indexes the context at its end; every later token chooses by the index which entries it reads.

    The budget is the number of entries that a token reads in each head, protected ones included. Sliding-window layers
    stay exact.
    """

    tier: Tier = "device"
    """Where the context's entries are: in the memory of the device, on the host, or in a file."""

    graphable: ClassVar[str | None] = "the host gathers the entries that a token chose, so each step waits for them."
    recompressible: ClassVar[str | None] = "every entry is stored, and each token chooses again which ones it reads."

    @abstractmethod
    def start(self, kv: ChosenKV, step: Step) -> None:
        """Index the context, at its end."""

    def chooses(self, index: int, window: int | None) -> bool:
        """Whether a layer's tokens choose what they read; those of the others read everything, on the device."""
        del index
        return window is None

    def extend(self, kv: ChosenKV, step: Step) -> None:
        """Add new entries to the index, where it grows with them."""

    @abstractmethod
    def read(self, kv: ChosenKV, step: Step, seen: int) -> Partial:
        """Attention of one token over what it chooses of the first `seen` entries, its own included. step: its own"""

    @abstractmethod
    def index_bytes(self, layer: LayerShape, shape: Shape) -> int:
        """Bytes of the index of one layer right after the context."""

    @abstractmethod
    def token_bytes(self, layer: LayerShape, shape: Shape) -> int:
        """Bytes that a token reads in one layer right after the context, index and entries; an upper bound."""

    def least_token_bytes(self, layer: LayerShape, shape: Shape) -> int:
        """Lower bound of the bytes that a token reads in one layer; the upper one unless reads depend on entries."""
        return self.token_bytes(layer, shape)

    def fit(self, budget: Budget | None, shape: Shape) -> Self:
        """Resolve the budget; refuse a model of which every layer stays exact (`UserError`)."""
        fitted = super().fit(budget, shape)
        if not fitted.identity(shape) and not any(self.chooses(i, x.window) for i, x in enumerate(shape.layers)):
            kept = "sliding-window layers" if self.chooses(0, None) else "its first layers and sliding-window layers"
            raise UserError(
                f"{self.card.name} keeps {kept} exact, and this model has no others: it would have no effect. Use a "
                "method that selects in them, such as quest."
            )
        return fitted

    def layer(self, index: int) -> LayerKV:
        """A store of all entries that counts what is read."""
        del index
        return ChosenKV()

    def evict(self, kv: LayerKV, step: Step) -> None:
        """Index the context after the attention of its last chunk, so that the prefill is exact."""
        chooses = step.moment.compresses and self.chooses(step.layer, step.window)
        if not chooses or self.rows is None or self.rows >= step.seen:
            return
        assert isinstance(kv, ChosenKV)
        self.start(kv, step)
        kv.move(self.tier)

    def attend(self, kv: LayerKV, step: Step) -> Tensor:
        """Attention of every new token over what it chooses, one token after the other. [B, H_q, T, D_v]"""
        if not isinstance(kv, ChosenKV) or not kv.selective:
            return kv.attend(step)
        self.extend(kv, step)
        return kv.attend_each(step, lambda token, seen: self.read(kv, token, seen))

    def declared_bytes(self, shape: Shape) -> int:
        """Bytes of every entry and of the index."""
        if self.identity(shape):
            return shape.full_bytes
        entries = self.stored_entries(shape)
        return sum(
            self.layer_bytes(i, shape, entries) if self.chooses(i, x.window) else shape.layer_bytes(x)
            for i, x in enumerate(shape.layers)
        )

    def stored_entries(self, shape: Shape) -> int:
        """Entries per KV head that are stored of the context."""
        return shape.length

    def layer_bytes(self, index: int, shape: Shape, entries: int) -> int:
        """Bytes of a layer's entries, where they are on the device, and of its index."""
        held = super().layer_bytes(index, shape, entries) if self.tier == "device" else 0
        return held + self.index_bytes(shape.layers[index], shape)

    def declared_host_bytes(self, shape: Shape) -> int:
        """Bytes of the entries of the context on the host."""
        return self._moved_bytes(shape) if self.tier == "host" else 0

    def declared_file_bytes(self, shape: Shape) -> int:
        """Bytes of the entries of the context in files."""
        return self._moved_bytes(shape) if self.tier == "file" else 0

    def _moved_bytes(self, shape: Shape) -> int:
        if self.identity(shape):
            return 0
        entries = self.stored_entries(shape)
        return sum(super(ReadingMethod, self).layer_bytes(i, shape, entries)
                   for i, x in enumerate(shape.layers) if self.chooses(i, x.window))

    def declared_read_bytes(self, shape: Shape) -> int:
        """Bytes that a token reads; all bytes of layers that do not choose."""
        return self._read_bytes(shape, self.token_bytes)

    def least_read_bytes(self, shape: Shape) -> int:
        """Bytes that a token reads at least; all bytes of layers that do not choose."""
        return self._read_bytes(shape, self.least_token_bytes)

    def _read_bytes(self, shape: Shape, in_layer: Callable[[LayerShape, Shape], int]) -> int:
        if self.identity(shape):
            return shape.full_bytes
        return sum(
            in_layer(x, shape) if self.chooses(i, x.window) else shape.layer_bytes(x)
            for i, x in enumerate(shape.layers)
        )

    def entry_bytes(self, layer: LayerShape, shape: Shape) -> int:
        """Bytes of the entries that a token reads, in all KV heads."""
        assert self.rows is not None
        return self.rows * layer.kv_heads * (layer.key_dim + layer.value_dim) * shape.itemsize


@dataclass(frozen=True)
class EndsMethod(ReadingMethod):
    """Reads the first and last entries of the context always, and chooses among those between them."""

    sinks: Positive = 4
    """First entries, which are always read."""
    recent: Positive = 64
    """Last entries of the context, which are always read."""

    def minimum_entries(self) -> int:
        """The first and last entries and one to choose."""
        return self.sinks + self.recent + 1

    @property
    def chosen(self) -> int:
        """Entries of the budget between the first and last ones."""
        assert self.rows is not None
        return self.rows - self.sinks - self.recent


@dataclass(frozen=True)
class ClusterMethod(EndsMethod):
    """Reads clusters of similar keys, whose entries lie next to each other."""

    cluster: Positive = 16
    """Mean entries per cluster."""
    segment: Positive = 8192
    """Most entries that are clustered together."""
    iterations: Positive = 10
    """Most iterations of k-means."""

    def order_by_cluster(self, kv: ChosenKV, labels: Tensor, count: int) -> Tensor:
        """Put the entries of every cluster next to each other; where each of the `count` starts. [B, H_kv, count + 1]

        labels: clusters of the entries between the first and last ones. [B, H_kv, m]
        """
        order, offsets = sort_by_label(labels, count)
        places = torch.arange(kv.n, device=order.device).repeat(*labels.shape[:2], 1)
        places[:, :, self.sinks : kv.n - self.recent] = order + self.sinks
        kv.keep(places)
        return offsets

    def clusters(self, shape: Shape) -> int:
        """Clusters per KV head."""
        return count_clusters(shape.length - self.sinks - self.recent, self.cluster, self.segment)

    def scanned_bytes(self, layer: LayerShape, shape: Shape) -> int:
        """Bytes of the centers and of where clusters start."""
        count = self.clusters(shape)
        return layer.kv_heads * (count * layer.key_dim * shape.itemsize + (count + 1) * OFFSET_BYTES)


def mark_ends_and_best(scores: Tensor, count: int, first: int, last: int) -> Tensor:
    """Mark `count` entries of every head: the first and the last ones, and of the others the best. [B, H, n] bool"""
    scores = scores.clone()
    scores[..., :first] = torch.inf
    scores[..., max(0, scores.shape[-1] - last) :] = torch.inf
    best = scores.argsort(dim=-1, descending=True, stable=True)[..., :count]  # of equal ones the first
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)


def take_units(scores: Tensor, offsets: Tensor, count: int) -> Tensor:
    """How many entries to take of every unit: whole units from the best one on, until there are `count`. [B, H, U]

    scores: [B, H, U]. offsets: [B, H, U + 1], where each unit starts among the m entries that the units divide, and m.
    """
    sizes = offsets.diff(dim=-1).long()
    order = scores.argsort(dim=-1, descending=True, stable=True)
    ordered = sizes.gather(-1, order)
    taken = (count - (ordered.cumsum(-1) - ordered)).clamp_min(0).minimum(ordered)
    return torch.zeros_like(taken).scatter_(-1, order, taken)


def mark_taken(taken: Tensor, offsets: Tensor, entries: int) -> Tensor:
    """Mark the first of the m entries of every unit, as many as are taken. [B, H, m] bool"""
    unit = unit_of_entries(offsets, entries)
    entry = torch.arange(unit.shape[-1], device=unit.device)
    return entry - offsets.long().gather(-1, unit) < taken.gather(-1, unit)


def mark_units(scores: Tensor, offsets: Tensor, entries: int, count: int) -> Tensor:
    """Mark `count` of the m entries of every head, by whole units from the best one on; of the last its first ones."""
    return mark_taken(take_units(scores, offsets, count), offsets, entries)


def unit_of_entries(offsets: Tensor, entries: int) -> Tensor:
    """The unit that each of the m entries belongs to. offsets: as for `take_units`. [B, H, m]"""
    sizes = offsets.diff(dim=-1).flatten()
    rows = offsets.shape[0] * offsets.shape[1]
    units = torch.arange(offsets.shape[-1] - 1, device=offsets.device).repeat(rows)
    # Without its size, the host waits for the device to find it.
    return units.repeat_interleave(sizes, output_size=rows * entries).view(*offsets.shape[:2], entries)
