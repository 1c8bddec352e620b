"""Blocks of a matrix that is too large for memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvbench.kernels.blocks import fit_block

ITEM = 32_768 * 32 * 4
"""Logits of one query over 32,768 tokens, in 32 heads of four sequences."""


@pytest.mark.parametrize(("elements", "is_cuda", "count"), [(0, False, 1 << 22), (ITEM, False, 1), (ITEM, True, 16)])
def test_blocks_are_larger_on_a_gpu(elements, is_cuda, count):
    """Small ones would cost a launch for every query; an empty item is no error."""
    assert fit_block(elements, SimpleNamespace(is_cuda=is_cuda)) == count
