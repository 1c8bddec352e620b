"""Reference implementation: one head, one set and one entry at a time, in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def merge_sets(
    keys: Tensor, values: Tensor, mass: Tensor, joins: Tensor, *, sigma: float = 5.0, refine: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """For every set its key [R, D] and value [R, D_v] in float64, pivot [R], size [R]; and sets by head [B, H_kv]."""
    merged_keys, merged_values, pivots, sizes = [], [], [], []
    batch, heads, n = mass.shape
    counts = torch.zeros(batch, heads, dtype=torch.long)
    for b in range(batch):
        for h in range(heads):
            for entries in _sets(joins[b, h].tolist(), n):
                pivot = max(entries, key=lambda i: (mass[b, h, i].item(), -i))  # ties go to the first
                squares = [(keys[b, h, i].double() - keys[b, h, pivot].double()).square().sum().item() for i in entries]
                width = sigma
                for _ in range(refine):
                    width = sum(math.exp(-x / (2 * width**2)) for x in squares) / (math.sqrt(2) * len(entries))
                kernel = [math.exp(-x / (2 * width**2)) for x in squares]
                weights = torch.tensor([x / sum(kernel) for x in kernel], dtype=torch.float64)
                merged_keys.append(weights @ keys[b, h, entries].double())
                merged_values.append(weights @ values[b, h, entries].double())
                pivots.append(pivot)
                sizes.append(len(entries))
                counts[b, h] += 1
    return torch.stack(merged_keys), torch.stack(merged_values), torch.tensor(pivots), torch.tensor(sizes), counts


def _sets(joins: list[bool], n: int) -> list[list[int]]:
    """Maximal runs of entries in which each is joined to the next."""
    sets = [[0]]
    for i in range(1, n):
        if joins[i - 1]:
            sets[-1].append(i)
        else:
            sets.append([i])
    return sets
