"""Blocks of queries, each softmaxed over its rows and summed away: memory is linear in N, never P x N."""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.kernels.ragged_attention.torch import Partial

BLOCK_ELEMENTS = 1 << 22
"""Logits held at a time."""


def joint_lse(parts: list[Partial], sinks: Tensor | None = None) -> Tensor:
    """Log of the normalizer of one softmax over all the parts' rows and a sink logit per head. [B, H_q, T] float32"""
    lse = torch.stack([part.lse for part in parts]).logsumexp(0)
    return lse if sinks is None else torch.logaddexp(lse, sinks.float().view(1, -1, 1))


def attention_mass(
    query: Tensor, keys: Tensor, at: Tensor, *, scale: float, lse: Tensor | None = None, window: int | None = None,
    logical: Tensor | None = None, positions: Tensor | None = None, softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention mass of each row over the queries and the heads of its group. [B, H_kv, N] float32

    query: [B, H_q, P, D], any queries. keys: [B, H_kv, N, D]. at: [P], the row of each query: it sees rows up to that.
    lse: [B, H_q, P], log of each query's normalizer where it sees more rows than these; sinks are in it already.
    logical, positions: [P] and [B, H_kv, N], where rows have gone missing, so that a window counts tokens.
    """
    batch, heads, n_query, _ = query.shape
    kv_heads, n_key = keys.shape[1:3]
    mass = torch.zeros(batch, kv_heads, n_key, dtype=torch.float32, device=keys.device)
    grouped = query.unflatten(1, (kv_heads, -1))  # [B, H_kv, G, P, D]
    row = torch.arange(n_key, device=keys.device)
    size = max(1, BLOCK_ELEMENTS // max(1, batch * heads * n_key))
    for start in range(0, n_query, size):
        block = slice(start, start + size)
        some = grouped[:, :, :, block]  # one product per KV head: rows are not copied for the heads of their group
        logits = (some.flatten(2, 3) @ keys.transpose(-1, -2)).float().unflatten(2, some.shape[2:4]) * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        mask = row <= at[block, None]  # [p, N]
        if window is not None and positions is None:
            mask = mask & (at[block, None] - row < window)
        elif window is not None:
            assert logical is not None and positions is not None, "a window over holes needs both positions"
            mask = mask & (logical[block, None] - positions[:, :, None, None] < window)  # [B, H_kv, 1, p, N]
        logits = logits.masked_fill(~mask, -torch.inf)
        if lse is None:
            total = logits.logsumexp(-1)
            if sinks is not None:
                total = torch.logaddexp(total, sinks.float().view(1, kv_heads, -1, 1))
        else:
            total = lse.unflatten(1, (kv_heads, -1))[:, :, :, block]
        mass += torch.exp(logits - total[..., None]).sum((2, 3))
    return mass
