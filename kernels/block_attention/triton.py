"""Block attention in tiles: a tile in which no query reads an entry is neither loaded nor multiplied."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.dense_attention.triton import LOG2E, block_entries, capped, padded


def block_attention(
    query: Tensor, keys: Tensor, values: Tensor, blocks: Tensor, columns: Tensor | None = None, *, block: int,
    scale: float, softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of T queries over chosen entries among the T; see `torch.block_attention`. [B, H_q, T, D_v]"""
    batch, heads, tokens, width = query.shape
    value_width, count = values.shape[3], blocks.shape[2]
    assert query.stride(3) == keys.stride(3) == values.stride(3) == 1, "the last dimension must be contiguous"
    output = query.new_empty((batch, heads, tokens, value_width))
    block_m, block_n = tile_sides(width, value_width, query.itemsize)
    attend_blocks[(triton.cdiv(tokens, block_m), batch * heads)](
        query, keys, values, output, blocks.contiguous().view(torch.int8),
        None if columns is None else columns.contiguous().view(torch.int8), sinks, heads, tokens, count, block, scale,
        0.0 if softcap is None else softcap, *query.stride()[:3], *keys.stride()[:3], *values.stride()[:3],
        width=width, value_width=value_width, group=heads // keys.shape[1], has_softcap=softcap is not None,
        block_m=block_m, block_n=block_n, block_d=padded(width), block_v=padded(value_width), num_warps=8,
    )
    return output


def tile_sides(width: int, value_width: int, itemsize: int) -> tuple[int, int]:
    """Queries and entries of a tile; in float32 there are no tensor cores, and more would not fit into registers."""
    if itemsize <= 2:
        return 64, min(64, block_entries(16384 // (padded(width) + padded(value_width))))
    return 16, block_entries(2048 // padded(max(width, value_width)))


@triton.jit
def attend_blocks(
    query, keys, values, output, blocks, columns, sinks, heads, tokens, count, block, scale, softcap,
    query_batch, query_head, query_token, key_batch, key_head, key_entry, value_batch, value_head, value_entry,
    width: tl.constexpr, value_width: tl.constexpr, group: tl.constexpr, has_softcap: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, block_d: tl.constexpr, block_v: tl.constexpr,
):
    """Attend with one tile of queries to the tiles of entries in which one of them reads something."""
    unit = tl.program_id(1)
    batch, head = (unit // heads).to(tl.int64), (unit % heads).to(tl.int64)
    t = tl.program_id(0) * block_m + tl.arange(0, block_m)
    real = t < tokens
    d, v = tl.arange(0, block_d), tl.arange(0, block_v)
    of_query = batch * query_batch + head * query_head + t.to(tl.int64) * query_token
    q = tl.load(query + of_query[:, None] + d[None, :], mask=real[:, None] & (d < width)[None, :], other=0.0)
    key = keys + batch * key_batch + (head // group) * key_head
    value = values + batch * value_batch + (head // group) * value_head
    row = blocks + (unit.to(tl.int64) * count + t // block) * count

    top = tl.full([block_m], float("-inf"), tl.float32)
    total = tl.zeros([block_m], tl.float32)
    sums = tl.zeros([block_m, block_v], tl.float32)
    if sinks is not None:
        top = tl.zeros([block_m], tl.float32) + tl.load(sinks + head).to(tl.float32) * LOG2E  # an entry without value
        total += 1.0
    for start in range(0, tl.minimum(tokens, tl.program_id(0) * block_m + block_m), block_n):
        entry = start + tl.arange(0, block_n)
        inside = entry < tokens
        visible = real[:, None] & inside[None, :] & (entry[None, :] <= t[:, None])
        flags = tl.load(row[:, None] + (entry // block)[None, :], mask=visible, other=0)
        if columns is not None:
            single = tl.load(columns + unit.to(tl.int64) * tokens + entry, mask=inside, other=0)
            flags = flags | single[None, :]
        visible = visible & (flags != 0)
        if tl.max(tl.max(visible.to(tl.int32), 1), 0) > 0:
            place = entry.to(tl.int64)
            k = tl.load(
                key + place[None, :] * key_entry + d[:, None], mask=inside[None, :] & (d < width)[:, None], other=0.0
            )
            x = tl.load(
                value + place[:, None] * value_entry + v[None, :], mask=inside[:, None] & (v < value_width)[None, :],
                other=0.0,
            )
            logits = capped(tl.dot(q, k, input_precision="ieee"), scale, softcap, has_softcap)
            logits = tl.where(visible, logits, float("-inf"))
            higher = tl.maximum(top, tl.max(logits, 1))
            shift = tl.where(higher == float("-inf"), 0.0, higher)  # no visible entry yet: weights are zero, not NaN
            weights = tl.exp2(logits - shift[:, None])
            shrink = tl.exp2(top - shift)
            total = total * shrink + tl.sum(weights, 1)
            sums = sums * shrink[:, None] + tl.dot(weights.to(x.dtype), x, input_precision="ieee")
            top = higher
    out = (unit.to(tl.int64) * tokens + t) * value_width
    whole = tl.where(total == 0.0, 1.0, total)
    tl.store(
        output + out[:, None] + v[None, :], sums / whole[:, None], mask=real[:, None] & (v < value_width)[None, :]
    )
