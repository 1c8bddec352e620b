"""Reference implementation: the whole attention matrix, in float64."""

from __future__ import annotations

from torch import Tensor

from kvbench.kernels.dense_attention.naive import attention_weights


def column_sums(
    query: Tensor, keys: Tensor, *, scale: float, seen: int, window: int | None = None, positions: Tensor | None = None,
    softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:
    """Attention mass of each entry over the last T queries and the heads of its group. [B, H_kv, N] float64"""
    return attention_weights(
        query, keys, scale=scale, seen=seen, window=window, positions=positions, softcap=softcap, sinks=sinks
    ).sum((2, 3))


def column_maxima(
    query: Tensor, keys: Tensor, *, scale: float, seen: int, window: int | None = None, positions: Tensor | None = None,
    softcap: float | None = None, sinks: Tensor | None = None, factors: Tensor | None = None,
) -> Tensor:
    """The largest weight of each entry over the last T queries and the heads of its group. [B, H_kv, N] float64

    factors: [B, T], by which each query's weights are multiplied first.
    """
    weights = attention_weights(
        query, keys, scale=scale, seen=seen, window=window, positions=positions, softcap=softcap, sinks=sinks
    )
    if factors is not None:
        weights = weights * factors.double()[:, None, None, :, None]
    return weights.amax((2, 3))
