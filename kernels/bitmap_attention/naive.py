"""Reference implementation: one element at a time, and attention over the expanded entries, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.kernels.bitmap_attention.torch import SparseEntries
from kvbench.kernels.packed_attention.naive import earlier_partial
from kvbench.kernels.ragged_attention.torch import Partial


def compress(x: Tensor, kept: int) -> SparseEntries:
    """See `torch.compress`."""
    bitmaps, values = [], []
    for entry in x.flatten(0, -2).tolist():
        largest = [i for _, i in sorted((-abs(element), i) for i, element in enumerate(entry))[:kept]]
        bitmaps.append([sum(1 << i % 32 for i in largest if i // 32 == word) for word in range(-(-len(entry) // 32))])
        values.append([entry[i] for i in sorted(largest)])
    return SparseEntries(
        torch.tensor(bitmaps).to(torch.int32).view(*x.shape[:-1], -1),
        torch.tensor(values, dtype=x.dtype).view(*x.shape[:-1], kept), x.shape[-1],
    )


def expand(entries: SparseEntries) -> Tensor:
    """The entries, with zeros for the elements that were dropped. [..., D] float64"""
    exact = torch.zeros(*entries.bitmap.shape[:-1], entries.width, dtype=torch.float64)
    bitmaps = entries.bitmap.flatten(0, -2).tolist()
    for entry, bitmap, values in zip(
        exact.view(-1, entries.width), bitmaps, entries.values.flatten(0, -2), strict=True
    ):
        where = [i for i in range(entries.width) if bitmap[i // 32] >> i % 32 & 1]
        entry[where] = values.double()
    return exact


def bitmap_partial(
    query: Tensor, keys: SparseEntries, values: SparseEntries, *, scale: float, seen: int, window: int | None = None,
    positions: Tensor | None = None, start: int = 0, softcap: float | None = None,
) -> Partial:
    """See `torch.bitmap_partial`, in float64."""
    return earlier_partial(
        query, expand(keys), expand(values), scale=scale, seen=seen, window=window, positions=positions, start=start,
        softcap=softcap,
    )
