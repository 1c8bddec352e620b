"""Page attention that splits each query's pages into parts, which run in parallel and are merged; nothing is copied.

Query heads select pages independently, so a matrix product would share nothing: a program multiplies one query with its
keys and sums the weighted values in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.dense_attention.triton import LN2, LOG2E, merge_tiles, padded, tile_entries

ENTRIES, WARPS, STAGES = 32, 4, 3
"""Entries that a program reads at a time: keys and values of 128 channels in 16 bits are loads of 16 KiB."""

LEAST_ENTRIES = 128
"""Least entries of a part."""


def page_attention(
    query: Tensor, keys: Tensor, values: Tensor, pages: Tensor, *, page: int, before: int | Tensor, scale: float,
    window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:
    """Attention of T queries over the entries of their pages, up to their own; see `torch.page_attention`."""
    batch, heads, n_query, chosen = pages.shape
    width, value_width, kv_heads = query.shape[3], values.shape[3], keys.shape[1]
    split = tile_entries(chosen * page, batch * heads * n_query, LEAST_ENTRIES, page, query.device) // page
    splits = triton.cdiv(chosen, split)
    output = query.new_empty((batch * heads * splits, 1, n_query, value_width), dtype=torch.float32)
    lse = query.new_empty((batch * heads * splits, 1, n_query), dtype=torch.float32)
    assert query.stride(3) == keys.stride(3) == values.stride(3) == 1, "the last dimension must be contiguous"
    attend_pages[(n_query * batch * heads * splits,)](
        query, keys, values, pages.contiguous(), output, lse, before, splits, split, chosen, heads, n_query,
        scale, 0.0 if softcap is None else softcap, 0 if window is None else window, *query.stride()[:3],
        *keys.stride()[:3], *values.stride()[:3], width=width, value_width=value_width, page=page,
        group=heads // kv_heads, has_window=window is not None, has_softcap=softcap is not None,
        before_on_device=isinstance(before, Tensor), block_n=ENTRIES, block_d=padded(width),
        block_v=padded(value_width), num_warps=WARPS, num_stages=STAGES,
    )
    merged, _ = merge_tiles(output, lse, batch * heads, None, 0, splits, sinks, heads, query.dtype)
    return merged.view(batch, heads, n_query, value_width)


@triton.jit(do_not_specialize=["before"])  # it grows with every step
def attend_pages(
    query, keys, values, pages, output, lse, before, splits, split, chosen, heads, n_query, scale, softcap, window,
    query_batch, query_head, query_token, key_batch, key_head, key_entry, value_batch, value_head, value_entry,
    width: tl.constexpr, value_width: tl.constexpr, page: tl.constexpr, group: tl.constexpr, has_window: tl.constexpr,
    has_softcap: tl.constexpr, before_on_device: tl.constexpr, block_n: tl.constexpr, block_d: tl.constexpr,
    block_v: tl.constexpr,
):
    """Attend with one query to `split` of its pages."""
    t, tile = tl.program_id(0) % n_query, tl.program_id(0) // n_query  # a second dimension ends at 65,535
    unit, part = tile // splits, tile % splits
    batch, head = (unit // heads).to(tl.int64), (unit % heads).to(tl.int64)
    at = before + t
    if before_on_device:
        at = tl.load(before).to(tl.int32) + t
    d, v = tl.arange(0, block_d), tl.arange(0, block_v)
    of_query = batch * query_batch + head * query_head + t.to(tl.int64) * query_token
    q = tl.load(query + of_query + d, mask=d < width, other=0.0).to(tl.float32) * (scale * LOG2E)
    key = keys + batch * key_batch + (head // group) * key_head
    value = values + batch * value_batch + (head // group) * value_head
    numbers = pages + (unit.to(tl.int64) * n_query + t) * chosen

    top = float("-inf")
    total = 0.0
    sums = tl.zeros([block_n, block_v], tl.float32)  # by entry, summed at the end, so that the loop has no reduction
    for start in range(part * split * page, tl.minimum(part * split + split, chosen) * page, block_n):
        index = start + tl.arange(0, block_n)
        inside = index < tl.minimum(part * split + split, chosen) * page
        entry = tl.load(numbers + index // page, mask=inside, other=0) * page + index % page
        visible = inside & (entry <= at)
        if has_window:
            visible = visible & (at - entry < window)
        entry = entry.to(tl.int64)[:, None]
        k = tl.load(key + entry * key_entry + d[None, :], mask=visible[:, None] & (d < width)[None, :], other=0.0)
        x = tl.load(
            value + entry * value_entry + v[None, :], mask=visible[:, None] & (v < value_width)[None, :], other=0.0
        )
        logits = tl.sum(q[None, :] * k.to(tl.float32), 1)
        if has_softcap:
            logits = softcap * LOG2E * (1.0 - 2.0 / (1.0 + tl.exp2(logits * (2.0 / softcap))))  # tanh
        logits = tl.where(visible, logits, float("-inf"))
        higher = tl.maximum(top, tl.max(logits, 0))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # no visible entry yet: weights are zero, not NaN
        weights, shrink = tl.exp2(logits - shift), tl.exp2(top - shift)
        total = total * shrink + tl.sum(weights, 0)
        sums = sums * shrink + weights[:, None] * x.to(tl.float32)
        top = higher

    none = total == 0.0
    whole = tl.where(none, 1.0, total)
    out = tile.to(tl.int64) * n_query + t
    tl.store(lse + out, tl.where(none, float("-inf"), (top + tl.log2(whole)) * LN2))
    tl.store(output + out * value_width + v, tl.sum(sums, 0) / whole, mask=v < value_width)
