"""Blocks of entries next to a layer's dense block: ones that are only appended to, and the last exact entries."""

from __future__ import annotations

import copy
from typing import Protocol

from torch import Tensor

from kvbench.store.entries import Buffer, storage_bytes, unused_bytes


class EntryBlock(Protocol):
    """Entries in a form of their own, which belong to a layer's store."""

    def fork(self) -> EntryBlock:
        """An independent copy, which may share entries."""

    def close(self) -> None:
        """Free the entries."""

    def tensors(self) -> list[Tensor]:
        """Every tensor that it keeps alive."""

    def spare_bytes(self) -> int:
        """Bytes that hold no entry yet."""


class AppendedBlock:
    """Entries that are only ever added to, in place; forks share them."""

    def __init__(self, entries: dict[str, Tensor], capacity: int) -> None:
        self.n = 0
        self.length: Tensor | None = None
        self._block = Buffer(entries, capacity)
        self._block.join(self)
        self.append(entries)

    @property
    def _buffer(self) -> Buffer:
        """The block, with this store's own entries in it."""
        self._block.resume(self)
        return self._block

    def append(self, entries: dict[str, Tensor]) -> None:
        """Write entries after the stored ones; a full block is copied into a larger one."""
        count = next(iter(entries.values())).shape[2]
        buffer = self._buffer
        if count and (self.n + count > buffer.capacity or not buffer.clear(self)):
            self._reallocate(max(buffer.capacity, self.n + count))
        self._block.write(self.n, entries)
        self.n += count

    def reserve(self, entries: int) -> None:
        """Enlarge the block now, so that decode steps do not have to."""
        if self.n + entries > self._buffer.capacity:
            self._reallocate(self.n + entries)

    def _reallocate(self, capacity: int) -> None:
        held = self.held()
        self._block.leave(self)
        self._block = Buffer(held, capacity)
        self._block.write(0, held)
        self._block.join(self)

    def held(self) -> dict[str, Tensor]:
        """The entries, by name."""
        return {name: x[:, :, : self.n] for name, x in self._buffer.tensors.items()}

    def whole(self) -> dict[str, Tensor]:
        """The whole block by name, with its spare capacity."""
        return self._buffer.tensors

    def fork(self) -> AppendedBlock:
        """An independent copy that shares the entries."""
        other = copy.copy(self)
        self._buffer.join(other)
        return other

    def close(self) -> None:
        """Stop reading the entries, which may then be overwritten."""
        self._block.leave(self)

    def tensors(self) -> list[Tensor]:
        """Every tensor that it keeps alive."""
        return list(self.whole().values())

    def spare_bytes(self) -> int:
        """Bytes that hold no entry yet."""
        return unused_bytes(storage_bytes(self.tensors()), self.n, self._buffer.capacity)


class Residual:
    """The last entries of a tensor in full precision: appended at the back of a small block, taken from its front."""

    def __init__(self, entries: Tensor, capacity: int) -> None:
        self.n, self._first = entries.shape[2], 0
        self.block = entries.new_empty((*entries.shape[:2], max(self.n, capacity), entries.shape[3]))
        self.block[:, :, : self.n] = entries

    @property
    def entries(self) -> Tensor:
        """The stored entries. [B, H_kv, n, D]"""
        return self.block[:, :, self._first : self._first + self.n]

    def append(self, entries: Tensor) -> None:
        """Append entries. At the end of the block, the stored ones move to its front, or into a larger block."""
        count = entries.shape[2]
        if self._first + self.n + count > self.block.shape[2]:
            self.reserve(count)
            self.block[:, :, : self.n] = self.entries.clone()
            self._first = 0
        self.block[:, :, self._first + self.n : self._first + self.n + count] = entries
        self.n += count

    def take(self, count: int) -> Tensor:
        """Remove and return the oldest entries, a view: read it before the next append. [B, H_kv, count, D]"""
        entries = self.entries[:, :, :count]
        self._first, self.n = self._first + count, self.n - count
        return entries

    def reserve(self, entries: int) -> None:
        """Enlarge the block for more entries."""
        if self.n + entries > self.block.shape[2]:
            held = self.entries
            self.block, self._first = held.new_empty((*held.shape[:2], self.n + entries, held.shape[3])), 0
            self.block[:, :, : self.n] = held

    def fork(self) -> Residual:
        """A copy: the block is written in place."""
        other = copy.copy(self)
        other.block = self.block.clone()
        return other

    def spare_bytes(self) -> int:
        """Bytes that hold no entry."""
        return unused_bytes(storage_bytes([self.block]), self.n, self.block.shape[2])
