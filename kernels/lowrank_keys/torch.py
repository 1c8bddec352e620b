"""The right singular vectors are the eigenvectors of the Gram matrix, which is small however many rows there are."""

from __future__ import annotations

import torch
from torch import Tensor

ROW_BLOCK = 4096


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


def rebuild_keys(factors: Tensor, basis: Tensor, rows: Tensor) -> Tensor:
    """Approximate keys of the rows that each head asks for, before rotation. [B, H_kv, m, D]

    factors: [B, n, r], contiguous. basis: [B, H_kv, r, D]. rows: [B, H_kv, m]
    """
    first = torch.arange(factors.shape[0], device=rows.device).view(-1, 1, 1) * factors.shape[1]
    asked = factors.flatten(0, 1).index_select(0, (first + rows).flatten())
    keys: Tensor = asked.view(*rows.shape, factors.shape[2]) @ basis
    return keys
