"""Reference implementation: the whole attention matrix of the observation window, in float64."""

from __future__ import annotations

from torch import Tensor

from kvbench.kernels.dense_attention.naive import attention_weights


def window_scores(
    query: Tensor, keys: Tensor, *, scale: float, seen: int, window: int | None = None, positions: Tensor | None = None,
    softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:
    """Attention mass of each entry over the last w queries, by query head. [B, H_q, N] float64"""
    return attention_weights(
        query, keys, scale=scale, seen=seen, window=window, positions=positions, softcap=softcap, sinks=sinks
    ).sum(3).flatten(1, 2)
