"""Split-K attention over codes, which are dequantized in registers and never written to memory.

Only codes and parameters are read, and on a Hopper GPU instructions and not bytes bound the speed. Entries are the long
side of both matrix products and queries the short one, which may be as small as 8; a group of four heads fills half of
it. Products are in float16 also for bfloat16 queries: queries are divided by the power of two of their largest element,
codes of 8 bits fit, and scales, minima and dequantized values are within float16's range by construction.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.codes.triton import as_entries, bring_back, load_codes, span_of, whole_words
from kvbench.kernels.dense_attention.triton import LN2, capped, merge_tiles, padded, tile_entries
from kvbench.kernels.pack.torch import Codes
from kvbench.kernels.ragged_attention.torch import Partial

LEAST_ENTRIES = 512
"""Least entries of a tile. Not tuned on a GPU."""
NARROW, BYTES = (64, 2, 3), (64, 4, 3)
"""Entries of a block, warps and pipeline stages of a decode step, for codes of less than 8 bits and of 8 bits.

On an H200, with 32,768 entries x 4 and 8 KV heads of 128, these were the fastest of 24: 0.87 and 0.81 of the time of
128 entries, 4 warps and 2 stages."""


def packed_partial(
    query: Tensor, keys: Codes, values: Codes, *,
    scale: float, seen: int, window: int | None = None, positions: Tensor | None = None, start: int = 0,
    softcap: float | None = None,
) -> Partial:
    """Partial attention over packed entries that all precede the queries; see `torch.packed_partial`."""
    before = seen - query.shape[2] - (start if positions is None else 0)
    return Partial(*attend(
        query, keys, values, before=before, scale=scale, window=window, positions=positions, softcap=softcap,
        causal=False,
    ))


def attend(
    query: Tensor, keys: Codes, values: Codes, *,
    before: int, scale: float, window: int | None = None, positions: Tensor | None = None, softcap: float | None = None,
    sinks: Tensor | None = None, length: Tensor | None = None, causal: bool = True, signed: bool = False,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Attention over codes and its log-sum-exp. [B, H_q, T, D_v] of `dtype` and [B, H_q, T]

    before: entries before the first query's own; with positions, tokens. signed: codes are int8 without minima.
    """
    batch, heads, n_query, width = query.shape
    kv_heads, n_entries = values.packed.shape[1:3]
    value_width, group, n_head = values.width, heads // kv_heads, batch * kv_heads
    block_m, block_n, warps, stages = _blocks(
        group * n_query, max(width, value_width), query.itemsize, max(keys.bits, values.bits)
    )
    if not (whole_words(width) and whole_words(value_width)):
        block_n = min(block_n, 32)  # gathering codes byte by byte needs more registers
    query_blocks = triton.cdiv(group * n_query, block_m)
    split = tile_entries(n_entries, n_head * query_blocks, LEAST_ENTRIES, block_n, query.device)
    splits = max(1, triton.cdiv(n_entries, split))
    direct = splits == 1 and sinks is None
    output = query.new_empty((n_head * splits, group, n_query, value_width), dtype=dtype if direct else torch.float32)
    lse = query.new_empty((n_head * splits, group, n_query), dtype=torch.float32)
    position_strides = (0, 0) if positions is None else positions.stride()[:2]
    assert query.stride(3) == 1, "the last dimension must be contiguous"
    attend_codes[(query_blocks, n_head * splits)](
        query, as_entries(keys, kv_heads), as_entries(values, kv_heads), output, lse, positions, length, n_entries,
        before, split, splits, kv_heads, n_query, scale, 0.0 if softcap is None else softcap,
        0 if window is None else window, *query.stride()[:3], *position_strides, key_bits=keys.bits,
        value_bits=values.bits, width=width, value_width=value_width, key_span=span_of(keys, block_n),
        key_channels=keys.channels, value_channels=values.channels, group=group, causal=causal,
        has_window=window is not None, has_positions=positions is not None, has_softcap=softcap is not None,
        static=length is not None, signed=signed,
        folded=keys.scale.shape[-2] == 1 and not signed, exact=query.dtype == torch.float32,
        assembly=not triton.knobs.runtime.interpret, block_m=block_m, block_n=block_n, block_d=padded(width),
        block_v=padded(value_width), num_warps=warps, num_stages=stages,
    )
    if not direct:
        output, lse = merge_tiles(output, lse, n_head, None, split, splits, sinks, kv_heads, dtype)
    return output.view(batch, heads, n_query, value_width), lse.view(batch, heads, n_query)


