"""Page scores as one matrix product: negative parts of queries times minima, positive parts times maxima."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def page_bounds(keys: Tensor, page: int) -> Tensor:
    """Minimum and maximum of each channel over the keys of each page, in the type of the keys. [B, H_kv, pages, 2 * D]

    keys: [B, H_kv, pages * page, D]. Nothing is rounded, so the bounds are exact in any precision.
    """
    paged = keys.unflatten(2, (-1, page))
    return torch.cat([paged.amin(3), paged.amax(3)], dim=-1)


def page_scores(query: Tensor, bounds: Tensor) -> Tensor:
    """The highest unscaled logit that a key within the bounds of each page can have. [B, H_q, T, pages] float32

    query: [B, H_q, T, D]. bounds: [B, H_kv, pages, 2 * D].
    """
    signed = torch.cat([query.clamp_max(0), query.clamp_min(0)], dim=-1)
    grouped = signed.unflatten(1, (bounds.shape[1], -1)).flatten(2, 3)  # [B, H_kv, G * T, 2 * D]
    if bounds.itemsize == 2:  # in 16 bits large scores tie, and float16's overflow to infinity, the own page's
        bounds, grouped = bounds.float(), grouped.float()
    # The larger factor comes first, because on a CPU its transpose would be copied.
    scores: Tensor = (bounds @ grouped.mT).float().mT.unflatten(2, (-1, query.shape[2])).flatten(1, 2)
    return scores


def select_pages(
    scores: Tensor, *, count: int, page: int, before: int | Tensor, window: int | None = None
) -> Tensor:
    """The page of each query's own entry and the best of the earlier ones. [B, H_q, T, k], k = min(count, pages + 1)

    If a query has fewer than k pages, the others have no entry that is visible to it.

    scores: [B, H_q, T, pages] of complete pages.
    before: entries before the first query's own; a tensor on the device if shapes must not change.
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
