"""Blocks of entries, dense and ragged, and the bytes they keep alive."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind the tensors, each storage once; a view counts as the storage that it keeps alive."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values())


def unused_bytes(size: int, entries: int, capacity: int) -> int:
    """Bytes of a block of `size` bytes that hold none of its entries yet. capacity: entries that it has room for."""
    return size - size * entries // capacity if capacity else 0


class Reader(Protocol):
    """A store that reads entries of a buffer."""

    n: int
    length: Tensor | None


class Buffer:
    """Preallocated tensors with a common entry axis (2), shared by forks.

    Forks that continue in turns write their entries into the same places. Before one writes, the entries of the others
    are copied away; they are copied back before their fork reads or appends (`resume`). So shared entries exist once.
    """

    def __init__(self, like: dict[str, Tensor], capacity: int) -> None:
        self.capacity = capacity
        self.tensors = {
            name: x.new_empty((*x.shape[:2], capacity, *x.shape[3:])) for name, x in like.items()
        }
        self._readers: dict[int, weakref.ref[Reader]] = {}
        self._aside: dict[int, tuple[int, dict[str, Tensor]]] = {}
        """Entries that were copied away, by reader, and where they start; such a reader is not in `_readers`."""
        self._common = capacity
        """Entries below this are the same for every reader."""

    def write(self, start: int, entries: dict[str, Tensor]) -> None:
        """Copy entries in, from entry `start`."""
        for name, x in entries.items():
            self.tensors[name][:, :, start : start + x.shape[2]].copy_(x)

    def join(self, store: Reader) -> None:
        """From now on this store reads entries here."""
        self._aside.pop(id(store), None)
        self._readers[id(store)] = weakref.ref(store)

    def leave(self, store: Reader) -> None:
        """This store reads no entry here any more."""
        self._aside.pop(id(store), None)
        self._readers.pop(id(store), None)

    def resume(self, store: Reader) -> None:
        """Put this store's own entries back, if they were set aside for another's."""
        if id(store) in self._aside:
            start, entries = self._aside.pop(id(store))
            self._set_aside(start, store)
            self.write(start, entries)
            self._readers[id(store)] = weakref.ref(store)

    def clear(self, store: Reader) -> bool:
        """Set aside the entries of others after this store's last one, which may then append; False: it may not.

        Entries of a store with static shapes stay where they are.
        """
        others = [x for x in self._others(store) if x.n > store.n or x.length is not None]
        if any(x.length is not None for x in others):
            return False
        if others or (self._aside and store.n < self._common):  # those set aside share entries up to `_common`
            self._set_aside(store.n, store)
        return True

    def is_shared(self, store: Reader) -> bool:
        """Whether another store has, or had, entries here after this store's last one."""
        return bool(self._aside) or any(x.n > store.n or x.length is not None for x in self._others(store))

    def _others(self, store: Reader) -> list[Reader]:
        return [x for x in (ref() for ref in self._readers.values()) if x is not None and x is not store]

    def _set_aside(self, start: int, store: Reader) -> None:
        """Copy the entries from `start` on of every reader but this store, which has none of its own there."""
        if start < self._common:
            for key, (at, entries) in self._aside.items():
                before = {name: x[:, :, start:at] for name, x in self.tensors.items()}
                self._aside[key] = start, {name: torch.cat([before[name], x], dim=2) for name, x in entries.items()}
            self._common = start
        for other in self._others(store):
            if other.n > self._common:
                own = {name: x[:, :, self._common : other.n].clone() for name, x in self.tensors.items()}
                self._aside[id(other)] = self._common, own
                del self._readers[id(other)]


@dataclass
class FlatEntries:
    """Entries of unequal number per (batch, KV head), flat: what eviction per head, or merging, left of a context."""

    key: Tensor  # [R, D]
    value: Tensor  # [R, D_v]
    offsets: Tensor  # [B * H_kv + 1] int32
    counts: list[int]
    position: Tensor | None  # [R] int32
    bias: Tensor | None  # [R] float32, added to the logits

    def tensors(self) -> list[Tensor]:
        """Every tensor that it keeps alive."""
        return [x for x in (self.key, self.value, self.offsets, self.position, self.bias) if x is not None]


def last_entries(old: Tensor | None, new: Tensor, count: int) -> Tensor:
    """The last entries of two blocks, in their own storage."""
    if old is None or new.shape[2] >= count:
        return new[:, :, -count:].clone()
    return torch.cat([old, new], dim=2)[:, :, -count:].clone()


def _expand(indices: Tensor, x: Tensor) -> Tensor:
    return indices if x.dim() == 3 else indices[..., None].expand(-1, -1, -1, x.shape[3])  # no D axis


def gather(x: Tensor, indices: Tensor) -> Tensor:
    """Entries of each head. x: [B, H_kv, n, ...]; indices: [B, H_kv, C]"""
    return x.gather(2, _expand(indices, x))


def gather_many(x: Tensor, indices: Tensor) -> Tensor:
    """As `gather`, by whole entries instead of elements: faster for many of them and slower for few."""
    batch, heads = (torch.arange(size, device=x.device) for size in x.shape[:2])
    return x[batch[:, None, None], heads[:, None], indices]


def scatter(x: Tensor, indices: Tensor, entries: Tensor) -> None:
    """Write entries of each head, in place. indices: [B, H_kv, C]; entries as `x`, C of them."""
    x.scatter_(2, _expand(indices, x), entries)


def match_holes(indices: Tensor, entries: int) -> tuple[Tensor, Tensor]:
    """Which of the last entries go where, so that the first ones are those that stay. indices: [B, H_kv, m], distinct.

    Of `entries` entries these leave. Returns sources and targets, each [B, H_kv, m]; an entry that need not move goes
    onto itself.
    """
    count = indices.shape[2]
    kept = entries - count
    if count == 1:  # of every decode step: the last entry goes into the hole, or is the one that leaves
        return torch.full_like(indices, kept), indices
    holes = indices.sort(-1).values  # those below `kept` come first
    back = torch.ones((*indices.shape[:2], count), dtype=torch.bool, device=indices.device)
    # A victim among the last entries is no source. Victims below `kept` mark an extra column that is cut off.
    marks = torch.cat([back, back[..., :1]], dim=-1).scatter(-1, (holes - kept).where(holes >= kept, count), False)
    source = marks[..., :count].int().argsort(dim=-1, descending=True, stable=True) + kept
    return source, holes.where(holes < kept, source)  # as many sources as holes
