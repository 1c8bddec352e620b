"""The oracle: one head, one set, one row at a time, in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def merge_sets(
    keys: Tensor, values: Tensor, mass: Tensor, joins: Tensor, *, sigma: float = 5.0, refine: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Key [R, D] and value [R, D_v] of every set in float64, its pivot [R], its size [R], sets by head [B, H_kv]."""
    merged_keys, merged_values, pivots, sizes = [], [], [], []
    batch, heads, n = mass.shape
    counts = torch.zeros(batch, heads, dtype=torch.long)
    for b in range(batch):
        for h in range(heads):
            for rows in _sets(joins[b, h].tolist(), n):
                pivot = max(rows, key=lambda i: (mass[b, h, i].item(), -i))  # of equal ones the first
                squares = [(keys[b, h, i].double() - keys[b, h, pivot].double()).square().sum().item() for i in rows]
                width = sigma
                for _ in range(refine):
                    width = sum(math.exp(-x / (2 * width**2)) for x in squares) / (math.sqrt(2) * len(rows))
                kernel = [math.exp(-x / (2 * width**2)) for x in squares]
                weights = torch.tensor([x / sum(kernel) for x in kernel], dtype=torch.float64)
                merged_keys.append(weights @ keys[b, h, rows].double())
                merged_values.append(weights @ values[b, h, rows].double())
                pivots.append(pivot)
                sizes.append(len(rows))
                counts[b, h] += 1
    return torch.stack(merged_keys), torch.stack(merged_values), torch.tensor(pivots), torch.tensor(sizes), counts


def _sets(joins: list[bool], n: int) -> list[list[int]]:
    """Maximal runs of rows of which each is joined to the next."""
    sets = [[0]]
    for i in range(1, n):
        if joins[i - 1]:
            sets[-1].append(i)
        else:
            sets.append([i])
    return sets
