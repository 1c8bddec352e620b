"""Reference implementation: one query at a time, a softmax over the visible entries of its pages, in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def page_attention(
    query: Tensor, keys: Tensor, values: Tensor, pages: Tensor, *, page: int, before: int, scale: float,
    window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:
    """See `torch.page_attention`. [B, H_q, T, D_v]"""
    batch, heads, n_query, _ = query.shape
    group = heads // keys.shape[1]
    output = query.new_zeros((batch, heads, n_query, values.shape[3]), dtype=torch.float64)
    for b in range(batch):
        for head in range(heads):
            for t in range(n_query):
                at = before + t
                first = 0 if window is None else at - window + 1
                entries = [
                    entry for p in pages[b, head, t].tolist() for entry in range(p * page, (p + 1) * page)
                    if first <= entry <= at
                ]
                output[b, head, t] = attend_entries(
                    query[b, head, t], keys[b, head // group, entries], values[b, head // group, entries], scale,
                    softcap, None if sinks is None else sinks[head : head + 1],
                )
    return output.to(query.dtype)


def attend_entries(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float | None, sink: Tensor | None
) -> Tensor:
    """Attention of one query over some entries, in float64. query: [D]. keys: [n, D]. sink: [1]. Returns [D_v]"""
    logits = keys.double() @ query.double() * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if sink is not None:
        logits = torch.cat([logits, sink.double()])
    return logits.softmax(-1)[: len(keys)] @ values.double()
