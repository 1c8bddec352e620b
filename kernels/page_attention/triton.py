"""Each query's pages are cut into parts that attend side by side, and parts are merged; nothing is gathered first.

Query heads select by themselves, so there is nothing that a matrix product would share: a program multiplies one query
with its rows, and adds values up in registers until all rows are through.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.dense_attention.triton import LN2, LOG2E, merge_tiles, padded, rows_of_a_tile

ROWS = 32
"""Rows that a program reads at a time: keys and values of 128 channels in 16 bits are 16 KiB of loads on their way."""

LEAST_ROWS = 128
"""Of a part."""


def page_attention(
    query: Tensor, keys: Tensor, values: Tensor, pages: Tensor, *, page: int, before: int | Tensor, scale: float,
    window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:
    """Attention of T queries over the rows of their pages up to their own row; see `torch.page_attention`."""
    batch, heads, n_query, chosen = pages.shape
    width, value_width, kv_heads = query.shape[3], values.shape[3], keys.shape[1]
    split = rows_of_a_tile(batch * heads * n_query * chosen * page, LEAST_ROWS, page, query.device) // page
    splits = triton.cdiv(chosen, split)
    output = query.new_empty((batch * heads * splits, 1, n_query, value_width), dtype=torch.float32)
    lse = query.new_empty((batch * heads * splits, 1, n_query), dtype=torch.float32)
    assert query.stride(3) == keys.stride(3) == values.stride(3) == 1, "elements of a row lie side by side"
    attend_pages[(n_query, batch * heads * splits)](
        query, keys, values, pages.contiguous(), output, lse, before, splits, split, chosen, heads, n_query,
        scale, 0.0 if softcap is None else softcap, 0 if window is None else window, *query.stride()[:3],
        *keys.stride()[:3], *values.stride()[:3], width=width, value_width=value_width, page=page,
        group=heads // kv_heads, has_window=window is not None, has_softcap=softcap is not None,
        before_on_device=isinstance(before, Tensor), block_n=ROWS, block_d=padded(width), block_v=padded(value_width),
        num_warps=4,
    )
    merged, _ = merge_tiles(output, lse, batch * heads, None, 0, splits, sinks, heads, query.dtype)
    return merged.view(batch, heads, n_query, value_width)


@triton.jit(do_not_specialize=["before"])  # it grows with every step
def attend_pages(
    query, keys, values, pages, output, lse, before, splits, split, chosen, heads, n_query, scale, softcap, window,
    query_batch, query_head, query_row, key_batch, key_head, key_row, value_batch, value_head, value_row,
    width: tl.constexpr, value_width: tl.constexpr, page: tl.constexpr, group: tl.constexpr, has_window: tl.constexpr,
    has_softcap: tl.constexpr, before_on_device: tl.constexpr, block_n: tl.constexpr, block_d: tl.constexpr,
    block_v: tl.constexpr,
):
    """One query over `split` of its pages."""
    t, tile = tl.program_id(0), tl.program_id(1)
    unit, part = tile // splits, tile % splits
    batch, head = (unit // heads).to(tl.int64), (unit % heads).to(tl.int64)
    at = before + t
    if before_on_device:
        at = tl.load(before).to(tl.int32) + t
    d, v = tl.arange(0, block_d), tl.arange(0, block_v)
    of_query = batch * query_batch + head * query_head + t.to(tl.int64) * query_row
    q = tl.load(query + of_query + d, mask=d < width, other=0.0).to(tl.float32) * (scale * LOG2E)
    key = keys + batch * key_batch + (head // group) * key_head
    value = values + batch * value_batch + (head // group) * value_head
    numbers = pages + (unit.to(tl.int64) * n_query + t) * chosen

    top = float("-inf")
    total = 0.0
    sums = tl.zeros([block_n, block_v], tl.float32)  # by row, added up at the end: no exchange in the loop
    for start in range(part * split * page, tl.minimum(part * split + split, chosen) * page, block_n):
        index = start + tl.arange(0, block_n)
        inside = index < tl.minimum(part * split + split, chosen) * page
        row = tl.load(numbers + index // page, mask=inside, other=0) * page + index % page
        visible = inside & (row <= at)
        if has_window:
            visible = visible & (at - row < window)
        row = row.to(tl.int64)[:, None]
        k = tl.load(key + row * key_row + d[None, :], mask=visible[:, None] & (d < width)[None, :], other=0.0)
        x = tl.load(
            value + row * value_row + v[None, :], mask=visible[:, None] & (v < value_width)[None, :], other=0.0
        )
        logits = tl.sum(q[None, :] * k.to(tl.float32), 1)
        if has_softcap:
            logits = softcap * LOG2E * (1.0 - 2.0 / (1.0 + tl.exp2(logits * (2.0 / softcap))))  # tanh
        logits = tl.where(visible, logits, float("-inf"))
        higher = tl.maximum(top, tl.max(logits, 0))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # no row seen yet: weights are zero, not NaN
        weights, shrink = tl.exp2(logits - shift), tl.exp2(top - shift)
        total = total * shrink + tl.sum(weights, 0)
        sums = sums * shrink + weights[:, None] * x.to(tl.float32)
        top = higher

    none = total == 0.0
    whole = tl.where(none, 1.0, total)
    out = tile.to(tl.int64) * n_query + t
    tl.store(lse + out, tl.where(none, float("-inf"), (top + tl.log2(whole)) * LN2))
    tl.store(output + out * value_width + v, tl.sum(sums, 0) / whole, mask=v < value_width)
