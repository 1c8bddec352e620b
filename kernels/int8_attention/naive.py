"""Reference implementation: entries dequantized to float64, then dense attention."""

from __future__ import annotations

from torch import Tensor

from kvbench.kernels.dense_attention.naive import dense_attention


def int8_attention(
    query: Tensor, key: Tensor, value: Tensor, key_scale: Tensor, value_scale: Tensor, *, scale: float,
    window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:
    """Attention of the last T tokens over dequantized keys and values. [B, H_q, T, D_v]"""
    keys = key.double() * key_scale.double()[..., None]
    values = value.double() * value_scale.double()[..., None]
    return dense_attention(
        query.double(), keys, values, scale=scale, seen=key.shape[2], window=window, softcap=softcap, sinks=sinks
    ).to(query.dtype)
