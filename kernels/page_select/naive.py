"""Reference implementation: bounds of every page in float64, and a sort for every query."""

from __future__ import annotations

import torch
from torch import Tensor


def page_scores(query: Tensor, keys: Tensor, *, page: int) -> Tensor:
    """The highest logit that a key within the bounds of each page can have. [B, H_q, T, pages] float64

    query: [B, H_q, T, D]. keys: [B, H_kv, pages * page, D].
    """
    batch, heads, n_query, _ = query.shape
    kv_heads, pages = keys.shape[1], keys.shape[2] // page
    scores = torch.zeros(batch, heads, n_query, pages, dtype=torch.float64)
    for b in range(batch):
        for head in range(heads):
            for p in range(pages):
                entries = keys[b, head // (heads // kv_heads), p * page : (p + 1) * page].double()
                low, high = entries.amin(0), entries.amax(0)
                for t in range(n_query):
                    q = query[b, head, t].double()
                    scores[b, head, t, p] = torch.maximum(q * low, q * high).sum()
    return scores


def select_pages(scores: Tensor, *, count: int, page: int, before: int, window: int | None = None) -> list[set[int]]:
    """The pages of each query with visible entries: its own, and the best of the earlier ones. [B * H_q * T] sets"""
    chosen = []
    for t, entry in ((t, scores[b, h, t]) for b in range(scores.shape[0]) for h in range(scores.shape[1])
                   for t in range(scores.shape[2])):
        at = before + t
        own = at // page
        first = 0 if window is None else max(0, at - window + 1)
        older = [p for p in range(own) if (p + 1) * page > first]
        best = sorted(older, key=lambda p: -entry[p].item())[: count - 1]
        chosen.append({own, *best})
    return chosen
