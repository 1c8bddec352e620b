"""Two passes over blocks of keys: the log-sum-exp of each query, then each entry's mass. Memory is linear in N.

The first block's logits are kept between the passes, so that a context of one block computes them once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvbench.kernels.blocks import float_products
from kvbench.kernels.dense_attention.torch import hide_unseen

ENTRY_BLOCK = 4096


def window_scores(
    query: Tensor, keys: Tensor, *, scale: float, seen: int, window: int | None = None, positions: Tensor | None = None,
    softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:
    """Attention mass of each entry over the last w queries, normalized over all N entries. [B, H_q, N] float32

    query: [B, H_q, w, D], the queries of the last w entries. keys: [B, H_kv, N, D].
    """
    weights = window_weights(
        query, keys, scale=scale, seen=seen, window=window, positions=positions, softcap=softcap, sinks=sinks
    )
    return torch.cat([block.sum(3) for block in weights], dim=-1).flatten(1, 2)


def window_weights(
    query: Tensor, keys: Tensor, *, scale: float, seen: int, window: int | None = None, positions: Tensor | None = None,
    softcap: float | None = None, sinks: Tensor | None = None,
) -> Iterator[Tensor]:
    """Weights of the last w queries on each block of entries, normalized over all N. [B, H_kv, G, w, n] float32

    For scores that need more than sums: variances, maxima. Arguments are those of `window_scores`.
    """
    batch, _, n_query, _ = query.shape
    kv_heads, n_key = keys.shape[1:3]
    grouped = query.unflatten(1, (kv_heads, -1)).flatten(2, 3)  # [B, H_kv, G * w, D]

    def logits(low: int, high: int) -> Tensor:
        block = float_products(grouped, keys[:, :, low:high]) * scale
        if softcap is not None:
            block = softcap * torch.tanh(block / softcap)
        by_query = block.unflatten(2, (-1, n_query))  # [B, H_kv, G, w, n]
        where = None if positions is None else positions[:, :, low:high]
        return hide_unseen(by_query, n_key - n_query - low, window, where, seen - n_query)

    blocks = [(low, min(low + ENTRY_BLOCK, n_key)) for low in range(0, n_key, ENTRY_BLOCK)]
    first = logits(*blocks[0])
    parts = [first.logsumexp(-1), *(logits(*block).logsumexp(-1) for block in blocks[1:])]
    if sinks is not None:
        parts.append(sinks.float().view(1, kv_heads, -1, 1).expand(batch, -1, -1, n_query))
    lse = (parts[0] if len(parts) == 1 else torch.stack(parts).logsumexp(0))[..., None]
    yield (first - lse).exp_()
    for block in blocks[1:]:
        yield (logits(*block) - lse).exp_()
