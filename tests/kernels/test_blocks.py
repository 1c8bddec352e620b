"""Blocks of a matrix that is too large for memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from kvbench.kernels import blocks
from kvbench.kernels.blocks import fit_block

ITEM = 32_768 * 32 * 4
"""Logits of one query over 32,768 tokens, in 32 heads of four sequences."""


@pytest.mark.parametrize(("elements", "is_cuda", "count"), [(0, False, 1 << 22), (ITEM, False, 1), (ITEM, True, 16)])
def test_blocks_are_larger_on_a_gpu(elements, is_cuda, count):
    """Small ones would cost a launch for every query; an empty item is no error."""
    assert fit_block(elements, SimpleNamespace(is_cuda=is_cuda)) == count


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("group", [(), (3,)], ids=["as many heads", "a group of heads"])
def test_products_of_16_bits_are_those_of_float32(dtype, group, monkeypatch):
    """Across blocks of keys, for heads that share them too, and without a float32 copy of all keys."""
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", 2 * 2 * 16 * 100)
    query, keys = (torch.randn(2, 2, *x, 16).to(dtype) + 20 for x in ((*group, 3), (*(1,) * len(group), 450)))
    found = blocks.float_products(query, keys)
    assert torch.allclose(found.double(), query.double() @ keys.double().mT, rtol=1e-6)
    with Floats() as watch:
        blocks.float_products(query, keys)
    assert watch.elements < keys.numel()


class Floats(TorchDispatchMode):
    """Remembers the elements of the largest float32 tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(x.numel() for x in tree_flatten(out)[0] if x.dtype == torch.float32)])
        return out


def test_products_of_float32_are_one_product(monkeypatch):
    """Bit for bit, whatever the blocks."""
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", 64)
    query, keys = torch.randn(2, 3, 5, 16), torch.randn(2, 3, 70, 16)
    assert blocks.float_products(query, keys).equal(query @ keys.mT)
