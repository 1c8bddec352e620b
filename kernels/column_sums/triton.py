"""Two passes over the keys: the log-sum-exp of every query by the dense kernel, then the mass of every entry.

In the second pass a program keeps a block of entries and loops over the queries that may attend to them. The mass of an
entry is therefore summed in one program and in a fixed order, and no matrix of length times length is stored.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.column_sums.repeated import is_repeated, repeated_maxima, repeated_sums
from kvbench.kernels.dense_attention.triton import LOG2E, attend, block_entries, capped, padded


def column_sums(
    query: Tensor, keys: Tensor, *, scale: float, seen: int, window: int | None = None, positions: Tensor | None = None,
    softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:
    """Attention mass of each entry over the last T queries and the heads of its group; see `torch.column_sums`."""
    if is_repeated(query, window, positions):
        return repeated_sums(query, keys, scale=scale, softcap=softcap, sinks=sinks)
    return weigh(
        query, keys, scale=scale, seen=seen, window=window, positions=positions, softcap=softcap, sinks=sinks
    )


def column_maxima(
    query: Tensor, keys: Tensor, *, scale: float, seen: int, window: int | None = None, positions: Tensor | None = None,
    softcap: float | None = None, sinks: Tensor | None = None, factors: Tensor | None = None,
) -> Tensor:
    """The largest weight of each entry over the last T queries; see `torch.column_maxima`."""
    if factors is None and is_repeated(query, window, positions):
        return repeated_maxima(query, keys, scale=scale, softcap=softcap, sinks=sinks)
    return weigh(
        query, keys, scale=scale, seen=seen, window=window, positions=positions, softcap=softcap, sinks=sinks,
        measure="max", factors=factors,
    )


def weigh(
    query: Tensor, keys: Tensor, *,
    scale: float, seen: int, lse: Tensor | None = None, window: int | None = None, positions: Tensor | None = None,
    softcap: float | None = None, sinks: Tensor | None = None, at: Tensor | None = None, logical: Tensor | None = None,
    by_head: bool = False, measure: Literal["sum", "max"] = "sum", factors: Tensor | None = None,
) -> Tensor:
    """The sum or the maximum of the weights that queries put on each entry, in float32.

    lse: [B, H_q, T], log of each query's normalizer, sinks included; None: computed in a first pass, which is `attend`
        without values.
    at, logical: [T], entry index and position of each query; None: the queries are the last T.
    factors: [B, T], above 0, by which each query's weights are multiplied first.
    Returns [B, H_kv, N], over the heads of the group, or with `by_head` [B, H_q, N].
    """
    if lse is None:
        _, lse = attend(
            query, keys, keys[..., :0], keys.shape[1], scale=scale, seen=seen, window=window, positions=positions,
            softcap=softcap, sinks=sinks, at=at, logical=logical,
        )
    if factors is not None:
        lse = lse - factors.log()[:, None]
    batch, heads, n_query, width = query.shape
    kv_heads, n_key = keys.shape[1:3]
    block_n, block_m, warps = _blocks(n_query, width, keys.itemsize)
    result = query.new_empty((batch, heads if by_head else kv_heads, n_key), dtype=torch.float32)
    position_strides = (0, 0) if positions is None else positions.stride()[:2]
    assert query.stride(3) == keys.stride(3) == 1, "the last dimension must be contiguous"
    assert positions is None or positions.stride(2) == 1, "the positions of a head must be contiguous"
    weigh_entries[(triton.cdiv(n_key, block_n), batch * kv_heads)](
        query, keys, lse.contiguous(), result, positions, at, logical, seen, n_key, kv_heads, n_query, scale,
        0.0 if softcap is None else softcap, 0 if window is None else window, *query.stride()[:3], *keys.stride()[:3],
        *position_strides, width=width, group=heads // kv_heads, has_window=window is not None,
        has_positions=window is not None and positions is not None, has_softcap=softcap is not None, by_head=by_head,
        measure=measure, block_n=block_n, block_m=block_m, block_d=padded(width), num_warps=warps,
        num_stages=3 if keys.itemsize <= 2 else 2,
    )
    return result


def _blocks(queries: int, width: int, itemsize: int) -> tuple[int, int, int]:
    """Entries of a block, queries of a block, and warps.

    Entries stay in registers while the program loops over queries, so a block has as many as fit: 128 of 128 channels
    in 16 bits. In float32 there are no tensor cores, and more entries would not fit into registers.
    """
    if itemsize <= 2:
        return block_entries(16384 // padded(width)), min(64, padded(queries)), 4
    return block_entries(4096 // padded(width)), min(32, padded(queries)), 8


@triton.jit(do_not_specialize=["seen", "n_key"])  # they grow with every step
def weigh_entries(
    query, keys, lse, result, positions, at, logical, seen, n_key, kv_heads, n_query, scale, softcap, window,
    query_batch, query_head, query_token, key_batch, key_head, key_entry, position_batch, position_head,
    width: tl.constexpr, group: tl.constexpr, has_window: tl.constexpr, has_positions: tl.constexpr,
    has_softcap: tl.constexpr, by_head: tl.constexpr, measure: tl.constexpr, block_n: tl.constexpr,
    block_m: tl.constexpr, block_d: tl.constexpr,
):
    """Weights of one block of entries of a KV head for all queries of its group that may attend to them."""
    pair = tl.program_id(1)
    batch, kv_head = (pair // kv_heads).to(tl.int64), (pair % kv_heads).to(tl.int64)
    first = tl.program_id(0) * block_n
    entry = first + tl.arange(0, block_n)
    inside = entry < n_key
    d = tl.arange(0, block_d)
    k = tl.load(
        keys + batch * key_batch + kv_head * key_head + entry.to(tl.int64)[:, None] * key_entry + d[None, :],
        mask=inside[:, None] & (d < width)[None, :], other=0.0,
    )
    if has_positions:
        place = tl.load(
            positions + batch * position_batch + kv_head * position_head + entry, mask=inside, other=0
        ).to(tl.int32)

    before = n_key - n_query  # entries before the first query's own
    low, high = 0, n_query
    if at is None:  # queries are in the order of their entries
        low = tl.maximum(low, first - before)
        if has_window and not has_positions:
            high = tl.minimum(high, first + block_n - 1 + window - before)

    found = tl.zeros([block_n], tl.float32)
    for g in range(group):
        head = kv_head * group + g
        of_head = (batch * kv_heads * group + head) * n_query
        for start in range(low, high, block_m):
            t = start + tl.arange(0, block_m)
            real = t < high
            q = tl.load(
                query + batch * query_batch + head * query_head + t.to(tl.int64)[None, :] * query_token + d[:, None],
                mask=real[None, :] & (d < width)[:, None], other=0.0,
            )
            total = tl.load(lse + of_head + t, mask=real, other=0.0) * LOG2E
            logits = capped(tl.dot(k, q, input_precision="ieee"), scale, softcap, has_softcap)
            own, now = before + t, seen - n_query + t  # each query's entry and position
            if at is not None:
                own = tl.load(at + t, mask=real, other=0).to(tl.int32)
            if logical is not None:
                now = tl.load(logical + t, mask=real, other=0).to(tl.int32)
            visible = inside[:, None] & real[None, :] & (entry[:, None] <= own[None, :])
            if has_window:
                if has_positions:
                    visible = visible & (now[None, :] - place[:, None] < window)
                else:
                    visible = visible & (own[None, :] - entry[:, None] < window)
            weights = tl.where(visible, tl.exp2(logits - total[None, :]), 0.0)
            if measure == "max":
                found = tl.maximum(found, tl.max(weights, 1))
            else:
                found += tl.sum(weights, 1)
        if by_head:
            tl.store(result + (batch * kv_heads * group + head) * n_key + entry, found, mask=inside)
            found = tl.zeros([block_n], tl.float32)
    if not by_head:
        tl.store(result + (batch * kv_heads + kv_head) * n_key + entry, found, mask=inside)
