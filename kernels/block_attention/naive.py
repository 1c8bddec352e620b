"""Reference implementation: one query at a time, a softmax over its chosen entries, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.kernels.page_attention.naive import attend_entries


def block_attention(
    query: Tensor, keys: Tensor, values: Tensor, blocks: Tensor, columns: Tensor | None = None, *, block: int,
    scale: float, softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:
    """See `torch.block_attention`. [B, H_q, T, D_v]"""
    batch, heads, tokens, _ = query.shape
    group = heads // keys.shape[1]
    output = query.new_zeros((batch, heads, tokens, values.shape[3]), dtype=torch.float64)
    for b in range(batch):
        for head in range(heads):
            for t in range(tokens):
                entries = [
                    x for x in range(t + 1)
                    if blocks[b, head, t // block, x // block] or (columns is not None and columns[b, head, x])
                ]
                output[b, head, t] = attend_entries(
                    query[b, head, t], keys[b, head // group, entries], values[b, head // group, entries], scale,
                    softcap, None if sinks is None else sinks[head : head + 1],
                )
    return output.to(query.dtype)
