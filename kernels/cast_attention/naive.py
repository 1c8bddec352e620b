"""Reference implementation: numbers by the definition of e4m3, then dense attention in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.kernels.dense_attention import naive


def cast_attention(
    query: Tensor, keys: Tensor, values: Tensor, key_scale: Tensor | None, value_scale: Tensor | None,
    tail_keys: Tensor, tail_values: Tensor, *,
    scale: float, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:
    """Attention of the last T tokens over e4m3 numbers and an exact tail that ends with their own entries."""
    whole = [
        torch.cat([read(x) * (1.0 if factor is None else factor.double()[:, None, None]), tail.double()], dim=2)
        for x, factor, tail in ((keys, key_scale, tail_keys), (values, value_scale, tail_values))
    ]
    return naive.dense_attention(
        query.double(), *whole, scale=scale, seen=whole[0].shape[2], window=window, softcap=softcap, sinks=sinks
    )


def read(byte: Tensor) -> Tensor:
    """Numbers with a sign, 4 bits of exponent, 3 of the fraction; the largest byte of a sign is no number. float64"""
    sign = 1.0 - 2.0 * (byte >> 7).double()
    exponent, fraction = (byte >> 3 & 15).double(), (byte & 7).double() / 8
    size = torch.where(exponent == 0, fraction * 2.0**-6, (1 + fraction) * 2 ** (exponent - 7))
    return sign * size.masked_fill((byte & 127) == 127, torch.nan)
