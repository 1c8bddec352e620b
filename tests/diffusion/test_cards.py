"""The choices of policies, token for token against their cards written out by hand (by_card.py)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvbench.hf import Model
from kvbench.hf.masked import Masking
from kvbench.methods.diffusion.dllm_cache import DllmCache
from kvbench.methods.diffusion.elastic_cache import ElasticCache
from kvbench.methods.diffusion.multi_block import MultiBlock
from kvbench.methods.diffusion.none import NoCache
from kvbench.methods.diffusion.sparse_dllm import DllmServe, SparseDllm
from kvbench.methods.diffusion.window_diffusion import WindowDiffusion

from .by_card import Writing, dllm_cache, elastic_cache, multi_block, sparse_dllm, window_diffusion
from .conftest import MASK, WORDS, make_module

CASES = {
    "dllm-prompt-first": (DllmCache, dllm_cache, {"prompt": 3, "answer": 5, "share": 0.5}, 8),
    "dllm-answer-first": (DllmCache, dllm_cache, {"prompt": 5, "answer": 3, "share": 0.25}, 16),
    "window-short-phases": (WindowDiffusion, window_diffusion, {"refresh": 4, "window": 6, "active": 3}, 16),
    "window-long-phase": (WindowDiffusion, window_diffusion, {"refresh": 16, "window": 8, "active": 2}, 16),
    "window-two-a-step": (WindowDiffusion, window_diffusion, {"refresh": 5, "window": 4, "active": 4}, 8),
    "elastic-heads": (ElasticCache, elastic_cache, {"window": 4, "gamma": 0.9, "tracked": 1, "axis": "heads"}, 16),
    "elastic-keys": (ElasticCache, elastic_cache, {"window": 6, "gamma": 0.7, "tracked": 1, "axis": "keys"}, 16),
    "elastic-two": (ElasticCache, elastic_cache, {"window": 4, "gamma": 0.99, "tracked": 2, "axis": "heads"}, 8),
}
SPARSE = {
    "pooled": (4, {"keep": 0.5, "pool": 3, "delay": 1, "by_head": False}),
    "at-once": (8, {"keep": 0.3, "pool": 1, "delay": 0, "by_head": False}),
    "by-head": (4, {"keep": 0.5, "pool": 3, "delay": 1, "by_head": True}),
}


@pytest.fixture(scope="module")
def deep():
    """Four layers, so that a reset may come early or late."""
    return make_module(layers=4)


@pytest.fixture(params=range(2))
def text(request):
    """A prompt of 20 tokens."""
    return torch.randint(WORDS, (20,), generator=torch.Generator().manual_seed(request.param))


@pytest.mark.few(3)
@pytest.mark.parametrize("shifted", [False, True], ids=["llada", "dream"])
@pytest.mark.parametrize(("method", "by_hand", "settings", "steps"), CASES.values(), ids=CASES)
def test_a_policy_writes_what_its_card_writes(deep, text, fill, shifted, method, by_hand, settings, steps):
    """Which rows are computed, kept and looked at decides the tokens, on both kinds of heads."""
    model = Model.from_module(deep, masking=Masking(MASK, shifted))
    found = fill(model, method(**settings), prompt=text[None], steps=steps).ids[0]
    with torch.no_grad():
        assert found == by_hand(Writing(deep, text, 16, shifted), steps, **settings)


@pytest.mark.few
@pytest.mark.parametrize(("block", "settings"), SPARSE.values(), ids=SPARSE)
def test_sparse_writes_what_its_card_writes(deep, text, fill, block, settings):
    """Which rows stay of those outside a block decides the tokens."""
    model = Model.from_module(deep, masking=Masking(MASK, shifted=False))
    found = fill(model, SparseDllm(**settings), prompt=text[None], block=block).ids[0]
    with torch.no_grad():
        assert found == sparse_dllm(Writing(deep, text, 16, shifted=False), block, **settings)


def test_dllm_serve_writes_what_its_card_writes(deep, text, fill):
    """Each KV head keeps the rows that its own queries ask for."""
    model = Model.from_module(deep, masking=Masking(MASK, shifted=False))
    found = fill(model, DllmServe(keep=0.3), prompt=text[None], block=4).ids[0]
    settings = {"keep": 0.3, "pool": 3, "delay": 1}
    with torch.no_grad():
        assert found == sparse_dllm(Writing(deep, text, 16, shifted=False), 4, **settings, by_head=True)
        assert found != sparse_dllm(Writing(deep, text, 16, shifted=False), 4, **settings, by_head=False)


@pytest.mark.few(2)
@pytest.mark.parametrize("shifted", [False, True], ids=["llada", "dream"])
@pytest.mark.parametrize(("blocks", "add"), [(1, 0.0), (2, 0.25), (3, 0.5), (4, 0.0)])
def test_multi_block_writes_what_its_card_writes(deep, text, fill, shifted, blocks, add):
    """Which blocks run, and when all rows are computed, decides the tokens."""
    model = Model.from_module(deep, masking=Masking(MASK, shifted))
    found = fill(model, MultiBlock(blocks=blocks, add=add), prompt=text[None], block=4).ids[0]
    with torch.no_grad():
        assert found == multi_block(Writing(deep, text, 16, shifted), 4, blocks=blocks, add=add)


def test_one_token_of_ten_is_a_tenth_of_a_block():
    """The threshold at which the next block starts is reached with it."""
    masked = torch.ones(1, 10, dtype=torch.bool)
    masked[0, 0] = False
    state = SimpleNamespace(prompt=0, sampling=SimpleNamespace(block=10), masked=masked)
    assert MultiBlock()._progress(state, 0) == MultiBlock().add == 0.1


@pytest.mark.slow
def test_these_cases_are_not_what_no_cache_writes(deep, fill):
    """Otherwise they could not tell which positions are chosen."""
    model = Model.from_module(deep, masking=Masking(MASK, shifted=False))
    text = torch.randint(WORDS, (1, 20), generator=torch.Generator().manual_seed(0))
    plain = {steps: fill(model, NoCache(), prompt=text, steps=steps).ids for steps in (8, 16)}
    for method, _, settings, steps in CASES.values():
        assert fill(model, method(**settings), prompt=text, steps=steps).ids != plain[steps]
