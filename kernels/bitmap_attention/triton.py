"""Split-K attention over bitmaps and kept elements, which are expanded in registers only.

The number of set bits before a bit is the index of its element, so a vector is one gather from its slot. Entries are
the long side of both matrix products and queries the short one, as in the kernel of `packed_attention`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.bitmap_attention.torch import SparseEntries
from kvbench.kernels.dense_attention.triton import capped, merge_tiles, tile_entries
from kvbench.kernels.packed_attention.triton import find_place, load_columns, soften, store_columns
from kvbench.kernels.ragged_attention.torch import Partial

LEAST_ENTRIES = 256
"""Least entries of a tile. Not tuned on a GPU."""
ENTRIES = 16
"""Entries that a program compresses."""


def compress(x: Tensor, kept: int) -> SparseEntries:
    """Keep the `kept` largest elements of every vector; see `torch.compress`."""
    held = x[(None,) * (4 - x.dim())]
    first, second, n_entries, width = held.shape
    entries = SparseEntries(
        x.new_empty((*x.shape[:-1], triton.cdiv(width, 32)), dtype=torch.int32), x.new_empty((*x.shape[:-1], kept)),
        width,
    )
    blocks = triton.cdiv(n_entries, ENTRIES)
    if x.numel():
        sieve_entries[(blocks * first * second,)](
            held, entries.bitmap, entries.values, blocks, n_entries, second, *held.stride(), width=width, kept=kept,
            block_n=ENTRIES, block_d=_padded(width), num_warps=4,
        )
    return entries


def bitmap_partial(
    query: Tensor, keys: SparseEntries, values: SparseEntries, *,
    scale: float, seen: int, window: int | None = None, positions: Tensor | None = None, start: int = 0,
    softcap: float | None = None,
) -> Partial:
    """Partial attention over sparse entries that all precede the queries; see `torch.bitmap_partial`."""
    batch, heads, n_query, width = query.shape
    kv_heads, n_entries = values.bitmap.shape[1:3]
    value_width, group, n_head = values.width, heads // kv_heads, batch * kv_heads
    block_m, block_n, warps = _blocks(group * n_query, max(width, value_width), values.values.itemsize)
    query_blocks = triton.cdiv(group * n_query, block_m)
    split = tile_entries(n_entries, n_head * query_blocks, LEAST_ENTRIES, block_n, query.device)
    splits = max(1, triton.cdiv(n_entries, split))
    output = query.new_empty((n_head * splits, group, n_query, value_width), dtype=torch.float32)
    lse = query.new_empty((n_head * splits, group, n_query), dtype=torch.float32)
    position_strides = (0, 0) if positions is None else positions.stride()[:2]
    assert query.stride(3) == 1, "the last dimension must be contiguous"
    attend_bitmaps[(query_blocks, n_head * splits)](
        query, _slots(keys), _slots(values), output, lse, positions, n_entries,
        seen - n_query - (start if positions is None else 0), split, splits, kv_heads, n_query, scale,
        0.0 if softcap is None else softcap, 0 if window is None else window, *query.stride()[:3], *position_strides,
        width=width, value_width=value_width, kept=keys.values.shape[3], value_kept=values.values.shape[3],
        group=group, has_window=window is not None, has_positions=positions is not None,
        has_softcap=softcap is not None, assembly=not triton.knobs.runtime.interpret, block_m=block_m,
        block_n=block_n, block_d=_padded(width), block_v=_padded(value_width), num_warps=warps,
    )
    if splits > 1:
        output, lse = merge_tiles(output, lse, n_head, None, split, splits, None, kv_heads, torch.float32)
    return Partial(output.view(batch, heads, n_query, value_width), lse.view(batch, heads, n_query))


class SparseArguments(NamedTuple):
    """Sparse entries as arguments of the kernel."""

    bitmap: Tensor
    elements: Tensor
    bitmap_batch: int  # strides
    bitmap_head: int
    batch: int
    head: int


def _slots(entries: SparseEntries) -> SparseArguments:
    for x in (entries.bitmap, entries.values):
        assert x.shape[2] < 2 or x.stride()[2:] == (x.shape[3], 1), "entries must be contiguous"
    (bitmap_batch, bitmap_head), (batch, head) = entries.bitmap.stride()[:2], entries.values.stride()[:2]
    return SparseArguments(entries.bitmap, entries.values, bitmap_batch, bitmap_head, batch, head)


def _padded(width: int) -> int:
    """`width` rounded up to the bits of a power of two of words."""
    return 32 * int(triton.next_power_of_2(triton.cdiv(width, 32)))


def _blocks(queries: int, width: int, itemsize: int) -> tuple[int, int, int]:
    """Queries of a block, entries of a block, and warps."""
    queries = min(32, max(8, triton.next_power_of_2(queries)))
    if itemsize > 2:
        return min(16, queries), 32, 8
    return queries, max(16, min(64, 8192 // _padded(width))), 4


@triton.jit(do_not_specialize=["n_entries", "before"])  # they grow with every step
def attend_bitmaps(
    query, keys, values, output, lse, positions, n_entries, before, split, splits, kv_heads, n_query, scale, softcap,
    window, query_batch, query_head, query_token, position_batch, position_head,
    width: tl.constexpr, value_width: tl.constexpr, kept: tl.constexpr, value_kept: tl.constexpr, group: tl.constexpr,
    has_window: tl.constexpr, has_positions: tl.constexpr, has_softcap: tl.constexpr, assembly: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, block_d: tl.constexpr, block_v: tl.constexpr,
):
    """Attend with one block of queries to one tile of entries of their KV head."""
    tile, part, batch, kv_head, t, g, real = find_place(splits, kv_heads, n_query, group, block_m)
    of_query = (kv_head * group + g) * query_head + t.to(tl.int64) * query_token
    q = load_columns(query + batch * query_batch + of_query, real, width, block_d).to(keys.elements.dtype.element_ty)

    low, high = part * split, tl.minimum(part * split + split, n_entries)
    if has_window and not has_positions:
        first = before + tl.program_id(0) * block_m // group - window + 1
        low = tl.maximum(low, first // block_n * block_n)

    top = tl.full([block_m], float("-inf"), tl.float32)
    total = tl.zeros([block_m], tl.float32)
    sums = tl.zeros([block_v, block_m], tl.float32)
    for start in range(low, high, block_n):
        entry = start + tl.arange(0, block_n)
        k = load_spread(keys, batch, kv_head, start, high, width, kept, assembly, block_n, block_d)
        x = load_spread(values, batch, kv_head, start, high, value_width, value_kept, assembly, block_n, block_v)
        products = tl.dot(tl.trans(k), q, input_precision="ieee")
        visible = (entry < high)[:, None] & real[None, :]
        if has_window:
            place = entry
            if has_positions:
                where = positions + batch * position_batch + kv_head * position_head + entry
                place = tl.load(where, mask=entry < high, other=0)
            visible = visible & ((before + t)[None, :] - place[:, None] < window)
        logits = tl.where(visible, capped(products, scale, softcap, has_softcap), float("-inf"))
        weights, shrink, total, top = soften(logits, total, top)
        sums = sums * shrink[None, :] + tl.dot(x, weights.to(x.dtype), input_precision="ieee")

    at = tile.to(tl.int64) * group * n_query + g * n_query + t
    store_columns(output, lse, at, sums, total, top, real, value_width, value_width, block_v)


@triton.jit
def load_spread(
    entries, batch, head, start, stop, width: tl.constexpr, kept: tl.constexpr, assembly: tl.constexpr,
    block_n: tl.constexpr, block_d: tl.constexpr,
):
    """Expand sparse vectors as columns, with zeros for dropped elements. [block_d, block_n]

    The dimension of bits comes first, so that the threads of a warp gather from one vector.
    """
    words: tl.constexpr = (width + 31) // 32
    i, j = tl.arange(0, block_n)[None, :], tl.arange(0, block_d // 32)[:, None]
    first = start + batch * 0  # in 64 bits
    bitmap = entries.bitmap + batch * entries.bitmap_batch + head * entries.bitmap_head + first * words
    word = tl.load(bitmap + i * words + j, mask=(start + i < stop) & (j < words), other=0)
    count = count_bits(word, assembly)
    before = i * kept + tl.cumsum(count, 0) - count
    bit = tl.arange(0, 32)[:, None, None]
    at = before[None, :, :] + count_bits(word[None, :, :] & ((1 << bit) - 1), assembly)
    elements = entries.elements + batch * entries.batch + head * entries.head + first * kept
    found = tl.load(elements + at, mask=(word[None, :, :] >> bit & 1) > 0, other=0.0)
    return found.permute(1, 0, 2).reshape([block_d, block_n])


@triton.jit
def count_bits(x, assembly: tl.constexpr):
    """Number of set bits of each word."""
    if assembly:
        count = tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [x], tl.int32, is_pure=True, pack=1)
    else:
        count = x - (x >> 1 & 0x55555555)
        count = (count & 0x33333333) + (count >> 2 & 0x33333333)
        count = (count + (count >> 4) & 0x0F0F0F0F) * 0x01010101 >> 24
    return count


@triton.jit(do_not_specialize=["blocks", "n_entries"])
def sieve_entries(
    x, bitmap, kept_elements, blocks, n_entries, second, x_first, x_second, x_entry, x_element, width: tl.constexpr,
    kept: tl.constexpr, block_n: tl.constexpr, block_d: tl.constexpr,
):
    """Compress a block of entries; the threshold magnitude is found bit by bit, as an integer."""
    lead = (tl.program_id(0) // blocks).to(tl.int64)
    entry, d = tl.program_id(0) % blocks * block_n + tl.arange(0, block_n), tl.arange(0, block_d)
    inside = (entry < n_entries)[:, None] & (d < width)[None, :]
    x += lead // second * x_first + lead % second * x_second
    exact = tl.load(x + entry.to(tl.int64)[:, None] * x_entry + d[None, :] * x_element, mask=inside, other=0.0)
    size = exact.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    size = tl.where((d < width)[None, :], size, -1)
    least = tl.zeros([block_n], tl.int32)
    for i in tl.static_range(31):
        more = least | 1 << (30 - i)
        enough = tl.sum((size >= more[:, None]).to(tl.int32), 1) >= kept
        least = tl.where(enough, more, least)
    above, equal = (size > least[:, None]).to(tl.int32), (size == least[:, None]).to(tl.int32)
    room = kept - tl.sum(above, 1)[:, None]
    bit = above | equal & (tl.cumsum(equal, 1) <= room).to(tl.int32)
    rank = tl.cumsum(bit, 1) - bit
    line = lead * n_entries + entry
    tl.store(kept_elements + line[:, None] * kept + rank, exact, mask=inside & (bit > 0))
    words: tl.constexpr = (width + 31) // 32
    word = tl.sum(bit.reshape([block_n, block_d // 32, 32]) << tl.arange(0, 32)[None, None, :], 2)
    j = tl.arange(0, block_d // 32)[None, :]
    tl.store(bitmap + line[:, None] * words + j, word, mask=(entry < n_entries)[:, None] & (j < words))
