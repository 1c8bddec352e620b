"""Attention over sparse entries, expanded a block at a time."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench.kernels.pack.torch import look_up
from kvbench.kernels.ragged_attention.torch import Partial, dense_partial

WORD = 32
"""Bits of a word of a bitmap."""
BLOCK = 2**20
"""Elements expanded at a time, over all heads."""


@dataclass(frozen=True)
class SparseEntries:
    """Vectors that kept the same number of elements each (Mustafar, with slots of equal size)."""

    bitmap: Tensor
    """[..., n, ceil(D / 32)] int32: bit i % 32 of word i // 32 is set if element i was kept."""
    values: Tensor
    """[..., n, kept]: the kept elements, in their order."""
    width: int
    """D, elements of a vector."""

    def slice(self, start: int, stop: int) -> SparseEntries:
        """The entries from `start` to `stop`, as views."""
        return replace(self, bitmap=self.bitmap[..., start:stop, :], values=self.values[..., start:stop, :])


def compress(x: Tensor, kept: int) -> SparseEntries:
    """Keep the `kept` largest elements of every vector by magnitude; ties go to the first. x: [..., n, D]"""
    width = x.shape[-1]
    largest = x.abs().argsort(dim=-1, descending=True, stable=True)[..., :kept]
    mask = torch.zeros_like(x, dtype=torch.bool).scatter_(-1, largest, True)
    bits = F.pad(mask, (0, -width % WORD)).unflatten(-1, (-1, WORD)).long()
    bitmap = (bits << torch.arange(WORD, device=x.device)).sum(-1).to(torch.int32)
    return SparseEntries(bitmap, x[mask].view(*x.shape[:-1], kept), width)


def expand(entries: SparseEntries) -> Tensor:
    """The vectors, with zeros for the elements that were dropped. [..., n, D]

    A table has the places of the elements of every byte of a bitmap, which is faster on a CPU than a masked scatter.
    """
    places, counts = _every_byte(entries.bitmap.device)
    byte = entries.bitmap.contiguous().view(torch.uint8).flatten()
    kept = look_up(counts, byte)
    before = kept.cumsum(0, dtype=torch.int32) - kept
    at = (look_up(places, byte) + before[:, None]).clamp_min_(0)  # [bytes, 8], 0: dropped
    values = torch.cat([entries.values.new_zeros(1), entries.values.flatten()])
    return values.index_select(0, at.flatten()).view(*entries.bitmap.shape[:-1], -1)[..., : entries.width]


@functools.lru_cache(maxsize=64)
def _every_byte(device: torch.device) -> tuple[Tensor, Tensor]:
    """Of every byte: the place of each bit that is set, from 1, far below 0 for others; how many are set."""
    bits = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device) & 1
    return torch.where(bits > 0, bits.cumsum(1), -(2**30)).to(torch.int32), bits.sum(1, dtype=torch.int32)


def bitmap_partial(
    query: Tensor, keys: SparseEntries, values: SparseEntries, *,
    scale: float, seen: int, window: int | None = None, positions: Tensor | None = None, start: int = 0,
    softcap: float | None = None,
) -> Partial:
    """Partial attention over sparse entries that all precede the queries.

    query: [B, H_q, T, D]. keys, values: sparse forms of [B, H_kv, N, D] and [B, H_kv, N, D_v].
    positions: [B, H_kv, N], needed with a window if entries were dropped; None: entry 0 is the token `start`.
    """
    batch, kv_heads, n_entries, _ = values.bitmap.shape
    output = query.new_zeros((*query.shape[:3], values.width), dtype=torch.float32)
    lse = query.new_full(query.shape[:3], -torch.inf, dtype=torch.float32)
    size = max(1, BLOCK // (batch * kv_heads * max(keys.width, values.width)))
    for low in range(0, n_entries, size):
        stop = min(low + size, n_entries)
        after = torch.full((), seen - start - low, device=query.device)  # entries from here to the last query
        part = dense_partial(
            query, expand(keys.slice(low, stop)), expand(values.slice(low, stop)), scale=scale, seen=seen,
            window=window, positions=None if positions is None else positions[:, :, low:stop], softcap=softcap,
            length=after,
        )
        both = torch.logaddexp(lse, part.lse)
        shift = both.masked_fill(both == -torch.inf, 0.0)  # no visible entry yet: weights are zero, not NaN
        output = output * (lse - shift).exp()[..., None] + part.output * (part.lse - shift).exp()[..., None]
        lse = both
    return Partial(output, lse)
