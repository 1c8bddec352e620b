"""Keys that are read to decide what is kept are read: bytes by hand."""

from __future__ import annotations

import pytest

from kvbench.methods.diffusion.elastic_cache import ElasticCache
from kvbench.methods.diffusion.sparse_dllm import SparseDllm


@pytest.mark.parametrize("tracked", [0, 1])
def test_elastic_pays_for_the_keys_that_it_watches_by(unshifted, prompts, fill, tracked):
    """Per layer: keys and values for attention, keys to choose what is tracked, and twice to see how it drifted."""
    found = fill(unshifted, ElasticCache(gamma=-1.0, tracked=tracked, window=4), prompt=prompts[:1])
    keys = 2 * 36 * 16 * 4  # 2 heads, 36 rows of 16, float32
    assert found.read_bytes == 2 * keys * (16 * 2 + tracked * (16 + 2 * 15))


def test_sparse_pays_for_the_keys_that_it_chooses_by(unshifted, prompts, fill):
    """Two full passes and two over half of the 32 rows outside and the block, for 4 blocks of 2 layers."""
    found = fill(unshifted, SparseDllm(), prompt=prompts[:1], block=4)
    row = 2 * 16 * 4  # 2 heads of 16, float32
    assert found.read_bytes == 2 * 4 * row * (2 * 2 * 36 + 2 * 2 * (16 + 4) + 32)
