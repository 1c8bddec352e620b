"""Split-K attention: the entries of every head are cut into tiles that run in parallel, and tiles are merged.

Tiles have the same number of entries for all heads, so that heads of unequal size use a GPU as well as equal ones. A
program reads its head and its entries from offsets on the device: no step waits for the host, and the grid depends only
on shapes. All queries of the query heads of a KV head are the rows of one matrix product, so keys and values are read
once for all of them.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.choice import note
from kvbench.kernels.dense_attention.torch import attend_by_flash, flash_takes, label

TILES = 4
"""Tiles per multiprocessor, of which three run at a time. On an H200, with 32,768 entries x 4 and 8 KV heads, 4 of 3 to
24 took the least: 0.93 to 0.98 of the time of 12 over five kinds of entries."""
LEAST_ENTRIES = 256
"""Least entries of a tile: in smaller tiles, loops are too short to overlap loads, and merging costs more than
parallelism saves. Not tuned on a GPU."""
DECODE = (16384, 4, 3)
"""Elements of a block of keys and values in 16 bits, warps and pipeline stages, for at most 64 queries."""
MERGED = 16
"""Tiles of a head that are merged at a time."""
LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)  # powers of 2 take one instruction, powers of e two
UNIT = tl.constexpr(256.0)
"""Of e4m3 numbers: their bits, moved into those of float16, are numbers 256 times smaller."""


def dense_attention(
    query: Tensor, keys: Tensor, values: Tensor, *,
    scale: float, seen: int | Tensor, window: int | None = None, positions: Tensor | None = None,
    softcap: float | None = None, sinks: Tensor | None = None, causal: bool = True, length: Tensor | None = None,
) -> Tensor:
    """Attention output of the last T tokens over all N entries; see `torch.dense_attention`.

    On a GPU, SDPA's flash attention computes whole prompts that it supports.
    """
    n_query, n_key = query.shape[2], keys.shape[2]
    narrow = window is not None and (positions is not None or n_key > window or length is not None)
    if not causal and narrow:
        raise NotImplementedError("bidirectional attention with a window")
    plain = length is None and not narrow and softcap is None and sinks is None
    if plain and query.is_cuda and n_query > 1 and (n_query == n_key or not causal) and flash_takes(query, values):
        return attend_by_flash(query, keys, values, scale=scale, causal=causal)
    if n_query > 1:
        note(label(n_query, n_key), "triton")
    return attend(
        query, keys, values, keys.shape[1], scale=scale, seen=seen, window=window if narrow else None,
        positions=positions if narrow else None, softcap=softcap, sinks=sinks, length=length, causal=causal,
        dtype=query.dtype,
    )[0]


def attend(
    query: Tensor, keys: Tensor, values: Tensor, kv_heads: int, *,
    scale: float, seen: int | Tensor, window: int | None = None, positions: Tensor | None = None,
    softcap: float | None = None, bias: Tensor | None = None, sinks: Tensor | None = None,
    offsets: Tensor | None = None, length: Tensor | None = None, causal: bool = True,
    at: Tensor | None = None, logical: Tensor | None = None, dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp, over flat entries with `offsets` or over a dense block without.

    at, logical: [T], entry index and position of each query; None: the queries are the last T. Keys and values may be
    bytes of e4m3 numbers, which count as UNIT times smaller.
    Returns [B, H_q, T, D_v] of `dtype` and [B, H_q, T] float32, -inf if no entry is visible.
    """
    batch, heads, n_query, width = query.shape
    value_width, group, n_head = values.shape[-1], heads // kv_heads, batch * kv_heads
    block_m, block_n, stages, warps = _blocks(group * n_query, width, value_width, query.itemsize)
    query_blocks = triton.cdiv(group * n_query, block_m)
    n_key = keys.shape[-2]
    split = tile_entries(
        n_key, query_blocks if offsets is not None else query_blocks * n_head, LEAST_ENTRIES, block_n, query.device
    )
    splits = 1 if offsets is not None else triton.cdiv(n_key, split)
    tiles = n_key // split + n_head if offsets is not None else splits * n_head  # ragged: at most
    direct = offsets is None and splits == 1 and sinks is None
    output = query.new_empty((tiles, group, n_query, value_width), dtype=dtype if direct else torch.float32)
    lse = query.new_empty((tiles, group, n_query), dtype=torch.float32)
    key_strides, value_strides = ((0, 0, x.stride(0)) if x.dim() == 2 else x.stride()[:3] for x in (keys, values))
    position_strides = (0, 0) if positions is None or positions.dim() == 1 else positions.stride()[:2]
    assert query.stride(3) == keys.stride(-1) == values.stride(-1) == 1, "the last dimension must be contiguous"
    attend_tiles[(query_blocks, tiles)](
        query, keys, values, output, lse, offsets, positions, bias, length, at, logical, seen, n_key, split, splits,
        n_head, kv_heads, n_query, scale, 0.0 if softcap is None else softcap, 0 if window is None else window,
        *query.stride()[:3], *key_strides, *value_strides, *position_strides, width=width, value_width=value_width,
        group=group, causal=causal, has_window=window is not None, has_positions=positions is not None,
        has_softcap=softcap is not None, has_bias=bias is not None, ragged=offsets is not None,
        static=length is not None, seen_on_device=isinstance(seen, Tensor), casts=keys.dtype == torch.uint8,
        heads_padded=padded(n_head), block_m=block_m, block_n=block_n, block_d=padded(width),
        block_v=padded(value_width), num_warps=warps, num_stages=stages,
    )
    if not direct:
        output, lse = merge_tiles(output, lse, n_head, offsets, split, splits, sinks, kv_heads, dtype)
    return output.view(batch, heads, n_query, value_width), lse.view(batch, heads, n_query)


