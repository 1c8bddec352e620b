"""Sums over runs of rows, all heads at once, in float32; the same bits in every run, on a GPU too."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MergedSets:
    """One row per set, heads one after the other, sets of a head in the order of their rows."""

    key: Tensor  # [R, D]
    value: Tensor  # [R, D_v]
    pivot: Tensor  # [R] int64, row of its head
    size: Tensor  # [R] int64
    counts: Tensor  # [B, H_kv] int64, sets of each head


def merge_sets(
    keys: Tensor, values: Tensor, mass: Tensor, joins: Tensor, *, sigma: float = 5.0, refine: int = 0
) -> MergedSets:
    """Merge every maximal run of joined rows into one row (KVMerger, section 4).

    A set's pivot is its row with the most attention, of equal ones the first; a row weighs exp(-d^2 / (2 sigma^2)) by
    the distance of its key from the pivot's, and weights sum to one. With `refine` the width is each set's own: so
    many times it becomes the mean of these weights before they are divided, over the square root of two.

    keys: [B, H_kv, N, D]. values: [B, H_kv, N, D_v]. mass: [B, H_kv, N], attention received.
    joins: [B, H_kv, N - 1] bool, whether a row is in one set with the next.
    """
    first = torch.cat([torch.ones_like(mass[..., :1], dtype=torch.bool), ~joins], dim=-1)  # [B, H_kv, N]
    owner = first.flatten().cumsum(0) - 1  # the set of every row, over all heads
    starts = first.flatten().nonzero()[:, 0]
    size = torch.diff(starts, append=starts.new_tensor([mass.numel()]))
    flat_keys, flat_values = keys.flatten(0, 2).float(), values.flatten(0, 2).float()
    pivot = _argmax(mass.flatten().float(), owner, size)
    squares = (flat_keys - flat_keys[pivot[owner]]).square().sum(-1)
    width = torch.full_like(squares, sigma)
    for _ in range(refine):
        kernel = torch.exp(-squares / (2 * width.square()))
        width = (_sums(kernel, size) / (math.sqrt(2) * size))[owner]
    kernel = torch.exp(-squares / (2 * width.square()))
    weights = (kernel / _sums(kernel, size)[owner])[:, None]
    return MergedSets(
        _sums(weights * flat_keys, size).to(keys.dtype), _sums(weights * flat_values, size).to(values.dtype),
        pivot % mass.shape[2], size, first.sum(-1),
    )


def _sums(x: Tensor, size: Tensor) -> Tensor:
    """Sums over runs of rows. x: [N, ...]; size: [R]. [R, ...]"""
    sums: Tensor = torch.segment_reduce(x, "sum", lengths=size, axis=0)  # adding by index is not deterministic on CUDA
    return sums


def _argmax(x: Tensor, owner: Tensor, size: Tensor) -> Tensor:
    """The largest element's row in every run, of equal ones the first. x, owner: [N]; size: [R]. [R]"""
    best = torch.segment_reduce(x, "max", lengths=size)
    rows = (x == best[owner]).nonzero()[:, 0]
    owners = owner[rows]
    return rows[torch.diff(owners, prepend=owners.new_tensor([-1])) > 0]
