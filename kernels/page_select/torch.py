"""One matrix product of queries and bounds: their negative parts meet the minima, their positive parts the maxima."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def page_bounds(keys: Tensor, page: int) -> Tensor:
    """Minimum and maximum of each channel over the keys of each page. [B, H_kv, pages, 2 * D], of the keys' own type

    keys: [B, H_kv, pages * page, D]. Nothing is rounded, so the bounds hold in any precision.
    """
    paged = keys.unflatten(2, (-1, page))
    return torch.cat([paged.amin(3), paged.amax(3)], dim=-1)


def page_scores(query: Tensor, bounds: Tensor) -> Tensor:
    """The highest logit that a key within each page's bounds could have, unscaled. [B, H_q, T, pages] float32

    query: [B, H_q, T, D]. bounds: [B, H_kv, pages, 2 * D].
    """
    signed = torch.cat([query.clamp_max(0), query.clamp_min(0)], dim=-1)
    grouped = signed.unflatten(1, (bounds.shape[1], -1)).flatten(2, 3)  # [B, H_kv, G * T, 2 * D]
    # The larger factor first: on a CPU its transpose would be copied.
    scores: Tensor = (bounds @ grouped.mT).float().mT.unflatten(2, (-1, query.shape[2])).flatten(1, 2)
    return scores


def select_pages(
    scores: Tensor, *, count: int, page: int, before: int | Tensor, window: int | None = None
) -> Tensor:
    """Each query's own page, the one that is still written to, and the best of those before it. [B, H_q, T, k]

    Where a query has fewer pages than `count`, the others chosen hold no row that it sees. k = min(count, pages + 1).
    scores: [B, H_q, T, pages], of the pages that are complete. before: rows before the first query's own; on the
    device where shapes must not change.
    """
    n_query, pages = scores.shape[2], scores.shape[3]
    at = before + torch.arange(n_query, device=scores.device)[:, None]  # [T, 1]
    own = at // page
    index = torch.arange(pages + 1, device=scores.device)
    unseen = index > own
    if window is not None:
        unseen = unseen | ((index + 1) * page <= at - window + 1)
    ranked = F.pad(scores, (0, 1), value=-torch.inf).masked_fill(unseen, -torch.inf)
    ranked = ranked.masked_fill(index == own, torch.inf)
    return ranked.topk(min(count, pages + 1), dim=-1).indices
