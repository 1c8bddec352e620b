"""The oracle: the whole attention matrix, in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def column_sums(query: Tensor, keys: Tensor, *, scale: float) -> Tensor:
    """Attention mass of each row over the last T queries and the heads of its group. [B, H_kv, N]"""
    n_query, n_key = query.shape[2], keys.shape[2]
    kv_heads = keys.shape[1]
    keys = keys.double().repeat_interleave(query.shape[1] // kv_heads, dim=1)
    logits = query.double() @ keys.transpose(-1, -2) * scale
    future = torch.ones(n_query, n_key, dtype=torch.bool).triu(n_key - n_query + 1)
    return logits.masked_fill(future, -torch.inf).softmax(-1).sum(2).unflatten(1, (kv_heads, -1)).sum(2)
