"""Merging of sets as segment sums over all heads, in float32; deterministic, also on a GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MergedSets:
    """One entry per set: heads one after the other, sets of a head in the order of their entries."""

    key: Tensor  # [R, D]
    value: Tensor  # [R, D_v]
    pivot: Tensor  # [R] int64, index of the pivot in its head
    size: Tensor  # [R] int64
    counts: Tensor  # [B, H_kv] int64, sets of each head


def merge_sets(
    keys: Tensor, values: Tensor, mass: Tensor, joins: Tensor, *, sigma: float = 5.0, refine: int = 0
) -> MergedSets:
    """Merge every maximal run of joined entries into one (KVMerger, section 4).

    The pivot of a set is its entry with the most attention; ties go to the first. An entry has the weight
    exp(-d^2 / (2 sigma^2)), where d is the distance of its key to the pivot's, and weights are normalized to sum to
    one. With `refine`, every set has its own sigma, which is replaced that many times by the mean of its weights
    before normalization, divided by the square root of two.

    keys: [B, H_kv, N, D]. values: [B, H_kv, N, D_v]. mass: [B, H_kv, N], attention received.
    joins: [B, H_kv, N - 1] bool, whether an entry is in the same set as the next.
    """
    first = torch.cat([torch.ones_like(mass[..., :1], dtype=torch.bool), ~joins], dim=-1)  # [B, H_kv, N]
    owner = first.flatten().cumsum(0) - 1  # the set of every entry, over all heads
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
    """Sums over runs of entries. x: [N, ...]. size: [R]. Returns [R, ...]"""
    sums: Tensor = torch.segment_reduce(x, "sum", lengths=size, axis=0)  # index_add is not deterministic on CUDA
    return sums


def _argmax(x: Tensor, owner: Tensor, size: Tensor) -> Tensor:
    """Index of the largest element of every run; ties go to the first. x, owner: [N]. size: [R]. Returns [R]"""
    best = torch.segment_reduce(x, "max", lengths=size)
    entries = (x == best[owner]).nonzero()[:, 0]
    owners = owner[entries]
    return entries[torch.diff(owners, prepend=owners.new_tensor([-1])) > 0]
