"""Reference implementation: the whole attention matrix in float64, which other reference implementations sum over."""

from __future__ import annotations

import torch
from torch import Tensor


def visible(
    n_query: int, n_key: int, window: int | None, positions: Tensor | None, seen: int, device: torch.device
) -> Tensor:
    """Mask of the entries that the last `n_query` tokens attend to. [T, N] or, with positions, [B, H_kv, T, N]

    Entries are in the order of arrival, so a query attends to all entries before its own. A window counts tokens:
    the distance between entries, or between `positions` [B, H_kv, N] if entries were dropped. seen: tokens so far.
    """
    index = torch.arange(n_key, device=device)
    query = torch.arange(n_query, device=device)
    mask = index[None, :] <= query[:, None] + (n_key - n_query)  # [T, N]
    if window is None:
        return mask
    if positions is None:
        return mask & (query[:, None] + (n_key - n_query) - index[None, :] < window)
    logical = query + (seen - n_query)
    return mask & (logical[:, None] - positions[:, :, None, :] < window)


def attention_weights(
    query: Tensor,
    keys: Tensor,
    *,
    scale: float,
    seen: int,
    window: int | None = None,
    positions: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    causal: bool = True,
) -> Tensor:
    """The whole attention matrix of the last T tokens, in float64. [B, H_kv, G, T, N]"""
    batch, heads, n_query, _ = query.shape
    kv_heads, n_key = keys.shape[1:3]
    grouped = query.double().unflatten(1, (kv_heads, heads // kv_heads))  # [B, H_kv, G, T, D]
    logits = torch.einsum("bhgtd,bhnd->bhgtn", grouped, keys.double()) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if causal:
        mask = visible(n_query, n_key, window, positions, seen, keys.device)
        mask = mask if mask.dim() == 2 else mask[:, :, None]  # [T, N] or [B, H_kv, 1, T, N]
        logits = logits.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        column = sinks.double().view(1, kv_heads, -1, 1, 1).expand(batch, -1, -1, n_query, 1)
        logits = torch.cat([logits, column], dim=-1)
    return logits.softmax(-1)[..., :n_key]


def dense_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    seen: int,
    window: int | None = None,
    positions: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    causal: bool = True,
) -> Tensor:
    """Attention output of the last T tokens; see `torch.dense_attention`. [B, H_q, T, D_v]"""
    weights = attention_weights(
        query, keys, scale=scale, seen=seen, window=window, positions=positions, softcap=softcap, sinks=sinks,
        causal=causal,
    )
    return torch.einsum("bhgtn,bhnd->bhgtd", weights, values.double()).flatten(1, 2).to(query.dtype)
