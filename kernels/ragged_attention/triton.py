"""Partial attention over flat and dense entries by the dense kernel, and a kernel that merges two partial results."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.dense_attention.triton import LN2, LOG2E, attend, padded
from kvbench.kernels.ragged_attention.torch import Partial

MERGED = 16
"""Queries of a program that merges."""


def ragged_partial(
    query: Tensor, keys: Tensor, values: Tensor, offsets: Tensor, counts: list[int], *,
    scale: float, seen: int | Tensor, window: int | None = None, positions: Tensor | None = None,
    softcap: float | None = None, bias: Tensor | None = None,
) -> Partial:
    """Partial attention over flat entries that all precede the queries; see `torch.ragged_partial`."""
    assert window is None or positions is not None, "a window over ragged entries needs their positions"
    return Partial(*attend(
        query, keys, values, len(counts) // query.shape[0], scale=scale, seen=seen, window=window, positions=positions,
        softcap=softcap, bias=bias, offsets=offsets, causal=False,
    ))


def dense_partial(
    query: Tensor, keys: Tensor, values: Tensor, *,
    scale: float, seen: int | Tensor, window: int | None = None, positions: Tensor | None = None,
    softcap: float | None = None, length: Tensor | None = None,
) -> Partial:
    """Partial attention over a dense tail whose last T entries are the queries' own; see `torch.dense_partial`."""
    return Partial(*attend(
        query, keys, values, keys.shape[1], scale=scale, seen=seen, window=window, positions=positions,
        softcap=softcap, length=length,
    ))


def merge_partials(parts: list[Partial], sinks: Tensor | None = None) -> Tensor:
    """Attention over the entries of all parts and a learned sink logit per head. [B, H_q, T, D_v] float32"""
    *others, last = parts
    merged = others[0] if others else None
    for part in others[1:]:
        merged = _merge_two(part, merged, None)
    return _merge_two(last, merged, sinks).output


def _merge_two(one: Partial, other: Partial | None, sinks: Tensor | None) -> Partial:
    heads, n_query, width = one.output.shape[1:]
    both = [x.contiguous() for part in (one, other or one) for x in (part.output, part.lse)]
    output, lse = torch.empty_like(both[0]), torch.empty_like(both[1])
    queries = lse.numel()
    merge_pairs[(triton.cdiv(queries, MERGED),)](
        *both, sinks, output, lse, queries, heads, n_query, width=width, has_other=other is not None,
        has_sinks=sinks is not None, block_r=MERGED, block_v=padded(width), num_warps=4,
    )
    return Partial(output, lse)


@triton.jit
def merge_pairs(
    output, lse, other, other_lse, sinks, merged, merged_lse, n_items, heads, n_query, width: tl.constexpr,
    has_other: tl.constexpr, has_sinks: tl.constexpr, block_r: tl.constexpr, block_v: tl.constexpr,
):
    """Merge two partial results and a sink, query by query of [B, H_q, T]."""
    item = tl.program_id(0) * block_r + tl.arange(0, block_r)
    real = item < n_items
    v = tl.arange(0, block_v)
    mask = real[:, None] & (v < width)[None, :]
    at = item.to(tl.int64)[:, None] * width + v[None, :]
    one = tl.load(lse + item, mask=real, other=0.0) * LOG2E
    two = tl.full([block_r], float("-inf"), tl.float32)
    sink = tl.full([block_r], float("-inf"), tl.float32)
    if has_other:
        two = tl.load(other_lse + item, mask=real, other=0.0) * LOG2E
    if has_sinks:
        sink = tl.load(sinks + item // n_query % heads, mask=real, other=0.0).to(tl.float32) * LOG2E
    top = tl.maximum(tl.maximum(one, two), sink)
    shift = tl.where(top == float("-inf"), 0.0, top)
    one, two, sink = tl.exp2(one - shift), tl.exp2(two - shift), tl.exp2(sink - shift)
    total = one + two + sink
    none = total == 0.0
    whole = tl.where(none, 1.0, total)
    sums = tl.load(output + at, mask=mask, other=0.0) * (one / whole)[:, None]
    if has_other:
        sums += tl.load(other + at, mask=mask, other=0.0) * (two / whole)[:, None]
    tl.store(merged + at, sums, mask=mask)
    tl.store(merged_lse + item, tl.where(none, float("-inf"), (shift + tl.log2(whole)) * LN2), mask=real)
