"""Block attention that gathers the chosen entries of one block of queries at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def block_attention(
    query: Tensor, keys: Tensor, values: Tensor, blocks: Tensor, columns: Tensor | None = None, *, block: int,
    scale: float, softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of T queries over chosen entries among the T, each counted once. [B, H_q, T, D_v]

    query: [B, H_q, T, D]. keys: [B, H_kv, T, D], values: [B, H_kv, T, D_v].
    blocks: [B, H_q, T / block, T / block] bool, of queries and entries; each block of queries has its own one.
    columns: [B, H_q, T] bool, entries that all later queries read, inside chosen blocks or not.
    """
    batch, heads, tokens, _ = query.shape
    group = heads // keys.shape[1]
    output = query.new_empty((batch, heads, tokens, values.shape[3]))
    for b in range(batch):
        for head in range(heads):
            key, value = keys[b, head // group], values[b, head // group]
            for number, low in enumerate(range(0, tokens, block)):
                stop = min(low + block, tokens)
                mask = blocks[b, head, number, : number + 1].repeat_interleave(block)[:stop]
                if columns is not None:
                    mask = mask | columns[b, head, :stop]
                entries = mask.nonzero()[:, 0]
                # In float32, as in `ragged_attention`.
                logits = query[b, head, low:stop].float() @ key.index_select(0, entries).float().mT * scale
                if softcap is not None:
                    logits = softcap * torch.tanh(logits / softcap)
                own = stop - low  # the last entries are the queries' own
                logits[:, -own:].masked_fill_(later_entries(own, query.device), -torch.inf)
                if sinks is not None:
                    logits = torch.cat([logits, sinks[head].float().expand(own, 1)], dim=1)
                weights = logits.softmax(-1)[:, : len(entries)].to(value.dtype)
                output[b, head, low:stop] = weights @ value.index_select(0, entries)
    return output


def later_entries(count: int, device: torch.device) -> Tensor:
    """Of `count` queries and their own entries, those that come later than the query. [count, count] bool"""
    return torch.ones((count, count), dtype=torch.bool, device=device).triu(1)
