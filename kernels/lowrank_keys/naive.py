"""The oracle: the truncated singular value decomposition itself, in float64, and row by row products."""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.kernels.lowrank_keys.torch import Rotation


def factor_keys(keys: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Left factors [B, n, r], singular values in them, and the right singular vectors by head [B, H_kv, r, D]."""
    left, sizes, right = torch.linalg.svd(keys.double().transpose(1, 2).flatten(2), full_matrices=False)
    basis = right[:, :rank].unflatten(2, (keys.shape[1], -1)).transpose(1, 2)
    return left[:, :, :rank] * sizes[:, None, :rank], basis


def restore_keys(block: Tensor, at: Tensor, factors: Tensor, basis: Tensor, rows: Tensor, rope: Rotation) -> None:
    """See `torch.restore_keys`."""
    for b in range(rows.shape[0]):
        for h in range(rows.shape[1]):
            for place, row in zip(at[b, h].tolist(), rows[b, h].tolist(), strict=True):
                key = factors[b, row].double() @ basis[b, h].double()
                block[b, h, place] = rope.rotate(key[None, None, None], torch.tensor([[row]]))[0, 0, 0]
