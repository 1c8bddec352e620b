"""Column sums of one query that is expanded to all positions, in time linear in the number of entries.

The synthetic contexts of `kvbench bench` have such queries. The weights of query p are softmax(logits[: p + 1]) with
the same logits for every p, so that only the normalizers differ: a cumulative sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.kernels.blocks import float_products


def is_repeated(query: Tensor, window: int | None, positions: Tensor | None) -> bool:
    """True if all queries are one query in memory and see all earlier entries."""
    return query.shape[2] > 1 and query.stride(2) == 0 and window is None and positions is None


def repeated_sums(
    query: Tensor, keys: Tensor, *, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Sums of weights over all queries and the heads of the group. [B, H_kv, N] float32

    query: [B, H_q, T, D], expanded. keys: [B, H_kv, N, D].
    """
    logits, lse = _weigh(query, keys, scale, softcap, sinks)
    after = (-lse).flip(-1).logcumsumexp(-1).flip(-1)  # log of the sum over this query and the later ones
    before = logits.shape[-1] - after.shape[-1]
    seen_by = torch.cat([after[..., :1].expand(*after.shape[:-1], before), after], dim=-1)
    return (logits + seen_by).exp().sum(2).float()


def repeated_maxima(
    query: Tensor, keys: Tensor, *, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """The greatest weight of each entry: that of the first query that sees it. [B, H_kv, N] float32"""
    logits, lse = _weigh(query, keys, scale, softcap, sinks)
    before = logits.shape[-1] - lse.shape[-1]
    first = torch.cat([lse[..., :1].expand(*lse.shape[:-1], before), lse], dim=-1)
    return (logits - first).exp().amax(2).float()


def _weigh(
    query: Tensor, keys: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The logits [B, H_kv, G, N] and the log of each query's normalizer [B, H_kv, G, T], in float64.

    As logarithms, because an early query's normalizer may be too small for float32 next to the largest exponential.
    """
    kv_heads, n_query, n_key = keys.shape[1], query.shape[2], keys.shape[2]
    logits = float_products(query[:, :, 0].unflatten(1, (kv_heads, -1)), keys) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.double()
    lse = logits.logcumsumexp(-1)[..., n_key - n_query :]
    return logits, lse if sinks is None else torch.logaddexp(lse, sinks.double().view(1, kv_heads, -1, 1))
