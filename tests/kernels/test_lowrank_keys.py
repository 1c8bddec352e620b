"""Factors against the singular value decomposition itself, and rebuilt rows against row by row products."""

from __future__ import annotations

import pytest
import torch

from kvbench.kernels.lowrank_keys import factor_keys, naive, rebuild_keys
from kvbench.kernels.lowrank_keys import torch as plain


def random_keys(heads=2, count=50, width=6, batch=2, seed=0):
    """Keys whose singular values fall off. [B, H_kv, n, D]"""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(batch, count, heads * width, generator=generator) * 0.8 ** torch.arange(heads * width)
    mixed = rows @ torch.linalg.qr(torch.randn(heads * width, heads * width, generator=generator)).Q
    return mixed.unflatten(2, (heads, width)).transpose(1, 2).contiguous()


def whole(factors, basis):
    """Every row's keys. [B, H_kv, n, D]"""
    return factors[:, None].double() @ basis.double()


@pytest.mark.parametrize("rank", [1, 3, 7, 12])
@pytest.mark.parametrize("count", [1, 5, 12, 50])
def test_is_the_truncated_decomposition(rank, count, monkeypatch):
    """What the Gram matrix gives is the best approximation of its rank over all heads together, to 1e-5."""
    monkeypatch.setattr(plain, "ROW_BLOCK", 8)
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


@pytest.mark.parametrize("count", [0, 1, 17])
def test_rebuilt_rows_equal_the_oracle(count, error):
    """Each head's own choice of rows, repeated ones included, comes back as its product; none is no row."""
    factors, basis = factor_keys(random_keys(), 5)
    rows = torch.randint(50, (2, 2, count), generator=torch.Generator().manual_seed(1))
    found, wanted = rebuild_keys(factors, basis, rows), naive.rebuild_keys(factors, basis, rows)
    assert found.shape == (2, 2, count, 6)
    assert not count or error(found, wanted) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype, error, allowed):
    """In 16 bits factors and basis cost a few roundings."""
    keys = random_keys().to(dtype)
    factors, basis = factor_keys(keys, 12)
    assert factors.dtype == basis.dtype == dtype
    rows = torch.arange(50).expand(2, 2, -1)
    assert error(rebuild_keys(factors, basis, rows), keys.double()) < allowed[dtype]
