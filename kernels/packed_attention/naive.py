"""The oracle: packed rows brought back to float64 before exact ones, then dense attention."""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.kernels.dense_attention.naive import dense_attention
from kvbench.kernels.pack.naive import dequantise
from kvbench.kernels.pack.torch import Codes


def packed_attention(
    query: Tensor, keys: Codes, values: Codes, tail_keys: Tensor, tail_values: Tensor, *, scale: float, seen: int,
    window: int | None = None, positions: Tensor | None = None, softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of the last T rows over packed rows and an exact tail. [B, H_q, T, D_v]

    positions: of all rows [B, H_kv, N], needed where a window counts tokens across holes.
    """
    rows = values.packed.shape[-2]
    return dense_attention(
        query, torch.cat([_exact(keys)[..., :rows, :], tail_keys.double()], dim=2),
        torch.cat([_exact(values), tail_values.double()], dim=2), scale=scale, seen=seen, window=window,
        positions=positions, softcap=softcap, sinks=sinks,
    )


def _exact(codes: Codes) -> Tensor:
    return dequantise(
        codes.packed, codes.scale, codes.minimum, codes.bits, codes.width, tokens=codes.tokens,
        channels=codes.channels,
    )
