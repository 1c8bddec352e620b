"""Random eviction: reproducible, and the same in every sequence."""

from __future__ import annotations

import pytest
import torch

from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf.tiny import VOCABULARY, tiny_model
from kvbench.method import Budget
from kvbench.methods.eviction.random import Random


def kept(method, batch=2, seed=1):
    """Positions that each layer kept. [layers][B, H_kv, rows]"""
    model = tiny_model()
    ids = torch.randint(VOCABULARY, (batch, 60), generator=torch.Generator().manual_seed(seed))
    with Session(model, method.fit(Budget("rows", 20), model.shape(60)), track=True) as session:
        session.prefill(ids)
        return [store.positions.clone() for store in session.layers]


def test_choices_are_by_head_and_layer_only():
    """Another text and another sequence of the batch keep the same entries; another head, layer or seed does not."""
    first = kept(Random(window=5))
    assert all(a.equal(b) for a, b in zip(first, kept(Random(window=5), seed=2), strict=True))
    assert all(x[0].equal(x[1]) for x in first)
    assert not first[0][0, 0].equal(first[0][0, 1])
    assert not first[0].equal(first[1])
    assert not first[0].equal(kept(Random(window=5, seed=1))[0])


def test_the_last_entries_stay():
    """The window is kept whole, the rest is chosen from before it, and drawing leaves torch's own generator alone."""
    torch.manual_seed(3)
    before = torch.get_rng_state()
    for layer in kept(Random(window=5)):
        assert layer.shape[-1] == 20
        assert (layer[..., -5:] == torch.arange(55, 60)).all()
        assert (layer.diff() > 0).all()
    assert torch.get_rng_state().equal(before)


class Rows:
    """A store of 50 entries, as far as the score looks."""

    keys, n = torch.zeros(1, 1, 50, 4), 50


class Layer:
    """The first layer, as far as the score looks."""

    layer = 0


def test_every_entry_has_the_same_chance():
    """Over 200 seeds each of 50 entries is kept about as often: within five standard errors."""
    counts = torch.zeros(50)
    for seed in range(200):
        numbers = Random(window=0, seed=seed).score(Rows(), Layer())
        counts[numbers[0, 0].topk(10).indices] += 1
    assert (counts / 200 - 0.2).abs().max() < 5 * (0.2 * 0.8 / 200) ** 0.5


def test_settings_without_a_meaning_are_refused():
    """The message names the method, the setting and the value."""
    with pytest.raises(UserError, match="random: window must be 0 or more, got -2"):
        Random(window=-2)
