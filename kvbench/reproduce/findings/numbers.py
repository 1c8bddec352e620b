"""Small statistics that several findings use."""

from __future__ import annotations

import torch
from torch import Tensor


def top_mask(scores: Tensor, share: float) -> Tensor:
    """True for the best share of the last dimension; of equal scores the first."""
    count = max(1, int(scores.shape[-1] * share))
    best = scores.argsort(dim=-1, descending=True, stable=True)[..., :count]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, value=True)


def jaccard(first: Tensor, other: Tensor) -> Tensor:
    """Size of the intersection over size of the union, over the last dimension."""
    return (first & other).sum(-1) / (first | other).sum(-1).clamp_min(1)


def ranks(values: Tensor) -> Tensor:
    """Ranks along the last dimension; equal values have the mean of their ranks."""
    ordered = values.sort(dim=-1).values.contiguous()
    low = torch.searchsorted(ordered, values.contiguous(), right=False)
    high = torch.searchsorted(ordered, values.contiguous(), right=True)
    return (low + high - 1).double() / 2


def pearson(first: Tensor, other: Tensor) -> Tensor:
    """Correlation along the last dimension; 0 where one side is constant."""
    a = first.double() - first.double().mean(-1, keepdim=True)
    b = other.double() - other.double().mean(-1, keepdim=True)
    found: Tensor = (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1)).clamp_min(1e-30)
    return found


def divergence(exact: Tensor, rough: Tensor) -> Tensor:
    """KL divergence by position, from log-probabilities. [T, V] -> [T]"""
    return (exact.exp() * (exact - rough)).sum(-1)


def fit_line(curve: Tensor) -> Tensor:
    """Squared correlation of the numbers along the last dimension with their places."""
    return pearson(torch.arange(float(curve.shape[-1])), curve).square()


def spearman(first: Tensor, other: Tensor) -> Tensor:
    """Rank correlation along the last dimension."""
    return pearson(ranks(first), ranks(other))
