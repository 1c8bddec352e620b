"""Low-rank keys from the eigenvectors of the Gram matrix, whose size does not depend on the number of entries."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

ENTRY_BLOCK = 4096


class Rotation(Protocol):
    """The rotary embedding of a layer."""

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate vectors to their positions. x: [B, H, T, D]. positions: [B, T]."""

    def terms(self, positions: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Coefficients of the rotation of the leading W channels: x[c] * cos[c] + x[partner[c]] * sin[c].

        Cos and sin [B, T, W] float32, partners [W]; None if no channel is rotated.
        """


def factor_keys(keys: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The best approximation of rank r of the keys over all heads: factors [B, n, r] and basis [B, H_kv, r, D].

    The factors carry the scale of the keys; the basis is orthonormal over all heads. The Gram matrix is summed in
    float64 from float32 products, and decomposed in float64.

    keys: [B, H_kv, n, D].
    """
    entries = keys.transpose(1, 2).flatten(2)  # [B, n, M]
    width = entries.shape[2]
    gram = torch.zeros(entries.shape[0], width, width, dtype=torch.float64, device=keys.device)
    for block in entries.split(ENTRY_BLOCK, dim=1):
        gram += (block.float().mT @ block.float()).double()
    vectors = torch.linalg.eigh(gram).eigenvectors[..., -rank:].flip(-1)  # [B, M, r], the largest first
    factors = [(block.float() @ vectors.float()).to(keys.dtype) for block in entries.split(ENTRY_BLOCK, dim=1)]
    basis = vectors.mT.unflatten(2, (keys.shape[1], -1)).transpose(1, 2).to(keys.dtype).contiguous()
    return torch.cat(factors, dim=1), basis


def restore_keys(block: Tensor, at: Tensor, factors: Tensor, basis: Tensor, entries: Tensor, rope: Rotation) -> None:
    """Rebuild keys from their factors, rotate them to their positions and write them into a block.

    block: [B, H_kv, K, D], contiguous. at: [B, H_kv, m], target entries of the block, distinct within a head.
    factors: [B, n, r], contiguous, of the tokens at positions 0, 1, ... basis: [B, H_kv, r, D].
    entries: [B, H_kv, m], the tokens to rebuild.
    """
    batch, heads, _ = entries.shape
    first = torch.arange(batch, device=entries.device).view(-1, 1, 1) * factors.shape[1]
    asked = factors.flatten(0, 1).index_select(0, (first + entries).flatten())
    plain = (asked.view(*entries.shape, factors.shape[2]) @ basis).flatten(0, 1)  # [B * H_kv, m, D]
    keys = rope.rotate(plain[:, None], entries.flatten(0, 1))
    head = torch.arange(batch * heads, device=at.device).view(batch, heads, 1)
    block.flatten(0, 2).index_copy_(0, (head * block.shape[2] + at).flatten(), keys.flatten(0, 2))
