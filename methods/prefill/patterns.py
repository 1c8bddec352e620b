"""Patterns of attention: the attention of a prompt's last queries, its sums along diagonals, and pooled blocks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def last_attention(query: Tensor, key: Tensor, count: int, scale: float) -> Tensor:
    """Attention of the last queries of one head. query: [T, D]. key: [T, D]. Returns [count, T] float32"""
    count = min(count, len(query))
    logits = query[-count:].float() @ key.float().mT * scale
    later = torch.ones_like(logits, dtype=torch.bool).triu(len(key) - count + 1)
    return logits.masked_fill(later, -torch.inf).softmax(-1)


def diagonal_sums(shares: Tensor) -> Tensor:
    """Sums by the distance of the entry from the query. shares: of the last queries, [w, T]. Returns [T]"""
    count, tokens = shares.shape
    sums = shares.new_zeros(tokens)
    for i, row in enumerate(shares):
        own = tokens - count + i  # where the query itself stands
        sums[: own + 1] += row[: own + 1].flip(0)
    return sums


def pool_blocks(x: Tensor, block: int) -> Tensor:
    """Means over blocks; of the last block over the tokens that it has. x: [T, D]. Returns [T / block, D] float32"""
    sums = F.pad(x.float(), (0, 0, 0, -len(x) % block)).unflatten(0, (-1, block)).sum(1)
    sizes = torch.full((len(sums), 1), block, device=x.device)
    sizes[-1] = len(x) - block * (len(sums) - 1)
    means: Tensor = sums / sizes
    return means
