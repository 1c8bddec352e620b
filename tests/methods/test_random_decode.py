"""Random eviction while decoding: a pinned prompt, a constant size, and uniform draws."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvbench.engine.session import Session
from kvbench.hf.tiny import tiny_model
from kvbench.method import Budget, Moment
from kvbench.methods.eviction.random_decode import RandomDecode


def generate(method, prompt, steps, budget):
    """The stores after a prompt and decode steps."""
    model = tiny_model()
    fitted = method.fit(Budget("rows", budget), model.shape(prompt))
    session = Session(model, fitted, capacity=prompt + steps)
    with session:
        session.prefill([x % 64 for x in range(prompt)])
        for token in range(steps):
            session.forward(torch.tensor([[token % 64]]), Moment.DECODE)
        return [(store.n, store.positions.sort(-1).values) for store in session.layers]


def test_the_prompt_and_the_window_stay():
    """After 60 steps at a budget of 50 every head holds its 20 prompt tokens, the last 8, and 22 others."""
    for count, positions in generate(RandomDecode(window=8), 20, 60, 50):
        assert count == 50
        assert (positions[..., :20] == torch.arange(20)).all()
        assert (positions[..., -8:] == torch.arange(72, 80)).all()
        assert not positions[0, 0].equal(positions[0, 1])  # each head draws for itself


def test_a_prompt_beyond_the_budget_is_evicted_at_random():
    """No room is left for generated tokens, so the prompt cannot be pinned; the size is the budget all the same."""
    for count, positions in generate(RandomDecode(window=8), 60, 10, 30):
        assert count == 30
        assert (positions[..., -8:] == torch.arange(62, 70)).all()
        assert (positions < 60).sum(-1).min() > 8


def test_a_seed_of_eight_digits_is_taken():
    """Such as a date: with layer and step it is beyond the numbers that torch takes."""
    (_, first), *_ = generate(RandomDecode(window=8, seed=20261201), 20, 20, 30)
    (_, other), *_ = generate(RandomDecode(window=8, seed=20261202), 20, 20, 30)
    assert not first.equal(other)


@pytest.mark.slow
def test_every_generated_entry_is_drawn_equally_often(make_step):
    """One of 40 entries leaves, 800 times with another seed: each about 20 times, the pinned ones never."""
    key = torch.zeros(1, 1, 51, 2)
    gone = torch.zeros(51)
    for seed in range(800):
        method = replace(RandomDecode(window=1, seed=seed), rows=50, length=10)
        kv, step = method.layer(0), make_step(key, key, moment=Moment.TURN_END)
        kv.append(step)
        method.evict(kv, step)
        gone += 1 - torch.zeros(51).scatter(0, kv.positions[0, 0].long(), 1.0)
    assert gone.sum() == 800
    assert gone[:10].sum() + gone[50] == 0
    assert gone[10:50].min() > 4
    assert gone[10:50].max() < 45


def test_a_step_draws_new_numbers(make_step):
    """Scores of one entry differ between steps: a fixed draw would drop new entries only until old ones are worse."""
    key = torch.zeros(1, 1, 20, 2)
    method = replace(RandomDecode(window=1), rows=15, length=5)
    kv = method.layer(0)
    kv.append(make_step(key, key, moment=Moment.TURN_CHUNK))
    first = method.score(kv, make_step(key, key), 15)
    second = method.score(kv, make_step(key[:, :, :1], key[:, :, :1], before=20), 15)
    assert not first[..., 5:19].equal(second[..., 5:19])


@pytest.mark.parametrize("chunk", [None, 7])
def test_a_question_in_chunks_evicts_once(chunk):
    """A question's chunks leave the same entries as the whole question."""
    model, kept = tiny_model(), []
    fitted = RandomDecode(window=4).fit(Budget("rows", 40), model.shape(20))
    for size in (None, chunk):
        with Session(model, fitted, capacity=100, chunk=size) as session:
            session.prefill([x % 64 for x in range(20)])
            session.question([x % 64 for x in range(45)], 1)
            kept.append(session.layers[1].positions.sort(-1).values)
    assert kept[0].equal(kept[1])
