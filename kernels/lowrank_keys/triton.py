"""Rebuilds low-rank keys in one kernel: gathers factors, multiplies, rotates and writes, without intermediates."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.dense_attention.triton import padded
from kvbench.kernels.lowrank_keys.torch import Rotation, factor_keys

__all__ = ["factor_keys", "restore_keys"]

ENTRIES = 32
"""Keys that a program rebuilds."""
RANKS = 32
"""Columns of the factors that a program multiplies at a time."""


def restore_keys(block: Tensor, at: Tensor, factors: Tensor, basis: Tensor, entries: Tensor, rope: Rotation) -> None:
    """Write rebuilt keys, rotated to their positions; see `torch.restore_keys`.

    The rotation combines each channel with its partner. The partner's value is computed as a second product with
    permuted columns of the basis, so that no data is exchanged between channels.
    """
    batch, heads, count = entries.shape
    if not count:
        return
    turn = rope.terms(entries.flatten(0, 1))
    assert block.stride(3) == basis.stride(3) == factors.stride(2) == 1, "the last dimension must be contiguous"
    write_keys[(triton.cdiv(count, ENTRIES) * batch * heads,)](
        block, at.contiguous(), factors, basis, entries.contiguous(), *(turn or (None, None, None)),
        triton.cdiv(count, ENTRIES), count, heads, *block.stride()[:3], *factors.stride()[:2], *basis.stride()[:3],
        rank=basis.shape[2], width=basis.shape[3], turned=0 if turn is None else turn[0].shape[2], block_n=ENTRIES,
        block_r=RANKS, block_d=padded(basis.shape[3]), num_warps=4,
    )


@triton.jit(do_not_specialize=["blocks", "count"])
def write_keys(
    block, at, factors, basis, entries, cos, sin, partner, blocks, count, heads, block_batch, block_head, block_entry,
    factor_batch, factor_entry, basis_batch, basis_head, basis_entry, rank: tl.constexpr, width: tl.constexpr,
    turned: tl.constexpr, block_n: tl.constexpr, block_r: tl.constexpr, block_d: tl.constexpr,
):
    """Rebuild some keys of one head."""
    head = (tl.program_id(0) // blocks).to(tl.int64)
    i, d = tl.program_id(0) % blocks * block_n + tl.arange(0, block_n), tl.arange(0, block_d)
    inside, real = i < count, d < width
    entry = tl.load(entries + head * count + i, mask=inside, other=0).to(tl.int64)
    left = factors + head // heads * factor_batch + entry[:, None] * factor_entry
    right = basis + head // heads * basis_batch + head % heads * basis_head
    if turned > 0:
        turns = d < turned
        other = tl.load(partner + d, mask=turns, other=0)
    keys, others = tl.zeros([block_n, block_d], tl.float32), tl.zeros([block_n, block_d], tl.float32)
    for r in range(0, rank, block_r):
        c = r + tl.arange(0, block_r)
        x = tl.load(left + c[None, :], mask=inside[:, None] & (c < rank)[None, :], other=0.0)
        part = right + c[:, None] * basis_entry
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
    out = block + head // heads * block_batch + head % heads * block_head + where[:, None] * block_entry + d[None, :]
    tl.store(out, keys, mask=inside[:, None] & real[None, :])
