"""Split-K attention over codes of uneven levels, which are looked up in a table and never written to memory.

A vector may have two parts, whose widths need not be powers of two: their products with the queries are added, and
their outputs stand side by side.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.codes.triton import load_codes, spread, whole_words
from kvbench.kernels.dense_attention.triton import UNIT, capped, merge_tiles, padded, read_e4m3, tile_entries
from kvbench.kernels.level_attention.torch import Levels
from kvbench.kernels.packed_attention.triton import (
    LEAST_ENTRIES,
    find_place,
    load_columns,
    power_below,
    soften,
    store_columns,
)
from kvbench.kernels.ragged_attention.torch import Partial


def level_partial(
    query: Tensor, keys: tuple[Levels, ...], values: tuple[Levels, ...], *,
    scale: float, seen: int, start: int = 0, window: int | None = None, softcap: float | None = None,
    length: Tensor | None = None,
) -> Partial:
    """Partial attention over adjacent entries that all precede the queries; see `torch.level_partial`."""
    batch, heads, n_query, width = query.shape
    kv_heads, n_entries = keys[0].packed.shape[1:3]
    group, n_head, value_width = heads // kv_heads, batch * kv_heads, sum(x.width for x in values)
    block_m, block_n, warps = _blocks(group * n_query, max(width, value_width), query.itemsize)
    # With two stages each level is copied through shared memory; with one, levels in float32 and codes that are
    # gathered byte by byte take too many registers.
    stages = 1 if query.itemsize == 2 and all(_word_wise(x) for x in (*keys, *values)) else 2
    query_blocks = triton.cdiv(group * n_query, block_m)
    split = tile_entries(n_entries, n_head * query_blocks, LEAST_ENTRIES, block_n, query.device)
    splits = max(1, triton.cdiv(n_entries, split))
    output = query.new_empty((n_head * splits, group, n_query, value_width), dtype=torch.float32)
    lse = query.new_empty((n_head * splits, group, n_query), dtype=torch.float32)
    assert query.stride(3) == 1, "the last dimension must be contiguous"
    attend_levels[(query_blocks, n_head * splits)](
        query, *_both(keys), *_both(values), output, lse, length, n_entries, seen - n_query - start, split, splits,
        kv_heads, n_query, scale, 0.0 if softcap is None else softcap, 0 if window is None else window,
        *query.stride()[:3], group=group, has_window=window is not None, has_softcap=softcap is not None,
        static=length is not None, exact=query.dtype == torch.float32, block_m=block_m, block_n=block_n,
        num_warps=warps, num_stages=stages,
    )
    if splits > 1:
        output, lse = merge_tiles(output, lse, n_head, None, split, splits, None, kv_heads, torch.float32)
    return Partial(output.view(batch, heads, n_query, value_width), lse.view(batch, heads, n_query))


class LevelEntries(NamedTuple):
    """A part of the codes as arguments of the kernel; of width 0: there is none."""

    packed: Tensor
    factor: Tensor
    table: Tensor
    batch: int  # strides of `packed`
    head: int
    factor_batch: int
    factor_head: int
    bits: tl.constexpr
    width: tl.constexpr
    groups: tl.constexpr
    block: tl.constexpr


def _both(parts: tuple[Levels, ...]) -> tuple[LevelEntries, LevelEntries]:
    first, *rest = (_entries(x, x.width) for x in parts)
    assert len(rest) < 2, "at most two parts"
    return first, rest[0] if rest else _entries(parts[0], 0)


def _entries(part: Levels, width: int) -> LevelEntries:
    for x in (part.packed, part.factor):
        assert x.shape[2] < 2 or x.stride()[2:] == (x.shape[3], 1), "entries must be contiguous"
    packed = part.packed.view(torch.int32) if _word_wise(part) else part.packed
    return LevelEntries(
        packed, part.factor, part.table, packed.stride(0), packed.stride(1), part.factor.stride(0),
        part.factor.stride(1), tl.constexpr(part.bits), tl.constexpr(width), tl.constexpr(part.factor.shape[3]),
        tl.constexpr(padded(width)),
    )


def _word_wise(part: Levels) -> bool:
    """Whether codes are loaded by words of four bytes."""
    return part.bits > 1 and whole_words(part.width)


def _blocks(queries: int, width: int, itemsize: int) -> tuple[int, int, int]:
    """Queries of a block, entries of a block, and warps.

    Chosen by the code compiled for a Hopper GPU, not tuned on one: two to four programs fit into the registers of a
    multiprocessor.
    """
    queries = min(32, max(8, triton.next_power_of_2(queries)))
    if itemsize > 2:
        return min(16, queries), 32, 8
    return queries, max(16, min(32, 4096 // padded(width))), 4


@triton.jit(do_not_specialize=["n_entries", "before"])  # they grow with every step
def attend_levels(
    query, keys, more_keys, values, more_values, output, lse, length, n_entries, before, split, splits, kv_heads,
    n_query, scale, softcap, window, query_batch, query_head, query_token,
    group: tl.constexpr, has_window: tl.constexpr, has_softcap: tl.constexpr, static: tl.constexpr,
    exact: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr,
):
    """Attend with one block of queries to one tile of entries of their KV head."""
    tile, part, batch, kv_head, t, g, real = find_place(splits, kv_heads, n_query, group, block_m)
    count = n_entries
    if static:
        count = tl.load(length).to(tl.int32)
        before = count - n_query

    of_query = query + batch * query_batch + (kv_head * group + g) * query_head + t.to(tl.int64) * query_token
    q = load_columns(of_query, real, keys.width, keys.block).to(tl.float32)
    size = tl.max(tl.abs(q), 0)
    if more_keys.width > 0:
        more_q = load_columns(of_query + keys.width, real, more_keys.width, more_keys.block).to(tl.float32)
        size = tl.maximum(size, tl.max(tl.abs(more_q), 0))
    size = power_below(size)
    dtype: tl.constexpr = tl.float32 if exact else tl.float16
    q = (q / size[None, :]).to(dtype)
    if more_keys.width > 0:
        more_q = (more_q / size[None, :]).to(dtype)

    low, high = part * split, tl.minimum(part * split + split, count)
    if has_window:
        first = before + tl.program_id(0) * block_m // group - window + 1
        low = tl.maximum(low, first // block_n * block_n)

    top = tl.full([block_m], float("-inf"), tl.float32)
    total = tl.zeros([block_m], tl.float32)
    sums = tl.zeros([values.block, block_m], tl.float32)
    more_sums = tl.zeros([more_values.block, block_m], tl.float32)
    for start in range(low, high, block_n):
        entry = start + tl.arange(0, block_n)
        inside = entry < high
        products = tl.dot(look_up(keys, batch, kv_head, entry, inside, dtype), q, input_precision="ieee")
        if more_keys.width > 0:
            k = look_up(more_keys, batch, kv_head, entry, inside, dtype)
            products += tl.dot(k, more_q, input_precision="ieee")
        visible = inside[:, None] & real[None, :]
        if has_window:
            visible = visible & ((before + t)[None, :] - entry[:, None] < window)
        logits = capped(products * size[None, :], scale, softcap, has_softcap)
        weights, shrink, total, top = soften(tl.where(visible, logits, float("-inf")), total, top)
        weights = weights.to(dtype)
        x = look_up(values, batch, kv_head, entry, inside, dtype)
        sums = sums * shrink[None, :] + tl.dot(tl.trans(x), weights, input_precision="ieee")
        if more_values.width > 0:
            x = look_up(more_values, batch, kv_head, entry, inside, dtype)
            more_sums = more_sums * shrink[None, :] + tl.dot(tl.trans(x), weights, input_precision="ieee")

    at = tile.to(tl.int64) * group * n_query + g * n_query + t
    row: tl.constexpr = values.width + more_values.width
    store_columns(output, lse, at, sums, total, top, real, row, values.width, values.block)
    if more_values.width > 0:
        store_columns(
            output + values.width, lse, at, more_sums, total, top, real, row, more_values.width, more_values.block
        )


@triton.jit
def look_up(entries, batch, head, entry, inside, dtype: tl.constexpr):
    """A part of a block of vectors, as numbers. [n, block]; zero for entries not `inside`"""
    code = load_codes(
        entries, batch, head, entry, inside, entries.bits, entries.width, False, tl.int32, False, entries.block
    )
    channels: tl.constexpr = entries.width // entries.groups
    factor = entries.factor + batch * entries.factor_batch + head * entries.factor_head
    factor += entry.to(tl.int64)[:, None] * entries.groups
    if entries.width == entries.block and entries.groups & (entries.groups - 1) == 0:
        of_group = tl.load(factor + tl.arange(0, entries.groups)[None, :], mask=inside[:, None], other=0)
        factors = spread(read_factor(of_group), 1, channels)
    else:
        d = tl.arange(0, entries.block)[None, :]
        factors = read_factor(tl.load(factor + d // channels, mask=inside[:, None] & (d < entries.width), other=0))
    return (tl.load(entries.table + code) * factors).to(dtype)


@triton.jit
def read_factor(x):
    """Factors in float32."""
    return read_e4m3(x).to(tl.float32) * UNIT if x.dtype == tl.uint8 else x.to(tl.float32)
