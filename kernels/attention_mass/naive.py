"""Reference implementation: one query at a time, in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def attention_mass(
    query: Tensor, keys: Tensor, at: Tensor, *, scale: float, lse: Tensor | None = None, window: int | None = None,
    logical: Tensor | None = None, positions: Tensor | None = None, softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention mass of each entry, summed over the queries and the query heads of its group. [B, H_kv, N] float64"""
    batch, heads, n_query, _ = query.shape
    kv_heads, n_key = keys.shape[1:3]
    mass = torch.zeros(batch, kv_heads, n_key, dtype=torch.float64)
    for b in range(batch):
        for head in range(heads):
            kv_head = head // (heads // kv_heads)
            for i in range(n_query):
                sees = torch.arange(n_key) <= at[i]
                if window is not None and positions is None:
                    sees &= at[i] - torch.arange(n_key) < window
                if window is not None and positions is not None:
                    assert logical is not None
                    sees &= logical[i] - positions[b, kv_head] < window
                logits = keys[b, kv_head, sees].double() @ query[b, head, i].double() * scale
                if softcap is not None:
                    logits = softcap * torch.tanh(logits / softcap)
                terms = logits if sinks is None else torch.cat([logits, sinks[head : head + 1].double()])
                total = terms.logsumexp(0) if lse is None else lse[b, head, i].double()
                mass[b, kv_head, sees] += torch.exp(logits - total)
    return mass
