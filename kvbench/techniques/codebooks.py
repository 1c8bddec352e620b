"""Codebooks of single numbers: the levels with the least mean squared error for a distribution (Lloyd and Max)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

GRID = 8192
"""Points at which a density is evaluated."""
CELLS = 512
"""Cells in which numbers are counted."""
FARTHEST = 8.0
"""A normal number beyond this has no weight in a codebook."""
MOST_ITERATIONS = 10_000
CONVERGED = 1e-9
"""Largest move of a level, as a share of the range, at which the iteration ends."""


def fit_levels(points: Tensor, weights: Tensor, count: int) -> Tensor:
    """The levels of weighted numbers, from evenly spaced quantiles. points: ascending [n]; weights: [n]. [count]

    Weights are spread evenly between the points, so that levels move continuously. Computed on the host: thousands of
    iterations over a few numbers would be launches and synchronizations on a GPU.
    """
    device = points.device
    points, weights = points.double().cpu(), weights.double().cpu()
    edges = torch.cat([points[:1], midpoints(points), points[-1:]])
    mass, moment = (torch.cat([x.new_zeros(1), x.cumsum(0)]) for x in (weights, weights * points))
    quantiles = (torch.arange(count, dtype=torch.float64) + 0.5) / count * mass[-1]
    levels = _interpolate(quantiles, mass, edges)
    tiny = torch.finfo(torch.float64).tiny
    for _ in range(MOST_ITERATIONS):
        ends = torch.cat([edges[:1], midpoints(levels), edges[-1:]])
        held = _interpolate(ends, edges, mass).diff()
        means = torch.where(held > 0, _interpolate(ends, edges, moment).diff() / held.clamp_min(tiny), levels)
        moved = (means - levels).abs().max()
        levels = means
        if moved <= CONVERGED * (edges[-1] - edges[0]):
            break
    return levels.to(device)


def count_on_grid(x: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers as weighted points, each shared by its two neighbors, so that weights move continuously with numbers.

    x: [n], between -1 and 1. Points and weights: [CELLS + 1]
    """
    place = ((x.double() + 1) * (CELLS / 2)).clamp(0, CELLS)
    left = place.long().clamp_max(CELLS - 1)
    weights = torch.zeros(CELLS + 1, dtype=torch.float64, device=x.device)
    weights.index_add_(0, left + 1, place - left)
    weights.index_add_(0, left, left + 1 - place)
    return torch.linspace(-1, 1, CELLS + 1, dtype=torch.float64, device=x.device), weights


def _interpolate(x: Tensor, at: Tensor, values: Tensor) -> Tensor:
    """A function given at ascending points, linear in between."""
    right = torch.searchsorted(at, x).clamp(1, len(at) - 1)
    width = at[right] - at[right - 1]
    share = torch.where(width > 0, (x - at[right - 1]) / width.masked_fill(width <= 0, 1.0), torch.zeros_like(x))
    found: Tensor = values[right - 1] + share * (values[right] - values[right - 1])
    return found


def midpoints(levels: Tensor) -> Tensor:
    """The boundaries between neighboring levels. [..., count] -> [..., count - 1]"""
    return (levels[..., 1:] + levels[..., :-1]) / 2


def nearest_level(x: Tensor, levels: Tensor) -> Tensor:
    """The number of the level nearest to each element. levels: ascending [count]. As `x`, uint8"""
    return torch.bucketize(x.contiguous(), midpoints(levels)).to(torch.uint8)


@functools.lru_cache(maxsize=64)
def sphere_levels(width: int, bits: int, device: torch.device) -> Tensor:
    """Levels of a coordinate of a random vector of length sqrt(width); normal numbers for wide vectors. [2 ** bits]"""
    return _sphere_levels(width, bits).to(device)


@functools.lru_cache(maxsize=64)
def _sphere_levels(width: int, bits: int) -> Tensor:
    reach = min(math.sqrt(width), FARTHEST)
    return _levels(lambda x: (1 - x**2 / width) ** ((width - 3) / 2), -reach, reach, bits)


@functools.lru_cache(maxsize=64)
def angle_levels(level: int, bits: int, device: torch.device) -> Tensor:
    """Levels of the angle between the norms of two halves of 2 ** (level - 1) normal numbers each. [2 ** bits]

    level: 1, an angle of two numbers in [0, 2 pi); above, in [0, pi / 2].
    """
    if level == 1:
        sectors: Tensor = (torch.arange(2**bits) + 0.5) * (2 * math.pi / 2**bits)
        return sectors.to(device)
    return _angle_levels(level, bits).to(device)


@functools.lru_cache(maxsize=64)
def _angle_levels(level: int, bits: int) -> Tensor:
    return _levels(lambda x: torch.sin(2 * x) ** (2 ** (level - 1) - 1), 0.0, math.pi / 2, bits)


def _levels(density: Callable[[Tensor], Tensor], low: float, high: float, bits: int) -> Tensor:
    edges = torch.linspace(low, high, GRID + 1, dtype=torch.float64)
    points = (edges[1:] + edges[:-1]) / 2
    return fit_levels(points, density(points), 2**bits).float()
