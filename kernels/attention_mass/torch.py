"""Attention mass in blocks of queries, so that memory is linear in N and never P x N."""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.kernels.blocks import fit_block, float_products
from kvbench.kernels.ragged_attention.torch import Partial


def joint_lse(parts: list[Partial], sinks: Tensor | None = None) -> Tensor:
    """Log of the normalizer of a softmax over all parts' entries and a sink logit per head. [B, H_q, T] float32"""
    lse = torch.stack([part.lse for part in parts]).logsumexp(0)
    return lse if sinks is None else torch.logaddexp(lse, sinks.float().view(1, -1, 1))


def attention_mass(
    query: Tensor, keys: Tensor, at: Tensor, *, scale: float, lse: Tensor | None = None, window: int | None = None,
    logical: Tensor | None = None, positions: Tensor | None = None, softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention mass of each entry, summed over the queries and the query heads of its group. [B, H_kv, N] float32

    query: [B, H_q, P, D], any queries. keys: [B, H_kv, N, D].
    at: [P], index of the last entry that each query attends to.
    lse: [B, H_q, P], log of each query's normalizer over more entries than these, sinks included; None: over these.
    logical, positions: [P] and [B, H_kv, N], positions of queries and entries; needed with a window if entries were
        dropped, because a window counts tokens.
    """
    batch, heads, n_query, _ = query.shape
    kv_heads, n_key = keys.shape[1:3]
    mass = torch.zeros(batch, kv_heads, n_key, dtype=torch.float32, device=keys.device)
    grouped = query.unflatten(1, (kv_heads, -1))  # [B, H_kv, G, P, D]
    entry = torch.arange(n_key, device=keys.device)
    size = fit_block(batch * heads * n_key, keys)
    for start in range(0, n_query, size):
        block = slice(start, start + size)
        some = grouped[:, :, :, block]  # one product per KV head: keys are not copied for the heads of their group
        logits = float_products(some.flatten(2, 3), keys).unflatten(2, some.shape[2:4]) * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        mask = entry <= at[block, None]  # [p, N]
        if window is not None and positions is None:
            mask = mask & (at[block, None] - entry < window)
        elif window is not None:
            assert logical is not None and positions is not None, "a window with dropped entries needs both positions"
            mask = mask & (logical[block, None] - positions[:, :, None, None] < window)  # [B, H_kv, 1, p, N]
        logits = logits.masked_fill(~mask, -torch.inf)
        if lse is None:
            total = logits.logsumexp(-1)
            if sinks is not None:
                total = torch.logaddexp(total, sinks.float().view(1, kv_heads, -1, 1))
        else:
            total = lse.unflatten(1, (kv_heads, -1))[:, :, :, block]
        total = total.masked_fill(total == -torch.inf, 0.0)  # of a query that sees no entry
        mass += torch.exp(logits - total[..., None]).sum((2, 3))
    return mass
