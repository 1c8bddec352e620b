"""The oracle: each head by itself, one softmax over its flat rows and its tail, in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def ragged_attention(
    query: Tensor, flat_keys: Tensor, flat_values: Tensor, counts: list[int], tail_keys: Tensor, tail_values: Tensor, *,
    scale: float,
) -> Tensor:
    """Attention of the last T rows over flat rows and a causal dense tail. [B, H_q, T, D_v]"""
    batch, heads, n_query, _ = query.shape
    kv_heads, tail = tail_keys.shape[1:3]
    output = query.new_zeros((batch, heads, n_query, tail_values.shape[3]), dtype=torch.float64)
    start = 0
    for b in range(batch):
        for h in range(kv_heads):
            count = counts[b * kv_heads + h]
            keys = torch.cat([flat_keys[start : start + count], tail_keys[b, h]]).double()
            values = torch.cat([flat_values[start : start + count], tail_values[b, h]]).double()
            start += count
            for g in range(heads // kv_heads):
                q = h * (heads // kv_heads) + g
                for t in range(n_query):
                    last = count + tail - n_query + t + 1
                    weights = (query[b, q, t].double() @ keys[:last].T * scale).softmax(-1)
                    output[b, q, t] = weights @ values[:last]
    return output.to(query.dtype)
