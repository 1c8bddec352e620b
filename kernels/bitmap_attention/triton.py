"""Split-K attention over bitmaps and kept elements: rows are spread out in registers, and nowhere else.

A bit's rank in its row says where its element lies, so a row is one gather from its own short slot. Rows are the long
side of both matrix products and queries the short one, as in the packed operation's kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.bitmap_attention.torch import SparseRows
from kvbench.kernels.dense_attention.triton import capped, merge_tiles, rows_of_a_tile
from kvbench.kernels.packed_attention.triton import load_columns, soften, store_columns
from kvbench.kernels.ragged_attention.torch import Partial

LEAST_ROWS = 256
"""Of a tile. Not measured yet."""
ROWS = 16
"""Rows of a program that compresses."""


def compress(x: Tensor, kept: int) -> SparseRows:
    """Keep the `kept` largest elements of every row; see `torch.compress`."""
    held = x[(None,) * (4 - x.dim())]
    first, second, n_rows, width = held.shape
    rows = SparseRows(
        x.new_empty((*x.shape[:-1], triton.cdiv(width, 32)), dtype=torch.int32), x.new_empty((*x.shape[:-1], kept)),
        width,
    )
    blocks = triton.cdiv(n_rows, ROWS)
    if x.numel():
        sieve_rows[(blocks * first * second,)](
            held, rows.bitmap, rows.values, blocks, n_rows, second, *held.stride(), width=width, kept=kept,
            block_n=ROWS, block_d=_padded(width), num_warps=4,
        )
    return rows


def bitmap_partial(
    query: Tensor, keys: SparseRows, values: SparseRows, *,
    scale: float, seen: int, window: int | None = None, positions: Tensor | None = None, start: int = 0,
    softcap: float | None = None,
) -> Partial:
    """Attention over sparse rows that all came before the queries; see `torch.bitmap_partial`."""
    batch, heads, n_query, width = query.shape
    kv_heads, n_rows = values.bitmap.shape[1:3]
    value_width, group, n_head = values.width, heads // kv_heads, batch * kv_heads
    block_m, block_n, warps = _blocks(group * n_query, max(width, value_width), values.values.itemsize)
    query_blocks = triton.cdiv(group * n_query, block_m)
    split = rows_of_a_tile(n_rows * n_head * query_blocks, LEAST_ROWS, block_n, query.device)
    splits = max(1, triton.cdiv(n_rows, split))
    output = query.new_empty((n_head * splits, group, n_query, value_width), dtype=torch.float32)
    lse = query.new_empty((n_head * splits, group, n_query), dtype=torch.float32)
    position_strides = (0, 0) if positions is None else positions.stride()[:2]
    assert query.stride(3) == 1, "elements of a row lie side by side"
    attend_bitmaps[(query_blocks, n_head * splits)](
        query, _slots(keys), _slots(values), output, lse, positions, n_rows,
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


class Slots(NamedTuple):
    """Sparse rows as the kernel takes them."""

    bitmap: Tensor
    elements: Tensor
    bitmap_batch: int  # strides
    bitmap_head: int
    batch: int
    head: int


def _slots(rows: SparseRows) -> Slots:
    for x in (rows.bitmap, rows.values):
        assert x.shape[2] < 2 or x.stride()[2:] == (x.shape[3], 1), "rows lie side by side"
    (bitmap_batch, bitmap_head), (batch, head) = rows.bitmap.stride()[:2], rows.values.stride()[:2]
    return Slots(rows.bitmap, rows.values, bitmap_batch, bitmap_head, batch, head)


def _padded(width: int) -> int:
    """Bits of a power of two words."""
    return 32 * int(triton.next_power_of_2(triton.cdiv(width, 32)))


def _blocks(queries: int, width: int, itemsize: int) -> tuple[int, int, int]:
    """Queries and rows of a block, and warps."""
    queries = min(32, max(8, triton.next_power_of_2(queries)))
    if itemsize > 2:
        return min(16, queries), 32, 8
    return queries, max(16, min(64, 8192 // _padded(width))), 4


@triton.jit(do_not_specialize=["n_rows", "before"])  # they grow with every step
def attend_bitmaps(
    query, keys, values, output, lse, positions, n_rows, before, split, splits, kv_heads, n_query, scale, softcap,
    window, query_batch, query_head, query_row, position_batch, position_head,
    width: tl.constexpr, value_width: tl.constexpr, kept: tl.constexpr, value_kept: tl.constexpr, group: tl.constexpr,
    has_window: tl.constexpr, has_positions: tl.constexpr, has_softcap: tl.constexpr, assembly: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, block_d: tl.constexpr, block_v: tl.constexpr,
):
    """One block of queries against one tile of rows of their KV head."""
    tile = tl.program_id(1)
    head, part = tile // splits, tile % splits
    batch, kv_head = (head // kv_heads).to(tl.int64), (head % kv_heads).to(tl.int64)

    # Columns of the product: the queries of all heads of the group, those of one position side by side.
    m = tl.program_id(0) * block_m + tl.arange(0, block_m)
    t, g = m // group, m % group
    real = m < group * n_query
    of_query = (kv_head * group + g) * query_head + t.to(tl.int64) * query_row
    q = load_columns(query + batch * query_batch + of_query, real, width, block_d).to(keys.elements.dtype.element_ty)

    low, high = part * split, tl.minimum(part * split + split, n_rows)
    if has_window and not has_positions:
        first = before + tl.program_id(0) * block_m // group - window + 1
        low = tl.maximum(low, first // block_n * block_n)

    top = tl.full([block_m], float("-inf"), tl.float32)
    total = tl.zeros([block_m], tl.float32)
    sums = tl.zeros([block_v, block_m], tl.float32)
    for start in range(low, high, block_n):
        row = start + tl.arange(0, block_n)
        k = load_spread(keys, batch, kv_head, start, high, width, kept, assembly, block_n, block_d)
        x = load_spread(values, batch, kv_head, start, high, value_width, value_kept, assembly, block_n, block_v)
        products = tl.dot(tl.trans(k), q, input_precision="ieee")
        visible = (row < high)[:, None] & real[None, :]
        if has_window:
            place = row
            if has_positions:
                where = positions + batch * position_batch + kv_head * position_head + row
                place = tl.load(where, mask=row < high, other=0)
            visible = visible & ((before + t)[None, :] - place[:, None] < window)
        logits = tl.where(visible, capped(products, scale, softcap, has_softcap), float("-inf"))
        weights, shrink, total, top = soften(logits, total, top)
        sums = sums * shrink[None, :] + tl.dot(x, weights.to(x.dtype), input_precision="ieee")

    at = tile.to(tl.int64) * group * n_query + g * n_query + t
    store_columns(output, lse, at, sums, total, top, real, value_width, block_v)


@triton.jit
def load_spread(
    rows, batch, head, start, stop, width: tl.constexpr, kept: tl.constexpr, assembly: tl.constexpr,
    block_n: tl.constexpr, block_d: tl.constexpr,
):
    """Rows with zeros where nothing was kept, as columns. [block_d, block_n]

    Bits come first, so that the threads of a warp gather from one row.
    """
    words: tl.constexpr = (width + 31) // 32
    i, j = tl.arange(0, block_n)[None, :], tl.arange(0, block_d // 32)[:, None]
    first = start + batch * 0  # in 64 bits
    bitmap = rows.bitmap + batch * rows.bitmap_batch + head * rows.bitmap_head + first * words
    word = tl.load(bitmap + i * words + j, mask=(start + i < stop) & (j < words), other=0)
    count = count_bits(word, assembly)
    before = i * kept + tl.cumsum(count, 0) - count
    bit = tl.arange(0, 32)[:, None, None]
    at = before[None, :, :] + count_bits(word[None, :, :] & ((1 << bit) - 1), assembly)
    elements = rows.elements + batch * rows.batch + head * rows.head + first * kept
    found = tl.load(elements + at, mask=(word[None, :, :] >> bit & 1) > 0, other=0.0)
    return found.permute(1, 0, 2).reshape([block_d, block_n])


@triton.jit
def count_bits(x, assembly: tl.constexpr):
    """How many bits of each word are set."""
    if assembly:
        count = tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [x], tl.int32, is_pure=True, pack=1)
    else:
        count = x - (x >> 1 & 0x55555555)
        count = (count & 0x33333333) + (count >> 2 & 0x33333333)
        count = (count + (count >> 4) & 0x0F0F0F0F) * 0x01010101 >> 24
    return count


@triton.jit(do_not_specialize=["blocks", "n_rows"])
def sieve_rows(
    x, bitmap, kept_elements, blocks, n_rows, second, x_first, x_second, x_row, x_element, width: tl.constexpr,
    kept: tl.constexpr, block_n: tl.constexpr, block_d: tl.constexpr,
):
    """A block of rows: the magnitude that divides them is found bit by bit, as an integer."""
    lead = (tl.program_id(0) // blocks).to(tl.int64)
    row, d = tl.program_id(0) % blocks * block_n + tl.arange(0, block_n), tl.arange(0, block_d)
    inside = (row < n_rows)[:, None] & (d < width)[None, :]
    x += lead // second * x_first + lead % second * x_second
    exact = tl.load(x + row.to(tl.int64)[:, None] * x_row + d[None, :] * x_element, mask=inside, other=0.0)
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
    line = lead * n_rows + row
    tl.store(kept_elements + line[:, None] * kept + rank, exact, mask=inside & (bit > 0))
    words: tl.constexpr = (width + 31) // 32
    word = tl.sum(bit.reshape([block_n, block_d // 32, 32]) << tl.arange(0, 32)[None, None, :], 2)
    j = tl.arange(0, block_d // 32)[None, :]
    tl.store(bitmap + line[:, None] * words + j, word, mask=(row < n_rows)[:, None] & (j < words))
