"""Entries that are read to decide what is kept or computed are read: bytes by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.methods.diffusion.dllm_cache import DllmCache
from kvbench.methods.diffusion.elastic_cache import ElasticCache
from kvbench.methods.diffusion.sparse_dllm import SparseDllm
from kvbench.methods.diffusion.wedlm import WeDlm

from .test_policies import POLICIES

GUIDE = Path(__file__).parents[2] / "docs" / "diffusion.md"


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


@pytest.mark.parametrize(("share", "chosen"), [(0.25, 13), (0.0, 0)])
def test_dllm_cache_pays_for_the_values_that_it_chooses_by(unshifted, prompts, fill, share, chosen):
    """In the second layer, 13 of 16 passes compare the 16 cached values of the answer with the new ones.

    The other passes recompute the whole answer, as the first layer always does. With a share of 0 nothing is compared,
    and the second layer's attention runs in those passes alone.
    """
    found = fill(unshifted, DllmCache(share=share), prompt=prompts[:1])
    row = 2 * 16 * 4  # 2 heads of 16, float32
    attended = 16 + (16 if chosen else 3)
    assert found.read_bytes == row * (attended * 2 * 36 + chosen * 2 * 16)


def test_the_guide_names_the_policies_that_do_not_read_every_key(unshifted, prompts, fill):
    """Less than the sequence in every pass, but for a pass over the prompt alone."""
    fewer = set()
    for name, (method, how) in POLICIES.items():
        narrow = replace(method, window=4) if isinstance(method, WeDlm) else method  # less than the answer
        found = fill(unshifted, narrow, prompt=prompts[:1], answer=32, **how)
        every = 2 * 2 * 52 * 2 * 16 * 4  # layers, keys and values, rows, 2 heads of 16, float32
        if found.read_bytes < every * (found.nfe - 1):
            fewer.add(name)
    (said,) = re.findall(r"attention reads every key, except in (.+?)\.", GUIDE.read_text())
    assert set(re.findall(r"`(.+?)`", said)) == fewer
