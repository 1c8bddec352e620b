"""Blocks of entries, dense and ragged, and the bytes they keep alive."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind the tensors, each storage once; a view counts as what it keeps alive."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values())


class Reader(Protocol):
    """A store that reads entries of a buffer."""

    n: int
    length: Tensor | None


class Buffer:
    """Preallocated tensors with a common entry axis (2), shared by forks that append one after the other."""

    def __init__(self, like: dict[str, Tensor], capacity: int) -> None:
        self.capacity = capacity
        self.tensors = {
            name: x.new_empty((*x.shape[:2], capacity, *x.shape[3:])) for name, x in like.items()
        }
        self._readers: dict[int, weakref.ref[Reader]] = {}

    def write(self, start: int, rows: dict[str, Tensor]) -> None:
        """Copy entries in, from entry `start`."""
        for name, x in rows.items():
            self.tensors[name][:, :, start : start + x.shape[2]].copy_(x)

    def join(self, store: Reader) -> None:
        """From now on this store reads entries here."""
        self._readers[id(store)] = weakref.ref(store)

    def leave(self, store: Reader) -> None:
        """This store reads no entry here any more."""
        self._readers.pop(id(store), None)

    def top(self, but: Reader | None = None) -> int:
        """Entries that somebody reads: who holds fewer may not append in place."""
        stores = [x for x in (ref() for ref in self._readers.values()) if x is not None and x is not but]
        return max((x.n if x.length is None else self.capacity for x in stores), default=0)


@dataclass
class FlatRows:
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


def last_rows(old: Tensor | None, new: Tensor, count: int) -> Tensor:
    """The last entries of two blocks, in their own storage."""
    if old is None or new.shape[2] >= count:
        return new[:, :, -count:].clone()
    return torch.cat([old, new], dim=2)[:, :, -count:].clone()


def _expand(indices: Tensor, x: Tensor) -> Tensor:
    return indices if x.dim() == 3 else indices[..., None].expand(-1, -1, -1, x.shape[3])  # no D axis


def gather(x: Tensor, indices: Tensor) -> Tensor:
    """Entries of each head. x: [B, H_kv, n, ...]; indices: [B, H_kv, C]"""
    return x.gather(2, _expand(indices, x))


def scatter(x: Tensor, indices: Tensor, rows: Tensor) -> None:
    """Write entries of each head, in place. indices: [B, H_kv, C]; entries as `x`, C of them."""
    x.scatter_(2, _expand(indices, x), rows)


def match_holes(indices: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Which of the last entries go where, so that the first ones are those that stay. indices: [B, H_kv, m], distinct.

    Of `rows` entries these leave. Returns sources and targets, each [B, H_kv, m]; an entry that need not move goes onto
    itself.
    """
    count = indices.shape[2]
    kept = rows - count
    holes = indices.sort(-1).values  # those below `kept` come first
    back = torch.ones((*indices.shape[:2], count), dtype=torch.bool, device=indices.device)
    # A victim among the last entries is no source. Victims below `kept` mark an extra column that is cut off.
    marks = torch.cat([back, back[..., :1]], dim=-1).scatter(-1, (holes - kept).where(holes >= kept, count), False)
    source = marks[..., :count].int().argsort(dim=-1, descending=True, stable=True) + kept
    return source, holes.where(holes < kept, source)  # as many sources as holes
