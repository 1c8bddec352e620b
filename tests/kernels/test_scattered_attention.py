"""Attention of tokens at any places of a prompt."""

from __future__ import annotations

import pytest
import torch

from kvbench.kernels.dense_attention.naive import dense_attention
from kvbench.kernels.scattered_attention import naive, scattered_attention

SHAPES = {"neighbors": [5, 6, 7, 8], "scattered": [0, 3, 4, 11, 19], "one": [7], "all": list(range(20))}


def draw(count, *, softcap=None, sinks=False):
    """Queries, keys, values and options for 20 entries of two KV heads in groups of two."""
    torch.manual_seed(count)
    query, keys, values = torch.randn(1, 4, count, 8), torch.randn(1, 2, 20, 8), torch.randn(1, 2, 20, 8)
    return query, keys, values, {"scale": 0.4, "softcap": softcap, "sinks": torch.randn(4) if sinks else None}


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("places", SHAPES.values(), ids=SHAPES)
def test_equals_the_reference(places, sinks, softcap):
    """With soft caps and sinks, for neighbors and for places apart."""
    query, keys, values, options = draw(len(places), softcap=softcap, sinks=sinks)
    at = torch.tensor(places)
    found = scattered_attention(query, keys, values, at, **options)
    assert torch.allclose(found, naive.scattered_attention(query, keys, values, at, **options), atol=1e-5)


def test_rows_are_those_of_the_causal_matrix():
    """Not of a mask that is aligned to the last entry: a token sees nothing after it."""
    query, keys, values, options = draw(20)
    places = torch.tensor([2, 3, 9, 19])
    whole = dense_attention(query, keys, values, seen=20, scale=options["scale"])
    found = scattered_attention(query[:, :, places], keys, values, places, **options)
    assert torch.allclose(found, whole[:, :, places], atol=1e-5)
    aligned = dense_attention(query[:, :, places], keys, values, seen=20, scale=options["scale"])
    assert not torch.allclose(found, aligned, atol=1e-2)


def test_blocks_of_queries_change_nothing(monkeypatch):
    """Each block reads the entries up to its own last place."""
    query, keys, values, options = draw(5)
    places = torch.tensor([0, 3, 4, 11, 19])
    whole = scattered_attention(query, keys, values, places, **options)
    monkeypatch.setattr("kvbench.kernels.scattered_attention.torch.QUERY_BLOCK", 2)
    assert torch.allclose(scattered_attention(query, keys, values, places, **options), whole, atol=1e-6)
