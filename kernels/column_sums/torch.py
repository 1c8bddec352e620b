"""Sums over queries in blocks, so that memory is linear in N and never T x N."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvbench.kernels.blocks import fit_block, float_products
from kvbench.kernels.column_sums.repeated import is_repeated, repeated_maxima, repeated_sums
from kvbench.kernels.dense_attention.torch import hide_unseen


def column_sums(
    query: Tensor, keys: Tensor, *, scale: float, seen: int, window: int | None = None, positions: Tensor | None = None,
    softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:
    """Attention mass of each entry over the last T queries and the heads of its group. [B, H_kv, N] float32

    query: [B, H_q, T, D], the queries of the last T entries. keys: [B, H_kv, N, D].
    """
    if is_repeated(query, window, positions):
        return repeated_sums(query, keys, scale=scale, softcap=softcap, sinks=sinks)
    sums = torch.zeros(keys.shape[:3], dtype=torch.float32, device=keys.device)
    for weights in _blocks(query, keys, scale, seen, window, positions, softcap, sinks):
        sums[:, :, : weights.shape[-1]] += weights.sum((2, 3))
    return sums


def column_maxima(
    query: Tensor, keys: Tensor, *, scale: float, seen: int, window: int | None = None, positions: Tensor | None = None,
    softcap: float | None = None, sinks: Tensor | None = None, factors: Tensor | None = None,
) -> Tensor:
    """The largest weight of each entry over the last T queries and the heads of its group. [B, H_kv, N] float32

    query: [B, H_q, T, D], the queries of the last T entries. keys: [B, H_kv, N, D]. factors: [B, T], above 0, by which
    each query's weights are multiplied first.
    """
    if factors is None and is_repeated(query, window, positions):
        return repeated_maxima(query, keys, scale=scale, softcap=softcap, sinks=sinks)
    best = torch.zeros(keys.shape[:3], dtype=torch.float32, device=keys.device)
    start = 0
    for weights in _blocks(query, keys, scale, seen, window, positions, softcap, sinks):
        if factors is not None:
            weights.mul_(factors[:, None, None, start : start + weights.shape[3], None])
            start += weights.shape[3]
        some = best[:, :, : weights.shape[-1]]
        torch.maximum(some, weights.amax((2, 3)), out=some)
    return best


def _blocks(
    query: Tensor, keys: Tensor, scale: float, seen: int, window: int | None, positions: Tensor | None,
    softcap: float | None, sinks: Tensor | None,
) -> Iterator[Tensor]:
    """Attention weights of a block of queries on the entries up to the last query's own. [B, H_kv, G, t, n]"""
    batch, heads, n_query, _ = query.shape
    kv_heads, n_key = keys.shape[1:3]
    before = n_key - n_query
    grouped = query.unflatten(1, (kv_heads, -1))  # [B, H_kv, G, T, D]
    size = fit_block(batch * heads * n_key, keys)
    for start in range(0, n_query, size):
        stop = min(start + size, n_query)
        high = before + stop
        some = grouped[:, :, :, start:stop]  # one product per KV head: keys are not copied for the heads of a group
        logits = float_products(some.flatten(2, 3), keys[:, :, :high]).unflatten(2, some.shape[2:4]) * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        where = None if positions is None else positions[:, :, :high]
        logits = hide_unseen(logits, before + start, window, where, seen - n_query + start)
        if sinks is not None:
            column = sinks.float().view(1, kv_heads, -1, 1, 1).expand(*logits.shape[:-1], 1)
            logits = torch.cat([logits, column], dim=-1)
        yield logits.softmax(-1)[..., :high]
