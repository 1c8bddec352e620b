"""Attention by SDPA in blocks of queries, each over the entries up to the last position of its block."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from kvbench.kernels.dense_attention.torch import QUERY_BLOCK, WITHOUT_CUDNN, dense_attention, explicit, grouped_sdpa


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
    """Attention output of m tokens, each over the entries up to its own place. [B, H_q, m, D_v]

    query: [B, H_q, m, D]. keys: [B, H_kv, N, D]. values: [B, H_kv, N, D_v], of every place in order.
    places: [m], ascending.
    """
    count = len(places)
    first, last = int(places[0]), int(places[-1])
    if last - first == count - 1:  # neighbors: causal attention
        return dense_attention(
            query, keys[:, :, : last + 1], values[:, :, : last + 1], scale=scale, seen=last + 1, softcap=softcap,
            sinks=sinks,
        )
    blocks = []
    for start in range(0, count, QUERY_BLOCK):
        part = places[start : start + QUERY_BLOCK]
        end = int(part[-1]) + 1
        block, k, v = query[:, :, start : start + len(part)], keys[:, :, :end], values[:, :, :end]
        mask = torch.arange(end, device=keys.device) <= part[:, None]  # [m, N]
        if softcap is None and sinks is None:
            with sdpa_kernel(list(WITHOUT_CUDNN)):
                blocks.append(grouped_sdpa(block, k, v, mask, scale))
        else:
            blocks.append(explicit(block, k, v, mask, scale, softcap, sinks))
    return torch.cat(blocks, dim=2)
