"""Random rotations and projections of vectors, the same in every process; all layers and conversations share them."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor


@functools.lru_cache(maxsize=64)
def random_rotation(width: int, seed: int, device: torch.device) -> Tensor:
    """A uniformly random orthogonal matrix. [width, width] float32"""
    q, r = torch.linalg.qr(_gaussian(width, width, seed))
    found: Tensor = q * r.diagonal().sign()  # without the signs the distribution is not uniform
    return found.float().to(device)


@functools.lru_cache(maxsize=64)
def gaussian_projection(width: int, seed: int, device: torch.device) -> Tensor:
    """Independent standard normal numbers. [width, width] float32"""
    return _gaussian(width, width, seed).float().to(device)


@functools.lru_cache(maxsize=64)
def orthogonal_projection(width: int, rows: int, seed: int, device: torch.device) -> Tensor:
    """Rows of length sqrt(width), orthogonal within each block of `width` rows. [rows, width] float32"""
    blocks = [random_rotation(width, seed + i, device) for i in range(math.ceil(rows / width))]
    return torch.cat(blocks)[:rows] * math.sqrt(width)


def hadamard(x: Tensor) -> Tensor:
    """Rotate by the Hadamard matrix of the largest power of two that divides the width, block by block. [..., D]

    The rotation is symmetric, so it is its own inverse.
    """
    size = x.shape[-1] & -x.shape[-1]
    blocks: Tensor = x.unflatten(-1, (-1, size))
    return (blocks @ _hadamard_matrix(size, x.device)).flatten(-2)


@functools.lru_cache(maxsize=64)
def _hadamard_matrix(size: int, device: torch.device) -> Tensor:
    """Sylvester's matrix for a power of two, of length-1 rows: one product is faster than log2(size) steps of sums."""
    found = torch.ones(1, 1)
    while len(found) < size:
        found = torch.cat([torch.cat([found, found], dim=1), torch.cat([found, -found], dim=1)])
    return (found / math.sqrt(size)).to(device)


def mean_component(width: int) -> float:
    """The mean absolute component of a random vector of length sqrt(width); sqrt(2 / pi) for wide vectors."""
    return math.sqrt(width / math.pi) * math.exp(math.lgamma(width / 2) - math.lgamma((width + 1) / 2))


def _gaussian(rows: int, width: int, seed: int) -> Tensor:
    return torch.randn(rows, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
