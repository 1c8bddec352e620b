"""Blocks of queries, each softmaxed over its rows and summed away: memory is linear in N, never T x N."""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.kernels.dense_attention.torch import visible_rows

BLOCK_ELEMENTS = 1 << 22
"""Logits held at a time."""


def column_sums(
    query: Tensor, keys: Tensor, *, scale: float, seen: int, window: int | None = None, positions: Tensor | None = None,
    softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:
    """Attention mass of each row over the last T queries and the heads of its group. [B, H_kv, N] float32

    query: [B, H_q, T, D], the queries of the last T rows. keys: [B, H_kv, N, D].
    """
    batch, heads, n_query, _ = query.shape
    kv_heads, n_key = keys.shape[1:3]
    before = n_key - n_query
    sums = torch.zeros(batch, kv_heads, n_key, dtype=torch.float32, device=keys.device)
    grouped = query.unflatten(1, (kv_heads, -1))  # [B, H_kv, G, T, D]
    size = max(1, BLOCK_ELEMENTS // (batch * heads * n_key))
    for start in range(0, n_query, size):
        stop = min(start + size, n_query)
        high = before + stop
        logits = (grouped[:, :, :, start:stop] @ keys[:, :, None, :high].transpose(-1, -2)).float() * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        where = None if positions is None else positions[:, :, :high]
        mask = visible_rows(before + start, stop - start, high, window, where, seen - n_query + start, keys.device)
        logits = logits.masked_fill(~(mask if mask.dim() == 2 else mask[:, :, None]), -torch.inf)
        if sinks is not None:
            column = sinks.float().view(1, kv_heads, -1, 1, 1).expand(*logits.shape[:-1], 1)
            logits = torch.cat([logits, column], dim=-1)
        sums[:, :, :high] += logits.softmax(-1)[..., :high].sum((2, 3))
    return sums