def _blocks(queries: int, width: int, itemsize: int, bits: int) -> tuple[int, int, int, int]:
    """Queries of a block, entries of a block, warps, and pipeline stages.

    For several queries chosen by the code compiled for a Hopper GPU: three programs fit into the registers of a
    multiprocessor, and also into its shared memory, with one block of entries being loaded and one of values waiting
    for the matrix product in 16 bits.
    """
    queries = min(32, max(8, triton.next_power_of_2(queries)))
    if itemsize > 2:
        return min(16, queries), 32, 8, 2
    if queries > 16:
        return queries, min(128, 16384 // padded(width)) // 2, 4, 2
    entries, warps, stages = BYTES if bits == 8 else NARROW
    return queries, min(entries, 16384 // padded(width)), warps, stages


@triton.jit(do_not_specialize=["n_entries", "before"])  # they grow with every step
def attend_codes(
    query, keys, values, output, lse, positions, length, n_entries, before, split, splits, kv_heads, n_query, scale,
    softcap, window, query_batch, query_head, query_token, position_batch, position_head,
    key_bits: tl.constexpr, value_bits: tl.constexpr, width: tl.constexpr, value_width: tl.constexpr,
    key_span: tl.constexpr, key_channels: tl.constexpr, value_channels: tl.constexpr, group: tl.constexpr,
    causal: tl.constexpr, has_window: tl.constexpr, has_positions: tl.constexpr, has_softcap: tl.constexpr,
    static: tl.constexpr, signed: tl.constexpr, folded: tl.constexpr, exact: tl.constexpr, assembly: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, block_d: tl.constexpr, block_v: tl.constexpr,
):
    """Attend with one block of queries to one tile of entries of their KV head."""
    tile, part, batch, kv_head, t, g, real = find_place(splits, kv_heads, n_query, group, block_m)
    count = n_entries
    if static:
        count = tl.load(length).to(tl.int32)
        before = count - n_query

    of_query = (kv_head * group + g) * query_head + t.to(tl.int64) * query_token
    q = load_columns(query + batch * query_batch + of_query, real, width, block_d).to(tl.float32)
    of_minima = 0.0
    if folded:  # all keys have the same parameters, which are applied to the queries
        d = tl.arange(0, block_d)
        at = batch * keys.scale_batch + kv_head * keys.scale_head + d // key_channels
        minimum = tl.load(keys.minimum + at, mask=d < width, other=0.0).to(tl.float32)
        of_minima = tl.sum(q * minimum[:, None], 0)[None, :]
        q *= tl.load(keys.scale + at, mask=d < width, other=0.0).to(tl.float32)[:, None]
    dtype: tl.constexpr = tl.float32 if exact else tl.float16
    size = power_below(tl.max(tl.abs(q), 0))
    q = (q / size[None, :]).to(dtype)

    low, high = part * split, tl.minimum(part * split + split, count)
    if causal:
        high = tl.minimum(high, before + (tl.program_id(0) * block_m + block_m - 1) // group + 1)
    if has_window and not has_positions:
        first = before + tl.program_id(0) * block_m // group - window + 1
        low = tl.maximum(low, first // block_n * block_n)

    top = tl.full([block_m], float("-inf"), tl.float32)
    total = tl.zeros([block_m], tl.float32)
    sums = tl.zeros([block_v, block_m], tl.float32)
    for start in range(low, high, block_n):
        entry = start + tl.arange(0, block_n)
        inside = entry < high
        x = load_codes(values, batch, kv_head, entry, inside, value_bits, value_width, signed, dtype, assembly, block_v)
        x = bring_back(x, values, batch, kv_head, start, high, value_width, 1, value_channels, signed)
        k = load_codes(keys, batch, kv_head, entry, inside, key_bits, width, signed, dtype, assembly, block_d)
        if not folded:
            k = bring_back(k, keys, batch, kv_head, start, high, width, key_span, key_channels, signed)
        products = tl.dot(k, q, input_precision="ieee") * size[None, :] + of_minima
        visible = inside[:, None] & real[None, :]
        if causal:
            visible = visible & (entry[:, None] <= before + t[None, :])
        if has_window:
            place = entry
            if has_positions:
                where = positions + batch * position_batch + kv_head * position_head + entry
                place = tl.load(where, mask=inside, other=0)
            visible = visible & ((before + t)[None, :] - place[:, None] < window)
        logits = tl.where(visible, capped(products, scale, softcap, has_softcap), float("-inf"))
        weights, shrink, total, top = soften(logits, total, top)
        sums = sums * shrink[None, :] + tl.dot(tl.trans(x), weights.to(dtype), input_precision="ieee")

    at = tile.to(tl.int64) * group * n_query + g * n_query + t
    store_columns(output, lse, at, sums, total, top, real, value_width, value_width, block_v)


@triton.jit
def find_place(splits, kv_heads, n_query, group: tl.constexpr, block_m: tl.constexpr):
    """A program's tile, the tile's number within its head, its batch and KV head, and its queries.

    Queries are the columns of the product: those of all heads of the group, with those of one position adjacent. Each
    column has a position, a head of the group, and whether there is such a query.
    """
    tile = tl.program_id(1)
    head, part = tile // splits, tile % splits
    m = tl.program_id(0) * block_m + tl.arange(0, block_m)
    return (
        tile, part, (head // kv_heads).to(tl.int64), (head % kv_heads).to(tl.int64), m // group, m % group,
        m < group * n_query,
    )


@triton.jit
def load_columns(queries, real, width: tl.constexpr, block_d: tl.constexpr):
    """Load queries as columns. queries: [m] pointers. Returns [block_d, m]"""
    d = tl.arange(0, block_d)
    return tl.load(queries[None, :] + d[:, None], mask=real[None, :] & (d < width)[:, None], other=0.0)


@triton.jit
def power_below(size):
    """The power of two by which queries are divided; 1 for zero.

    So that queries of 16 bits keep their bits: rounded, they would shift all logits over codes against those over
    exact entries.
    """
    power = (size.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(power > 0.0, power, 1.0)


@triton.jit
def soften(logits, total, top):
    """One step of an online softmax: the weights of one more block of entries, and the update of earlier sums.

    logits: [n, m], to base 2, -inf for entries that are not visible. Returns the weights [n, m] and, by column, the
    factor for earlier sums, the new total and the new maximum.
    """
    higher = tl.maximum(top, tl.max(logits, 0))
    shift = tl.where(higher == float("-inf"), 0.0, higher)  # no visible entry yet: weights are zero, not NaN
    weights, shrink = tl.exp2(logits - shift[None, :]), tl.exp2(top - shift)
    return weights, shrink, total * shrink + tl.sum(weights, 0), higher


@triton.jit
def store_columns(
    output, lse, at, sums, total, top, real, row: tl.constexpr, width: tl.constexpr, block_v: tl.constexpr
):
    """Store normalized sums and the log of the normalizer. sums: [block_v, m].

    at: [m], indices into both outputs. row: elements of an output, of which `width` are stored.
    """
    v = tl.arange(0, block_v)[:, None]
    none = total == 0.0
    whole = tl.where(none, 1.0, total)
    tl.store(lse + at, tl.where(none, float("-inf"), (top + tl.log2(whole)) * LN2), mask=real)
    tl.store(output + at[None, :] * row + v, sums / whole[None, :], mask=real[None, :] & (v < width))