def merge_tiles(
    output: Tensor, lse: Tensor, n_head: int, offsets: Tensor | None, split: int, splits: int, sinks: Tensor | None,
    kv_heads: int, dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Merge the tiles of each head: tiles of `split` entries between the offsets, or `splits` tiles of every head.

    output: [tiles, G, T, D_v] float32; lse: [tiles, G, T]. Returns [heads, G, T, D_v] of `dtype` and [heads, G, T].
    """
    _, group, n_query, width = output.shape
    merged = output.new_empty((n_head, group, n_query, width), dtype=dtype)
    merged_lse = lse.new_empty((n_head, group, n_query))
    merge_parts[(group * n_query * n_head,)](
        output, lse, merged, merged_lse, offsets, sinks, split, splits, n_head, kv_heads, n_query, width=width,
        group=group, ragged=offsets is not None, has_sinks=sinks is not None, heads_padded=padded(n_head),
        block_s=MERGED, block_v=padded(width), num_warps=4,
    )
    return merged, merged_lse


def padded(n: int) -> int:
    """`n` rounded up to a power of two, at least 16, the smallest side of a matrix product."""
    return max(16, int(triton.next_power_of_2(n)))


def tile_entries(entries: int, heads: int, least: int, block: int, device: torch.device) -> int:
    """Entries of a tile, in whole blocks: at most TILES tiles per multiprocessor, but at least `least` entries.

    entries: of one head. heads: heads, times blocks of queries, that run in parallel.
    """
    tiles = max(1, TILES * _processors(device) // heads)
    return int(triton.cdiv(max(least, triton.cdiv(entries, tiles)), block) * block)


def _blocks(queries: int, width: int, value_width: int, itemsize: int) -> tuple[int, int, int, int]:
    """Queries of a block, entries of a block, pipeline stages, and warps.

    Decoding is bound by the bytes of entries: 64 entries of 128 channels in 16 bits are a block of 32 KiB of keys and
    values, and three programs with three such blocks fit into the 227 KiB of shared memory of an H100 or H200
    multiprocessor. A prompt is bound by arithmetic: blocks of 128 queries load an entry half as often as blocks of 64.
    In float32 there are no tensor cores, and more would not fit into registers.
    """
    if itemsize <= 2:
        channels = padded(width) + (padded(value_width) if value_width else 0)
        if queries > 64:
            return 128, block_entries(16384 // channels), 3, 8
        elements, warps, stages = DECODE
        return padded(queries), block_entries(elements // channels), stages, warps
    return min(32, padded(queries)), block_entries(2048 // padded(max(width, value_width))), 2, 8


def block_entries(most: int) -> int:
    """The largest power of two that is not above `most`, from 16 to 128."""
    return int(max(16, min(128, 1 << most.bit_length() - 1)))


@functools.cache
def _processors(device: torch.device) -> int:
    """Number of multiprocessors of a GPU; 1 for Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit
def count_tiles(offsets, split, n_head, heads_padded: tl.constexpr):
    """Heads of flat entries, and the number of tiles of `split` entries of each."""
    head = tl.arange(0, heads_padded)
    start = tl.load(offsets + head, mask=head < n_head, other=0)
    stop = tl.load(offsets + head + 1, mask=head < n_head, other=0)
    return head, (stop - start + split - 1) // split


@triton.jit
def capped(products, scale, softcap, has_softcap: tl.constexpr):
    """Scaled and soft-capped logits, times log2(e)."""
    if has_softcap:
        products = softcap / scale * (1.0 - 2.0 / (1.0 + tl.exp2(products * (2.0 * LOG2E * scale / softcap))))  # tanh
    return products * (scale * LOG2E)


@triton.jit(do_not_specialize=["seen", "n_key"])  # they grow with every step
def attend_tiles(
    query, keys, values, output, lse, offsets, positions, bias, length, at, logical, seen, n_key, split, splits,
    n_head, kv_heads, n_query, scale, softcap, window,
    query_batch, query_head, query_token, key_batch, key_head, key_entry, value_batch, value_head, value_entry,
    position_batch, position_head,
    width: tl.constexpr, value_width: tl.constexpr, group: tl.constexpr, causal: tl.constexpr,
    has_window: tl.constexpr, has_positions: tl.constexpr, has_softcap: tl.constexpr, has_bias: tl.constexpr,
    ragged: tl.constexpr, static: tl.constexpr, seen_on_device: tl.constexpr, casts: tl.constexpr,
    heads_padded: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr, block_d: tl.constexpr,
    block_v: tl.constexpr,
):
    """Attend with one block of queries to one tile of entries of their KV head; surplus tiles return at once."""
    tile = tl.program_id(1)
    if ragged:
        every, tiles = count_tiles(offsets, split, n_head, heads_padded)
        head = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)  # heads whose tiles are all before it
        part = tile - tl.sum(tl.where(every < head, tiles, 0), 0)
        if head >= n_head:
            return
        first = tl.load(offsets + head).to(tl.int64)
        count = tl.load(offsets + head + 1) - first.to(tl.int32)
    else:
        head, part, first = tile // splits, tile % splits, 0
        count = n_key
        if static:
            count = tl.load(length).to(tl.int32)
    batch, kv_head = (head // kv_heads).to(tl.int64), (head % kv_heads).to(tl.int64)
    now = seen
    if seen_on_device:
        now = tl.load(seen).to(tl.int32)

    # Rows of the product: the queries of all heads of the group, with those of one position adjacent.
    m = tl.program_id(0) * block_m + tl.arange(0, block_m)
    t, g = m // group, m % group
    real = m < group * n_query
    own, place = count - n_query + t, now - n_query + t  # each query's entry and position
    if at is not None:
        own = tl.load(at + t, mask=real, other=0).to(tl.int32)
    if logical is not None:
        place = tl.load(logical + t, mask=real, other=0).to(tl.int32)
    d, v = tl.arange(0, block_d), tl.arange(0, block_v)
    of_query = (kv_head * group + g) * query_head + t.to(tl.int64) * query_token
    q = tl.load(
        query + batch * query_batch + of_query[:, None] + d[None, :], mask=real[:, None] & (d < width)[None, :],
        other=0.0,
    )
    key = keys + batch * key_batch + kv_head * key_head + first * key_entry + d[:, None]
    value = values + batch * value_batch + kv_head * value_head + first * value_entry + v[None, :]

    # `count` may be beyond the block's entries, and the block may have unused ones after `count`.
    low, high = part * split, tl.minimum(part * split + split, tl.minimum(count, n_key))
    if causal:
        high = tl.minimum(high, tl.max(tl.where(real, own, -1), 0) + 1)
        if has_window and not has_positions:
            low = tl.maximum(low, tl.min(tl.where(real, own, high), 0) - window + 1)

    top = tl.full([block_m], float("-inf"), tl.float32)
    total = tl.zeros([block_m], tl.float32)
    sums = tl.zeros([block_m, block_v], tl.float32)
    for start in range(low, high, block_n):
        entry = start + tl.arange(0, block_n)
        inside = entry < high
        k = tl.load(key + entry[None, :] * key_entry, mask=inside[None, :] & (d < width)[:, None], other=0)
        if casts:
            k = read_e4m3(k).to(q.dtype)
        logits = capped(tl.dot(q, k, input_precision="ieee"), scale, softcap, has_softcap)
        if has_bias:
            logits += tl.load(bias + first + entry, mask=inside, other=0.0)[None, :] * LOG2E
        visible = inside[None, :] & real[:, None]
        if causal:
            visible = visible & (entry[None, :] <= own[:, None])
        if has_window:
            if has_positions:
                where = positions + batch * position_batch + kv_head * position_head + first + entry
                distance = place[:, None] - tl.load(where, mask=inside, other=0)[None, :]
            else:
                distance = own[:, None] - entry[None, :]
            visible = visible & (distance < window)
        logits = tl.where(visible, logits, float("-inf"))
        higher = tl.maximum(top, tl.max(logits, 1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # no visible entry yet: weights are zero, not NaN
        weights = tl.exp2(logits - shift[:, None])
        shrink = tl.exp2(top - shift)
        total = total * shrink + tl.sum(weights, 1)
        if value_width > 0:
            inner = inside[:, None] & (v < value_width)[None, :]
            x = tl.load(value + entry[:, None] * value_entry, mask=inner, other=0)
            if casts:
                x = read_e4m3(x).to(q.dtype)
            sums = sums * shrink[:, None] + tl.dot(weights.to(x.dtype), x, input_precision="ieee")
        top = higher

    out = tile.to(tl.int64) * group * n_query + g * n_query + t
    none = total == 0.0
    whole = tl.where(none, 1.0, total)
    tl.store(lse + out, tl.where(none, float("-inf"), (top + tl.log2(whole)) * LN2), mask=real)
    if value_width > 0:
        tl.store(
            output + out[:, None] * value_width + v[None, :], sums / whole[:, None],
            mask=real[:, None] & (v < value_width)[None, :],
        )


@triton.jit
def read_e4m3(byte):
    """The numbers of bytes, divided by UNIT. float16

    Four bits of exponent and three of the fraction become the lowest and the highest ones of float16's. Exact, also
    where the exponent is zero, and without a GPU's own conversion, which older ones than Hopper lack.
    """
    high = byte.to(tl.uint16)
    number = ((high & 0x80) << 8 | (high & 0x7F) << 7).to(tl.float16, bitcast=True)
    return tl.where((byte & 0x7F) == 0x7F, float("nan"), number)


@triton.jit
def merge_parts(
    output, lse, merged, merged_lse, offsets, sinks, split, splits, n_head, kv_heads, n_query,
    width: tl.constexpr, group: tl.constexpr, ragged: tl.constexpr, has_sinks: tl.constexpr,
    heads_padded: tl.constexpr, block_s: tl.constexpr, block_v: tl.constexpr,
):
    """Merge the tiles of one query of one head: normalized outputs, weighted by their share of the normalizer."""
    queries = group * n_query
    query, head = tl.program_id(0) % queries, tl.program_id(0) // queries  # a second dimension ends at 65,535
    first, count = head * splits, splits
    if ragged:
        every, tiles = count_tiles(offsets, split, n_head, heads_padded)
        first, count = tl.sum(tl.where(every < head, tiles, 0), 0), tl.sum(tl.where(every == head, tiles, 0), 0)
    v = tl.arange(0, block_v)
    top = float("-inf")
    total = 0.0
    if has_sinks:  # like an entry without a value
        top = tl.load(sinks + head % kv_heads * group + query // n_query).to(tl.float32) * LOG2E
        total = 1.0
    sums = tl.zeros([block_v], tl.float32)
    for start in range(0, count, block_s):
        tile = start + tl.arange(0, block_s)
        at = (first + tile).to(tl.int64) * queries + query
        x = tl.load(lse + at, mask=tile < count, other=float("-inf")) * LOG2E
        part = tl.load(
            output + at[:, None] * width + v[None, :], mask=(tile < count)[:, None] & (v < width)[None, :], other=0.0
        )
        higher = tl.maximum(top, tl.max(x, 0))
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        weights, shrink = tl.exp2(x - shift), tl.exp2(top - shift)
        total = total * shrink + tl.sum(weights, 0)
        sums = sums * shrink + tl.sum(weights[:, None] * part, 0)
        top = higher
    none = total == 0.0
    whole = tl.where(none, 1.0, total)
    at = head.to(tl.int64) * queries + query
    tl.store(merged_lse + at, tl.where(none, float("-inf"), (top + tl.log2(whole)) * LN2))
    tl.store(merged + at * width + v, sums / whole, mask=v < width)
