"""Entries that keep their largest elements, with a bitmap each, and the last entries whole (Mustafar)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from kvbench.budget import LayerShape, Shape
from kvbench.errors import UserError
from kvbench.kernels.bitmap_attention import SparseEntries, bitmap_partial, compress
from kvbench.kernels.bitmap_attention.torch import WORD
from kvbench.kernels.ragged_attention import dense_partial, merge_partials
from kvbench.step import Step
from kvbench.store.blocks import AppendedBlock
from kvbench.store.facts import Fact
from kvbench.store.layer import LayerKV

WORD_BYTES = 4


@dataclass
class SparseKV(LayerKV):
    """Whole entries until `prune` ends the context; from then on, sparse ones and a dense block of the last ones.

    `n` counts the dense block; the sparse entries come before it.
    """

    key_sparsity: float = 0.0
    """Share of the elements of a key that are dropped."""
    value_sparsity: float = 0.0
    recent: int = 0
    """Last entries that stay whole; later entries are pruned in blocks of as many, at least one."""

    blocks: ClassVar[tuple[str, ...]] = ("sparse",)
    sparse: AppendedBlock | None = field(default=None, init=False)
    """Bitmaps and kept elements. [B, H_kv, n, words] int32 and [B, H_kv, n, kept]"""
    _widths: tuple[int, int] = field(default=(0, 0), init=False)

    def kept(self, layer: LayerShape) -> tuple[int, int]:
        """Elements that a key and a value keep."""
        return _kept(layer.key_dim, self.key_sparsity), _kept(layer.value_dim, self.value_sparsity)

    def bytes_for(self, layer: LayerShape, shape: Shape, entries: int) -> int:
        """Kept elements and bitmaps of the pruned entries, and the last entries whole."""
        whole = min(entries, self.recent)
        words = sum(math.ceil(x / WORD) for x in (layer.key_dim, layer.value_dim))
        each = sum(self.kept(layer)) * shape.itemsize + words * WORD_BYTES
        total = (entries - whole) * each + whole * (layer.key_dim + layer.value_dim) * shape.itemsize
        return layer.kv_heads * total

    def prune(self) -> None:
        """Make all but the last entries sparse; after the context, whole blocks of them."""
        assert self._buffer is not None
        count = self.n - self.recent
        if self.sparse is not None:
            count -= count % max(1, self.recent)
        if count <= 0:
            return
        held = self._held()
        self._widths = held["key"].shape[3], held["value"].shape[3]
        parts = {
            name: compress(held[name][:, :, :count], _kept(held[name].shape[3], share))
            for name, share in (("key", self.key_sparsity), ("value", self.value_sparsity))
        }
        tensors = {f"{name}_{part}": getattr(x, part) for name, x in parts.items() for part in ("bitmap", "values")}
        rest = {name: x[:, :, count:].clone() for name, x in held.items()}
        if self.sparse is None:
            self.sparse = AppendedBlock(tensors, count + self.remaining)
            self.bounded = True  # entries move within the dense block from now on, so forks copy it
            self._replace(rest, self.n - count + min(self.remaining, max(1, self.recent)))
            return
        self.sparse.append(tensors)
        self._buffer.write(0, rest)
        self.n -= count

    def reserve(self, tokens: int, forward: int) -> None:
        """Make room for `tokens` more tokens: for whole ones until a block of them is pruned, and for sparse ones."""
        if self.sparse is None:
            super().reserve(tokens, forward)
            return
        super().reserve(tokens, self.recent + forward)
        self.sparse.reserve(tokens)

    def _entries_of(self, name: str, width: int) -> SparseEntries:
        assert self.sparse is not None
        held = self.sparse.held()
        return SparseEntries(held[f"{name}_bitmap"], held[f"{name}_values"], width)

    def attend(self, step: Step) -> Tensor:
        """Attention output of the last T entries over every entry held. [B, H_q, T, D_v]"""
        if self.sparse is None:
            return super().attend(step)
        keys, values = (self._entries_of(x, width) for x, width in zip(("key", "value"), self._widths, strict=True))
        start = step.seen - self.n - self.sparse.n
        parts = [
            bitmap_partial(step.query, keys, values, start=start, **step.options),
            dense_partial(step.query, self.keys, self.values, **step.options),
        ]
        return merge_partials(parts, step.sinks).to(step.query.dtype)

    def refuse_frozen(self) -> None:
        """Refuse to compress what is pruned (`UserError`)."""
        if self.sparse is not None:
            raise UserError("pruned entries cannot be compressed a second time. Leave --recompress out.")
        super().refuse_frozen()

    def keep_last(self, entries: int) -> None:
        """As of any store; pruned entries stay, and a window masks those before it."""
        if self.sparse is None:
            super().keep_last(entries)

    def entries_kept(self) -> list[int]:
        """Entries held by each (batch, KV head)."""
        return [x + (0 if self.sparse is None else self.sparse.n) for x in super().entries_kept()]

    def facts(self) -> dict[str, Fact]:
        """Elements that were dropped prove the effect."""
        dropped = 0
        if self.sparse is not None:
            held = self.sparse.held()
            kept = sum(held[f"{x}_values"].shape[3] for x in ("key", "value"))
            dropped = self.sparse.n * len(self.entries_kept()) * (sum(self._widths) - kept)
        return {**super().facts(), "elements_dropped": Fact(dropped, changed=True)}


def _kept(width: int, sparsity: float) -> int:
    return width - int(width * sparsity)
