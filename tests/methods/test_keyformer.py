"""Keyformer: scores against a loop over queries, the temperature, and eviction at every step."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf.tiny import VOCABULARY, tiny_model
from kvbench.method import Budget, Moment
from kvbench.methods.eviction.keyformer import Keyformer
from kvbench.registry import find_method
from kvbench.settings import configure
from kvbench.store import LayerKV


def draw(*shape, seed=0):
    """Normal random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def fill(method, make_step, query, keys, parts, **options):
    """The scores after the context was run in parts. [B, H_kv, n]"""
    store, done = method.layer(0), 0
    for i, count in enumerate(parts):
        moment = Moment.CONTEXT_END if i == len(parts) - 1 else Moment.CONTEXT_CHUNK
        step = make_step(query[:, :, done : done + count], keys[:, :, done : done + count], before=done, moment=moment,
                         **options)
        store.append(step)
        replace(method, rows=keys.shape[2]).attend(store, step)
        done += count
    return store.get_entry_state("score")


def gumbel(seed, head, query, key):
    """The noise of a pair, with Python's integers."""
    bits = (1 << 64) - 1
    number = (head << 50) + (query << 25) + key + seed * 0x9E3779B97F4A7C15 % (1 << 63) & bits
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & bits
    number = (number ^ number >> 27) * 0x94D049BB133111EB & bits
    uniform = ((number ^ number >> 31) % (1 << 23) + 0.5) / (1 << 23)
    return -math.log(-math.log(uniform))


def written_out(method, query, keys, *, length, window=None, divide=True):
    """Scores by loops over heads and queries, with the noise that the method draws."""
    group = query.shape[1] // keys.shape[1]
    scores = torch.zeros(keys.shape[:3])
    for head in range(query.shape[1]):
        for t in range(query.shape[2]):
            noise = torch.tensor([gumbel(method.seed * 1_000_003, head, t, key) for key in range(t + 1)])
            logits = query[0, head, t] @ keys[0, head // group, : t + 1].T * 0.5 + noise
            low = 0 if window is None else max(0, t - window + 1)
            temperature = 1 + method.rise * max(0, t - length + 1) if divide else 1
            scores[0, head // group, low : t + 1] += (logits[low:] / temperature).softmax(-1)
    return scores


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("parts", [[12], [5, 7], [1, 1, 10]])
def test_scores_follow_the_loop_in_any_chunks(parts, window, make_step, monkeypatch):
    """Noise belongs to a pair of positions, so chunks and blocks do not matter."""
    monkeypatch.setattr("kvbench.kernels.blocks.BLOCK_ELEMENTS", 100)
    query, keys = draw(1, 4, 12, 8), draw(1, 2, 12, 8, seed=1)
    method = Keyformer(seed=3, rise=0.5)
    found = fill(replace(method, length=6), make_step, query, keys, parts, scale=0.5, window=window)
    assert torch.allclose(found, written_out(method, query, keys, length=6, window=window), atol=1e-5)


def test_the_loop_catches_planted_faults(make_step):
    """A constant temperature and scores without noise are told apart."""
    query, keys = draw(1, 4, 12, 8), draw(1, 2, 12, 8, seed=1)
    method = Keyformer(rise=0.5)
    found = fill(replace(method, length=6), make_step, query, keys, [12], scale=0.5)
    assert not torch.allclose(found, written_out(method, query, keys, length=6, divide=False), atol=1e-3)
    assert not torch.allclose(found, written_out(Keyformer(rise=0.5, seed=1), query, keys, length=6), atol=1e-3)


def test_the_noise_is_of_gumbel_s_distribution(make_step):
    """Its mean is Euler's constant and its variance pi^2 / 6, and heads, layers and seeds draw their own."""
    step = make_step(draw(1, 4, 1, 2), draw(1, 2, 1, 2), before=4999)
    positions = torch.arange(5000).expand(1, 2, -1).int()
    found = Keyformer().draw_noise(step, torch.tensor([4999]), positions)[0, :, :, 0].flatten(0, 1)
    assert found.mean().item() == pytest.approx(0.5772, abs=0.03)
    assert found.var().item() == pytest.approx(1.6449, abs=0.1)
    assert not torch.allclose(found[0], found[1])
    other = Keyformer(seed=1).draw_noise(step, torch.tensor([4999]), positions)
    third = Keyformer().draw_noise(replace(step, layer=1), torch.tensor([4999]), positions)
    assert not torch.allclose(found, other[0, :, :, 0].flatten(0, 1))
    assert not torch.allclose(found, third[0, :, :, 0].flatten(0, 1))


def test_the_noise_follows_positions_not_places(make_step):
    """Entries that eviction has put into another order keep their numbers."""
    step = make_step(draw(1, 4, 1, 2), draw(1, 2, 1, 2), before=9)
    order = torch.tensor([3, 0, 7, 9])
    every = Keyformer().draw_noise(step, torch.tensor([9]), torch.arange(10).expand(1, 2, -1).int())
    some = Keyformer().draw_noise(step, torch.tensor([9]), order.expand(1, 2, -1).int())
    assert some.equal(every[..., order])


def test_every_step_keeps_to_the_budget_and_the_recent_entries():
    """After the context, a question and ten tokens, each head has the budget's entries, the last 30 % among them."""
    model = tiny_model()
    method = Keyformer().fit(Budget("rows", 20), model.shape(60))
    ids = torch.randint(VOCABULARY, (60,), generator=torch.Generator().manual_seed(1))
    with Session(model, method, capacity=100) as session:
        session.prefill(ids)
        session.ask(ids[:5], 10, stop=frozenset())
        for store in session.layers:
            assert isinstance(store, LayerKV)
            assert store.entries_kept() == [20, 20]
            for head in store.positions[0]:
                assert set(range(store.seen - 6, store.seen)) <= set(head.tolist())


@pytest.mark.parametrize(("setting", "value"), [("temperature", "0"), ("rise", "-1"), ("recent", "1.5")])
def test_settings_without_a_meaning_are_refused(setting, value):
    """The message names the value and the rule."""
    with pytest.raises(UserError, match=rf"{setting} must be .* got {value}"):
        configure(find_method("keyformer"), {setting: value}, "--set", "keyformer")
