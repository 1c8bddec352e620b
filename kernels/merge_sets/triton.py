"""One program per set computes its pivot, weights and means, in several passes over its few entries."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.merge_sets.torch import MergedSets

ENTRIES = 16
"""Entries of a set that a program reads at a time; most sets have fewer."""


def merge_sets(
    keys: Tensor, values: Tensor, mass: Tensor, joins: Tensor, *, sigma: float = 5.0, refine: int = 0
) -> MergedSets:
    """Merge every maximal run of joined entries into one; see `torch.merge_sets`.

    The host waits for the device once, to learn the number of sets.
    """
    first = torch.cat([torch.ones_like(mass[..., :1], dtype=torch.bool), ~joins], dim=-1)  # [B, H_kv, N]
    starts = first.flatten().nonzero()[:, 0]
    size = torch.diff(starts, append=starts.new_full((1,), mass.numel()))
    return MergedSets(*merge_runs(keys, values, mass, starts, size, sigma, refine), size, first.sum(-1))


def merge_runs(
    keys: Tensor, values: Tensor, mass: Tensor, starts: Tensor, size: Tensor, sigma: float, refine: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and pivots of the sets that begin at `starts`, in the flat order of all heads' entries."""
    heads, entries = mass.shape[1:]
    merged_keys = keys.new_empty((len(starts), keys.shape[3]))
    merged_values, pivots = values.new_empty((len(starts), values.shape[3])), torch.empty_like(starts)
    assert keys.stride(3) == values.stride(3) == 1, "the last dimension must be contiguous"
    merge_run[(len(starts),)](
        keys, values, mass.float().contiguous(), starts, size, merged_keys, merged_values, pivots, entries, heads,
        sigma, *keys.stride()[:3], *values.stride()[:3], width=keys.shape[3], value_width=values.shape[3],
        refine=refine, block_n=ENTRIES, block_d=triton.next_power_of_2(keys.shape[3]),
        block_v=triton.next_power_of_2(values.shape[3]), num_warps=4,
    )
    return merged_keys, merged_values, pivots


@triton.jit(do_not_specialize=["entries"])
def merge_run(
    keys, values, mass, starts, sizes, merged_keys, merged_values, pivots, entries, heads, sigma,
    key_batch, key_head, key_entry, value_batch, value_head, value_entry, width: tl.constexpr,
    value_width: tl.constexpr, refine: tl.constexpr, block_n: tl.constexpr, block_d: tl.constexpr,
    block_v: tl.constexpr,
):
    """Merge one set: `size` entries from `start` on, in the flat order of all heads' entries."""
    this = tl.program_id(0).to(tl.int64)
    start, size = tl.load(starts + this), tl.load(sizes + this).to(tl.int32)
    head, low = start // entries, start % entries
    key = keys + head // heads * key_batch + head % heads * key_head
    value = values + head // heads * value_batch + head % heads * value_head
    d, v = tl.arange(0, block_d), tl.arange(0, block_v)

    pivot, most = low, float("-inf")
    for i in range(0, size, block_n):
        entry = i + tl.arange(0, block_n)
        received = tl.load(mass + start + entry, mask=entry < size, other=float("-inf"))
        here = tl.max(received, 0)
        if here > most:  # ties go to the first
            most = here
            pivot = low + tl.min(tl.where(received == here, entry, size), 0)
    tl.store(pivots + this, pivot)

    center = tl.load(key + pivot * key_entry + d, mask=d < width, other=0.0).to(tl.float32)[None, :]
    spread = sigma
    for again in tl.static_range(refine + 1):
        total = 0.0
        key_sums, value_sums = tl.zeros([block_d], tl.float32), tl.zeros([block_v], tl.float32)
        for i in range(0, size, block_n):
            entry = i + tl.arange(0, block_n)
            inside = (entry < size)[:, None]
            at = (low + entry)[:, None]
            k = tl.load(key + at * key_entry + d[None, :], mask=inside & (d < width)[None, :], other=0.0).to(tl.float32)
            away = tl.where(inside & (d < width)[None, :], k - center, 0.0)
            weights = tl.exp(-tl.sum(away * away, 1) / (2.0 * spread * spread))[:, None]
            weights = tl.where(inside, weights, 0.0)
            total += tl.sum(tl.sum(weights, 1), 0)
            if again == refine:
                x = tl.load(value + at * value_entry + v[None, :], mask=inside & (v < value_width)[None, :], other=0.0)
                key_sums += tl.sum(weights * k, 0)
                value_sums += tl.sum(weights * x.to(tl.float32), 0)
        if again < refine:
            spread = total / (1.4142135623730951 * size)
    tl.store(merged_keys + this * width + d, key_sums / total, mask=d < width)
    tl.store(merged_values + this * value_width + v, value_sums / total, mask=v < value_width)
