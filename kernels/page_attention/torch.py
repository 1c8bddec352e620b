"""Page attention that gathers whole pages for a few queries at a time, with explicit logits."""

from __future__ import annotations

import torch
from torch import Tensor

GATHERED = 1 << 20
"""Elements gathered at a time on a CPU, about the size of its cache."""
GATHERED_ON_GPU = 1 << 26


def page_attention(
    query: Tensor, keys: Tensor, values: Tensor, pages: Tensor, *, page: int, before: int | Tensor, scale: float,
    window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:
    """Attention of T queries over the entries of their pages, up to their own entry. [B, H_q, T, D_v]

    query: [B, H_q, T, D]. keys: [B, H_kv, N, D], values: [B, H_kv, N, D_v]: contiguous, N a multiple of `page`.
    pages: [B, H_q, T, k], distinct for each query; one has the query's own entry, others may lie beyond the last.
    before: entries before the first query's own; a tensor on the device if shapes must not change.
    """
    batch, heads, n_query, chosen = pages.shape
    kv_heads, n_pages = keys.shape[1], keys.shape[2] // page
    head = torch.arange(batch * heads, device=pages.device).view(batch, heads, 1, 1) // (heads // kv_heads)
    flat = (head * n_pages + pages.clamp_max(n_pages - 1)).flatten(0, 2)  # [U, k] for every query of every head
    numbers = pages.flatten(0, 2)  # [U, k]
    at = (before + torch.arange(n_query, device=pages.device)).repeat(batch * heads)  # [U]
    units = query.flatten(0, 2)[:, None]  # [U, 1, D]
    sink = None if sinks is None else sinks.float().view(1, -1, 1).expand(batch, -1, n_query).flatten()  # [U]
    paged_keys, paged_values = keys.view(-1, page * keys.shape[3]), values.view(-1, page * values.shape[3])
    entry = torch.arange(page, device=pages.device)
    size = max(1, (GATHERED_ON_GPU if query.is_cuda else GATHERED) // (chosen * paged_keys.shape[1]))
    blocks = []
    for low in range(0, len(units), size):
        some = slice(low, min(low + size, len(units)))
        count = some.stop - low
        key, value = (
            x.index_select(0, flat[some].flatten()).view(count, chosen * page, -1) for x in (paged_keys, paged_values)
        )
        # In float32, as in `ragged_attention`; the other order would copy the keys once more.
        logits = (key.float() @ units[some].float().mT)[..., 0] * scale  # [u, k * page]
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        entries = (numbers[some] * page)[..., None] + entry  # [u, k, page]
        distance = (at[some, None, None] - entries).flatten(1)
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        logits = logits.masked_fill(hidden, -torch.inf)
        if sink is not None:
            logits = torch.cat([logits, sink[some, None]], dim=-1)
        weights = logits.softmax(-1)[:, : chosen * page].to(value.dtype)
        blocks.append((weights[:, None] @ value)[:, 0])
    return torch.cat(blocks).view(batch, heads, n_query, -1)
