"""Keys with a large mean in one channel, as Qwen2.5's first layer has: 16 bits would round their logits to units."""

from __future__ import annotations

import pytest
import torch

from kvbench.hf.rope import NO_ROPE
from kvbench.kernels.attention_mass import attention_mass
from kvbench.kernels.block_attention import block_attention
from kvbench.kernels.column_sums import column_maxima, column_sums
from kvbench.kernels.dense_attention import dense_attention
from kvbench.kernels.page_select import page_bounds, page_scores, select_pages
from kvbench.kernels.ragged_attention import dense_partial
from kvbench.kernels.scattered_attention import scattered_attention
from kvbench.kernels.window_scores import window_scores
from kvbench.methods.eviction.retaining import find_targets
from kvbench.methods.prefill.patterns import last_attention
from kvbench.methods.retrieval.shadowkv import select_chunks
from kvbench.step import Moment, Step
from kvbench.techniques.reuse import attention_rows

TOKENS, WIDTH = 96, 32
SCALE = WIDTH**-0.5
SINKS = torch.full((4,), -3.0)
PLACES = torch.cat([torch.arange(40), torch.arange(60, TOKENS)])
BLOCKS = torch.ones(1, 4, 3, 3, dtype=torch.bool)


def make_step(query, key):
    """A step of these tensors."""
    return Step(
        layer=0, moment=Moment.CONTEXT_END, positions=torch.arange(TOKENS)[None], seen=TOKENS, query=query, key=key,
        value=key, scale=SCALE, window=None, softcap=None, sinks=None, causal=True, rope=NO_ROPE,
    )


SCORES = {
    "attention_mass": lambda q, k: attention_mass(q, k, torch.arange(TOKENS), scale=SCALE),
    "attention_mass of a given normalizer": lambda q, k: attention_mass(
        q[:, :, -1:], k, torch.tensor([TOKENS - 1]), scale=SCALE,
        lse=dense_partial(q[:, :, -1:], k, k, positions=None, scale=SCALE, seen=TOKENS).lse,
    ),
    "window_scores": lambda q, k: window_scores(q[:, :, -8:], k, scale=SCALE, seen=TOKENS),
    "column_sums": lambda q, k: column_sums(q, k, scale=SCALE, seen=TOKENS),
    "column_maxima": lambda q, k: column_maxima(q, k, scale=SCALE, seen=TOKENS),
    "column_sums of one query": lambda q, k: column_sums(
        q[:, :, :1].expand(-1, -1, TOKENS, -1), k, scale=SCALE, seen=TOKENS
    ),
    "page_scores": lambda q, k: page_scores(q, page_bounds(k, 4)).softmax(-1),
    "attention_rows": lambda q, k: attention_rows(make_step(q, k), k, None, slice(-8, None)),
    "last_attention": lambda q, k: last_attention(q[0, 0], k[0, 0], 8, SCALE),
    "find_targets": lambda q, k: find_targets(make_step(q, k), 60).softmax(0),
    "select_chunks": lambda q, k: select_chunks(q[:, :, -1:], k, SCALE, 8).float(),
}
OUTPUTS = {
    "block_attention": lambda q, k, v: block_attention(q, k, v, BLOCKS, block=32, scale=SCALE),
    "dense_attention": lambda q, k, v: dense_attention(q, k, v, scale=SCALE, seen=TOKENS, sinks=SINKS),
    "dense_attention, one query": lambda q, k, v: dense_attention(
        q[:, :, -1:], k, v, scale=SCALE, seen=TOKENS, sinks=SINKS
    ),
    "scattered_attention": lambda q, k, v: scattered_attention(q[:, :, PLACES], k, v, PLACES, scale=SCALE, sinks=SINKS),
}


@pytest.fixture
def entries():
    """Query, keys and values in bfloat16, logits of about 700."""
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(1, h, TOKENS, WIDTH, generator=generator) for h in (4, 2, 2))
    query[..., 0], keys[..., 0] = 12.0, 354.0
    return query.bfloat16(), keys.bfloat16(), values.bfloat16()


@pytest.mark.parametrize("name", SCORES)
def test_scores_are_those_of_the_same_entries_in_float32(name, entries):
    """Entries are exact in both types, and so are their products."""
    query, keys, _ = entries
    found, wanted = SCORES[name](query, keys), SCORES[name](query.float(), keys.float())
    assert torch.allclose(found, wanted, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_are_those_of_the_same_entries_in_float32(name, entries, error):
    """But for the rounding of weights and output."""
    found, wanted = OUTPUTS[name](*entries), OUTPUTS[name](*(x.float() for x in entries))
    assert error(found, wanted) < 0.01


def test_the_own_page_is_read_where_scores_exceed_float16():
    """Products beyond 65,504 would be infinite, as the own page is marked."""
    query, keys = torch.full((1, 1, 1, 64), 40.0).half(), torch.full((1, 1, 60, 64), 40.0).half()
    pages = select_pages(page_scores(query, page_bounds(keys, 4)), count=4, page=4, before=60)
    assert 15 in pages
