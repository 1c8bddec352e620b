"""The right singular vectors are the eigenvectors of the Gram matrix, which is small however many rows there are."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

ROW_BLOCK = 4096


class Rotation(Protocol):
    """How a layer turns keys to their positions."""

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Turned rows. x: [B, H, T, D]; positions: [B, T]."""

    def terms(self, positions: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """What turned rows are in their leading W channels: x[c] * cos[c] + x[partner[c]] * sin[c].

        Cos and sin [B, T, W] float32, partners [W]; None where no channel turns.
        """


def factor_keys(keys: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The best approximation of this rank of each row's keys over all heads. [B, n, r] and [B, H_kv, r, D]

    The Gram matrix is summed in float64 from float32 products, and decomposed in float64.
    keys: [B, H_kv, n, D]. The scale of the keys is in the factors; the basis is orthonormal over all heads.
    """
    rows = keys.transpose(1, 2).flatten(2)  # [B, n, M]
    width = rows.shape[2]
    gram = torch.zeros(rows.shape[0], width, width, dtype=torch.float64, device=keys.device)
    for block in rows.split(ROW_BLOCK, dim=1):
        gram += (block.float().mT @ block.float()).double()
    vectors = torch.linalg.eigh(gram).eigenvectors[..., -rank:].flip(-1)  # [B, M, r], the largest first
    factors = [(block.float() @ vectors.float()).to(keys.dtype) for block in rows.split(ROW_BLOCK, dim=1)]
    basis = vectors.mT.unflatten(2, (keys.shape[1], -1)).transpose(1, 2).to(keys.dtype).contiguous()
    return torch.cat(factors, dim=1), basis


def restore_keys(block: Tensor, at: Tensor, factors: Tensor, basis: Tensor, rows: Tensor, rope: Rotation) -> None:
    """Write approximate keys, turned to their positions, into a block's rows.

    block: [B, H_kv, K, D], contiguous. at: [B, H_kv, m], rows of the block, distinct within a head.
    factors: [B, n, r], contiguous, of rows whose positions are 0, 1, ... basis: [B, H_kv, r, D]. rows: [B, H_kv, m].
    """
    batch, heads, _ = rows.shape
    first = torch.arange(batch, device=rows.device).view(-1, 1, 1) * factors.shape[1]
    asked = factors.flatten(0, 1).index_select(0, (first + rows).flatten())
    plain = (asked.view(*rows.shape, factors.shape[2]) @ basis).flatten(0, 1)  # [B * H_kv, m, D]
    keys = rope.rotate(plain[:, None], rows.flatten(0, 1))
    head = torch.arange(batch * heads, device=at.device).view(batch, heads, 1)
    block.flatten(0, 2).index_copy_(0, (head * block.shape[2] + at).flatten(), keys.flatten(0, 2))
