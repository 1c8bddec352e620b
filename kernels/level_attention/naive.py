"""Reference implementation: every element looked up and multiplied by itself, then attention in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.kernels.cast_attention.naive import read
from kvbench.kernels.level_attention.torch import Levels
from kvbench.kernels.pack.naive import unpack
from kvbench.kernels.packed_attention.naive import earlier_partial
from kvbench.kernels.ragged_attention.torch import Partial


def level_partial(
    query: Tensor, keys: tuple[Levels, ...], values: tuple[Levels, ...], *,
    scale: float, seen: int, start: int = 0, window: int | None = None, softcap: float | None = None,
) -> Partial:
    """See `torch.level_partial`, in float64."""
    return earlier_partial(
        query, decode(keys), decode(values), scale=scale, seen=seen, window=window, positions=None, start=start,
        softcap=softcap,
    )


def decode(parts: tuple[Levels, ...]) -> Tensor:
    """The parts of every vector side by side. [B, H_kv, n, D] float64"""
    decoded = []
    for part in parts:
        factor = read(part.factor) if part.factor.dtype == torch.uint8 else part.factor.double()
        codes = unpack(part.packed, part.bits, part.width)
        exact = torch.empty(codes.shape, dtype=torch.float64)
        for channel in range(part.width):
            group = channel * part.factor.shape[-1] // part.width
            exact[..., channel] = part.table.double()[codes[..., channel].long()] * factor[..., group]
        decoded.append(exact)
    return torch.cat(decoded, dim=-1)
