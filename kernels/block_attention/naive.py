"""Reference implementation: one query at a time, a softmax over its chosen entries, in float64."""

from __future__ import annotations

import torch
from torch import Tensor


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
                logits = keys[b, head // group, entries].double() @ query[b, head, t].double() * scale
                if softcap is not None:
                    logits = softcap * torch.tanh(logits / softcap)
                if sinks is not None:
                    logits = torch.cat([logits, sinks[head : head + 1].double()])
                weights = logits.softmax(-1)[: len(entries)]
                output[b, head, t] = weights @ values[b, head // group, entries].double()
    return output.to(query.dtype)
