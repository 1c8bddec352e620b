"""Reference implementation: the whole attention matrix in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def scattered_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    places: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention output of tokens at these places; see `torch.scattered_attention`. [B, H_q, m, D_v]"""
    kv_heads, n_key = keys.shape[1:3]
    grouped = query.double().unflatten(1, (kv_heads, -1))  # [B, H_kv, G, m, D]
    logits = torch.einsum("bhgtd,bhnd->bhgtn", grouped, keys.double()) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    index = torch.arange(n_key, device=keys.device)
    logits = logits.masked_fill(index[None, :] > places[:, None], -torch.inf)
    if sinks is not None:
        column = sinks.double().view(1, kv_heads, -1, 1, 1).expand(*logits.shape[:-1], 1)
        logits = torch.cat([logits, column], dim=-1)
    weights = logits.softmax(-1)[..., :n_key]
    return torch.einsum("bhgtn,bhnd->bhgtd", weights, values.double()).flatten(1, 2).to(query.dtype)
