"""Factors' rows are gathered, multiplied, turned and written where they are wanted, with nothing in between."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.dense_attention.triton import padded
from kvbench.kernels.lowrank_keys.torch import Rotation, factor_keys

__all__ = ["factor_keys", "restore_keys"]

ROWS = 32
"""Rows of a program."""
RANKS = 32
"""Columns of the factors that a program multiplies at a time."""


def restore_keys(block: Tensor, at: Tensor, factors: Tensor, basis: Tensor, rows: Tensor, rope: Rotation) -> None:
    """Write approximate keys, turned to their positions; see `torch.restore_keys`.

    A turn adds to each channel's multiple one of its partner's: the partner's key is a second product, with other
    columns of the basis, so that no channel has to move.
    """
    batch, heads, count = rows.shape
    if not count:
        return
    turn = rope.terms(rows.flatten(0, 1))
    assert block.stride(3) == basis.stride(3) == factors.stride(2) == 1, "elements of a row lie side by side"
    write_keys[(triton.cdiv(count, ROWS) * batch * heads,)](
        block, at.contiguous(), factors, basis, rows.contiguous(), *(turn or (None, None, None)),
        triton.cdiv(count, ROWS), count, heads, *block.stride()[:3], *factors.stride()[:2], *basis.stride()[:3],
        rank=basis.shape[2], width=basis.shape[3], turned=0 if turn is None else turn[0].shape[2], block_n=ROWS,
        block_r=RANKS, block_d=padded(basis.shape[3]), num_warps=4,
    )


@triton.jit(do_not_specialize=["blocks", "count"])
def write_keys(
    block, at, factors, basis, rows, cos, sin, partner, blocks, count, heads, block_batch, block_head, block_row,
    factor_batch, factor_row, basis_batch, basis_head, basis_row, rank: tl.constexpr, width: tl.constexpr,
    turned: tl.constexpr, block_n: tl.constexpr, block_r: tl.constexpr, block_d: tl.constexpr,
):
    """Some rows of one head."""
    head = (tl.program_id(0) // blocks).to(tl.int64)
    i, d = tl.program_id(0) % blocks * block_n + tl.arange(0, block_n), tl.arange(0, block_d)
    inside, real = i < count, d < width
    row = tl.load(rows + head * count + i, mask=inside, other=0).to(tl.int64)
    left = factors + head // heads * factor_batch + row[:, None] * factor_row
    right = basis + head // heads * basis_batch + head % heads * basis_head
    if turned > 0:
        turns = d < turned
        other = tl.load(partner + d, mask=turns, other=0)
    keys, others = tl.zeros([block_n, block_d], tl.float32), tl.zeros([block_n, block_d], tl.float32)
    for r in range(0, rank, block_r):
        c = r + tl.arange(0, block_r)
        x = tl.load(left + c[None, :], mask=inside[:, None] & (c < rank)[None, :], other=0.0)
        part = right + c[:, None] * basis_row
        y = tl.load(part + d[None, :], mask=(c < rank)[:, None] & real[None, :], other=0.0)
        keys = tl.dot(x, y, keys, input_precision="ieee")
        if turned > 0:
            y = tl.load(part + other[None, :], mask=(c < rank)[:, None] & turns[None, :], other=0.0)
            others = tl.dot(x, y, others, input_precision="ieee")
    if turned > 0:
        angle = (head * count + i)[:, None] * turned + d[None, :]
        held = inside[:, None] & turns[None, :]
        keys = keys * tl.load(cos + angle, mask=held, other=1.0) + others * tl.load(sin + angle, mask=held, other=0.0)
    where = tl.load(at + head * count + i, mask=inside, other=0).to(tl.int64)
    out = block + head // heads * block_batch + head % heads * block_head + where[:, None] * block_row + d[None, :]
    tl.store(out, keys, mask=inside[:, None] & real[None, :])
