"""Factors against the singular value decomposition itself, and rebuilt entries against entry by entry products."""

from __future__ import annotations

import pytest
import torch

from kvbench.kernels.lowrank_keys import factor_keys, naive, restore_keys
from kvbench.kernels.lowrank_keys import torch as plain


def random_keys(heads=2, count=50, width=6, batch=2, seed=0):
    """Keys whose singular values fall off. [B, H_kv, n, D]"""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(batch, count, heads * width, generator=generator) * 0.8 ** torch.arange(heads * width)
    mixed = rows @ torch.linalg.qr(torch.randn(heads * width, heads * width, generator=generator)).Q
    return mixed.unflatten(2, (heads, width)).transpose(1, 2).contiguous()


def whole(factors, basis):
    """Every entry's keys. [B, H_kv, n, D]"""
    return factors[:, None].double() @ basis.double()


@pytest.mark.parametrize("rank", [1, 3, 7, 12])
@pytest.mark.parametrize("count", [1, 5, 12, 50])
def test_is_the_truncated_decomposition(rank, count, monkeypatch):
    """The Gram matrix gives the best approximation of its rank over all heads together, to 1e-5."""
    monkeypatch.setattr(plain, "ENTRY_BLOCK", 8)
    keys = random_keys(count=count)
    found, wanted = whole(*factor_keys(keys, rank)), whole(*naive.factor_keys(keys, rank))
    assert (found - wanted).abs().max() < 1e-5 * keys.abs().max()


@pytest.mark.parametrize("rank", [1, 4, 9])
def test_the_error_is_the_singular_values_left_out(rank):
    """Eckart and Young: the squared error is the sum of the squares of the discarded singular values."""
    keys = random_keys()
    lost = (whole(*factor_keys(keys, rank)) - keys).square().sum((1, 2, 3))
    sizes = torch.linalg.svdvals(keys.double().transpose(1, 2).flatten(2))
    assert torch.allclose(lost, sizes[:, rank:].square().sum(-1), rtol=1e-4)


def test_full_rank_loses_nothing():
    """At the width of the keys the product is the keys."""
    keys = random_keys()
    assert (whole(*factor_keys(keys, 12)) - keys).abs().max() < 1e-5


def test_heads_share_the_factors():
    """Keys that only differ by a factor from head to head have rank 1 together."""
    one = torch.randn(1, 1, 20, 1) * torch.randn(6)
    keys = torch.cat([one, -3 * one], dim=1)
    factors, basis = factor_keys(keys, 1)
    assert factors.shape == (1, 20, 1)
    assert basis.shape == (1, 2, 1, 6)
    assert (whole(factors, basis) - keys).abs().max() < 1e-5


class Turning:
    """A rotation of the leading channels, in neighboring or in distant pairs, by an angle that grows with both."""

    def __init__(self, width=0, *, interleaved=False):
        self.width = width
        self.partner = torch.arange(width) ^ 1 if interleaved else (torch.arange(width) + width // 2) % max(1, width)
        self.sign = torch.where(self.partner > torch.arange(width), -1.0, 1.0)

    def terms(self, positions):
        """Cos, sin and partners, on the positions' device."""
        pair = torch.minimum(torch.arange(self.width), self.partner)
        angle = positions[..., None].cpu() * (0.3 + 0.7 ** pair)
        found = angle.cos(), angle.sin() * self.sign, self.partner
        return tuple(x.to(positions.device) for x in found) if self.width else None

    def rotate(self, x, positions):
        """The same, applied. x: [B, H, T, D]"""
        turned = x.clone()
        if self.width:
            cos, sin, partner = self.terms(positions)
            lead = x[..., : self.width]
            turned[..., : self.width] = (lead * cos[:, None] + lead[..., partner] * sin[:, None]).to(x.dtype)
        return turned


ROTATIONS = {
    "whole": Turning(6), "interleaved": Turning(6, interleaved=True), "partial": Turning(4), "none": Turning(),
}


def restored(restore, count, dtype, rope, move=lambda x: x, rank=5):
    """A block of 40 entries of 9, of which `count` are written by head, in another order than requested."""
    factors, basis = (x.to(dtype).contiguous() for x in naive.factor_keys(random_keys(), rank))
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(50, (2, 2, count), generator=generator)
    at = torch.stack([torch.randperm(40, generator=generator)[:count] for _ in range(4)]).view(2, 2, -1)
    block = move(torch.full((2, 2, 40, 6), 9.0, dtype=dtype))
    restore(block, *move([at, factors, basis, rows]), rope)
    return block


@pytest.mark.parametrize("rope", ROTATIONS.values(), ids=ROTATIONS)
@pytest.mark.parametrize("count", [0, 1, 17])
def test_restored_entries_equal_the_reference(count, rope, error):
    """Each head's own choice of entries, repeated ones included, is turned and written; other entries stay."""
    found, wanted = (restored(restore, count, torch.float32, rope) for restore in (restore_keys, naive.restore_keys))
    assert error(found, wanted) < 1e-5


@pytest.mark.parametrize("rope", ROTATIONS.values(), ids=ROTATIONS)
def test_triton_equals_the_reference(rope, precision, triton, error, allowed):
    """About a block of 32 entries and 32 ranks, in every precision and kind of rotation; other entries stay."""
    for count, rank in ((1, 5), (33, 12)) if precision is torch.float32 else ((31, 12),):
        found = restored(restore_keys, count, precision, rope, triton, rank)
        wanted = restored(naive.restore_keys, count, precision, rope, rank=rank)
        assert error(found, wanted.double()) < allowed[precision]


@pytest.mark.gpu
def test_triton_at_full_size(precision, triton, error, allowed):
    """Rank 160, heads of 128 channels, and thousands of entries."""
    generator = torch.Generator().manual_seed(0)
    factors = torch.randn(1, 20_000, 160, generator=generator).to(precision)
    basis = torch.randn(1, 8, 160, 128, generator=generator).to(precision)
    rows, at = torch.randint(20_000, (1, 8, 1500), generator=generator), torch.arange(1500).expand(1, 8, -1)
    block = triton(torch.empty(1, 8, 2048, 128, dtype=precision))
    rope = Turning(128)
    restore_keys(block, *triton([at, factors, basis, rows]), rope)
    wanted = torch.stack([factors[0, rows[0, h]].double() @ basis[0, h].double() for h in range(8)])
    wanted = rope.rotate(wanted[:, None], rows[0])[:, 0]
    assert error(block[0, :, :1500], wanted) < allowed[precision]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype, error, allowed):
    """In 16 bits factors and basis cost a few roundings."""
    keys = random_keys().to(dtype)
    factors, basis = factor_keys(keys, 12)
    assert factors.dtype == basis.dtype == dtype
    rows = torch.arange(50).expand(2, 2, -1)
    block = torch.empty_like(keys)
    restore_keys(block, rows, factors, basis, rows, Turning())
    assert error(block, keys.double()) < allowed[dtype]
