"""Reference implementation: a truncated singular value decomposition in float64, and one product per key."""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.kernels.lowrank_keys.torch import Rotation


def factor_keys(keys: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Left singular vectors times singular values [B, n, r], and right singular vectors by head [B, H_kv, r, D]."""
    left, sizes, right = torch.linalg.svd(keys.double().transpose(1, 2).flatten(2), full_matrices=False)
    basis = right[:, :rank].unflatten(2, (keys.shape[1], -1)).transpose(1, 2)
    return left[:, :, :rank] * sizes[:, None, :rank], basis


def restore_keys(block: Tensor, at: Tensor, factors: Tensor, basis: Tensor, entries: Tensor, rope: Rotation) -> None:
    """See `torch.restore_keys`."""
    for b in range(entries.shape[0]):
        for h in range(entries.shape[1]):
            for place, entry in zip(at[b, h].tolist(), entries[b, h].tolist(), strict=True):
                key = factors[b, entry].double() @ basis[b, h].double()
                block[b, h, place] = rope.rotate(key[None, None, None], torch.tensor([[entry]]))[0, 0, 0]
