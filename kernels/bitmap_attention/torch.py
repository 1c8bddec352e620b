"""Rows are brought back a block at a time, zeros included, and attended to as exact ones are."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench.kernels.ragged_attention.torch import Partial, dense_partial

WORD = 32
"""Bits of a bitmap's word."""
BLOCK = 2**20
"""Elements that are brought back at a time, over all heads."""


@dataclass(frozen=True)
class SparseRows:
    """Rows that kept equally many elements each: which, and what they are (Mustafar, with slots of one size)."""

    bitmap: Tensor
    """[..., n, D / 32, rounded up] int32: bit i % 32 of word i // 32 says whether element i was kept."""
    values: Tensor
    """[..., n, kept]: the elements kept, in their order."""
    width: int
    """D, elements of a row."""

    def rows(self, start: int, stop: int) -> SparseRows:
        """Some of the rows, as views."""
        return replace(self, bitmap=self.bitmap[..., start:stop, :], values=self.values[..., start:stop, :])


def compress(x: Tensor, kept: int) -> SparseRows:
    """Keep the `kept` largest elements of every row by magnitude, of equal ones the first. x: [..., n, D]"""
    width = x.shape[-1]
    largest = x.abs().argsort(dim=-1, descending=True, stable=True)[..., :kept]
    mask = torch.zeros_like(x, dtype=torch.bool).scatter_(-1, largest, True)
    bits = F.pad(mask, (0, -width % WORD)).unflatten(-1, (-1, WORD)).long()
    bitmap = (bits << torch.arange(WORD, device=x.device)).sum(-1).to(torch.int32)
    return SparseRows(bitmap, x[mask].view(*x.shape[:-1], kept), width)


def expand(rows: SparseRows) -> Tensor:
    """The rows, with zeros where nothing was kept. [..., n, D]"""
    places = torch.arange(WORD, dtype=torch.int32, device=rows.bitmap.device)
    bits = (rows.bitmap[..., None] >> places) & 1  # [..., n, words, 32]
    mask = bits.flatten(-2)[..., : rows.width].bool()
    return rows.values.new_zeros(mask.shape).masked_scatter_(mask, rows.values)


def bitmap_partial(
    query: Tensor, keys: SparseRows, values: SparseRows, *,
    scale: float, seen: int, window: int | None = None, positions: Tensor | None = None, start: int = 0,
    softcap: float | None = None,
) -> Partial:
    """Attention over sparse rows that all came before the queries.

    query: [B, H_q, T, D]. keys, values: rows of [B, H_kv, N, D] and [B, H_kv, N, D_v]. positions: [B, H_kv, N], where
    rows have gone missing and a window counts tokens; otherwise row 0 is the token `start`.
    """
    batch, kv_heads, n_rows, _ = values.bitmap.shape
    output = query.new_zeros((*query.shape[:3], values.width), dtype=torch.float32)
    lse = query.new_full(query.shape[:3], -torch.inf, dtype=torch.float32)
    size = max(1, BLOCK // (batch * kv_heads * max(keys.width, values.width)))
    for low in range(0, n_rows, size):
        stop = min(low + size, n_rows)
        after = torch.tensor(seen - start - low, device=query.device)  # rows from here to the last query
        part = dense_partial(
            query, expand(keys.rows(low, stop)), expand(values.rows(low, stop)), scale=scale, seen=seen, window=window,
            positions=None if positions is None else positions[:, :, low:stop], softcap=softcap, length=after,
        )
        both = torch.logaddexp(lse, part.lse)
        shift = both.masked_fill(both == -torch.inf, 0.0)  # no row seen yet: weights are zero, not NaN
        output = output * (lse - shift).exp()[..., None] + part.output * (part.lse - shift).exp()[..., None]
        lse = both
    return Partial(output, lse)
