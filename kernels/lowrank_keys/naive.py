"""The oracle: the truncated singular value decomposition itself, in float64, and row by row products."""

from __future__ import annotations

import torch
from torch import Tensor


def factor_keys(keys: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Left factors [B, n, r], singular values in them, and the right singular vectors by head [B, H_kv, r, D]."""
    left, sizes, right = torch.linalg.svd(keys.double().transpose(1, 2).flatten(2), full_matrices=False)
    basis = right[:, :rank].unflatten(2, (keys.shape[1], -1)).transpose(1, 2)
    return left[:, :, :rank] * sizes[:, None, :rank], basis


def rebuild_keys(factors: Tensor, basis: Tensor, rows: Tensor) -> Tensor:
    """See `torch.rebuild_keys`. [B, H_kv, m, D] float64"""
    found = torch.zeros(*rows.shape, basis.shape[3], dtype=torch.float64)
    for b in range(rows.shape[0]):
        for h in range(rows.shape[1]):
            for i, row in enumerate(rows[b, h].tolist()):
                found[b, h, i] = factors[b, row].double() @ basis[b, h].double()
    return found
