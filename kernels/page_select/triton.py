"""Page scores of all queries of a group in one pass over the bounds.

torch computes bounds and selects pages: bounds are computed once, when a page is full, and `topk` over one number per
page is cheap compared with the pass over the bounds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.dense_attention.triton import padded
from kvbench.kernels.page_select.torch import page_bounds, select_pages

__all__ = ["page_bounds", "page_scores", "select_pages"]

PAGES = 64
"""Pages that a program scores: with 128 channels in 16 bits, 32 KiB of bounds."""


def page_scores(query: Tensor, bounds: Tensor) -> Tensor:
    """The highest logit that a key within the bounds of each page can have; see `torch.page_scores`."""
    batch, heads, n_query, width = query.shape
    kv_heads, pages = bounds.shape[1:3]
    group = heads // kv_heads
    scores = query.new_empty((batch, heads, n_query, pages), dtype=torch.float32)
    if pages == 0:
        return scores
    assert query.stride(3) == bounds.stride(3) == 1, "the last dimension must be contiguous"
    block_m = min(64 if query.itemsize <= 2 else 16, padded(group * n_query))  # without tensor cores, in registers
    score_pages[(triton.cdiv(pages, PAGES), batch * kv_heads, triton.cdiv(group * n_query, block_m))](
        query, bounds, scores, pages, kv_heads, n_query, *query.stride()[:3], *bounds.stride()[:3], width=width,
        group=group, block_m=block_m, block_p=PAGES, block_d=padded(width), num_warps=4 if query.itemsize <= 2 else 8,
    )
    return scores


@triton.jit(do_not_specialize=["pages"])  # it grows while a conversation does
def score_pages(
    query, bounds, scores, pages, kv_heads, n_query, query_batch, query_head, query_token, bound_batch, bound_head,
    bound_page, width: tl.constexpr, group: tl.constexpr, block_m: tl.constexpr, block_p: tl.constexpr,
    block_d: tl.constexpr,
):
    """Score one block of pages of one KV head for one block of its queries."""
    head = tl.program_id(1)
    batch, kv_head = (head // kv_heads).to(tl.int64), (head % kv_heads).to(tl.int64)
    m = tl.program_id(2) * block_m + tl.arange(0, block_m)
    t, g = m // group, m % group
    real = m < group * n_query
    d = tl.arange(0, block_d)
    of_query = (kv_head * group + g) * query_head + t.to(tl.int64) * query_token
    q = tl.load(
        query + batch * query_batch + of_query[:, None] + d[None, :], mask=real[:, None] & (d < width)[None, :],
        other=0.0,
    )
    page = tl.program_id(0) * block_p + tl.arange(0, block_p)
    inside = page < pages
    low = bounds + batch * bound_batch + kv_head * bound_head + page[None, :] * bound_page + d[:, None]
    mask = inside[None, :] & (d < width)[:, None]
    minima, maxima = tl.load(low, mask=mask, other=0.0), tl.load(low + width, mask=mask, other=0.0)
    # The largest product has the minimum of a channel if the query is negative there, otherwise the maximum.
    best = tl.dot(tl.minimum(q, 0.0).to(q.dtype), minima, input_precision="ieee")
    best = tl.dot(tl.maximum(q, 0.0).to(q.dtype), maxima, best, input_precision="ieee")
    line = (batch * kv_heads + kv_head) * group * n_query + g * n_query + t
    tl.store(scores + line[:, None] * pages + page[None, :], best, mask=real[:, None] & inside[None, :])
