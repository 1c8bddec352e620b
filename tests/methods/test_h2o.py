"""H2O against its card: the hand oracle, sums, sizes, and entries that never come back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf.tiny import tiny_model
from kvbench.method import Budget, Moment
from kvbench.methods.eviction.h2o import H2O

BY_HAND = [[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0.2, 0.2, 0.6, 0], [0.3, 0.5, 0.3, 0.4]]
"""Weights of four queries; the last, without entry 1, which is gone by then."""


def by_hand(low, high):
    """Queries whose logits over unit keys are the logs of the weights. Query [1, 1, T, 4], key [1, 1, T, 4]"""
    return torch.tensor(BY_HAND).clamp_min(1e-9).log()[None, None, low:high], torch.eye(4)[None, None, low:high]


def test_the_card_s_example(make_step):
    """Sums 1.7, 0.7, 0.6 keep entries 0 and 2; the next query makes them 2.0, 0.9, 0.4, which keeps entries 0 and 3."""
    method = replace(H2O(recent=0.5), rows=2, length=3)
    kv = method.layer(0)
    step = make_step(*by_hand(0, 3))
    kv.append(step)
    assert torch.allclose(kv.scores[0, 0], torch.tensor([1.7, 0.7, 0.6]))
    method.evict(kv, step)
    assert kv.positions[0, 0].tolist() == [0, 2]
    step = make_step(*by_hand(3, 4), before=3, moment=Moment.DECODE)
    kv.append(step)
    assert torch.allclose(kv.scores[0, 0], torch.tensor([2.0, 0.9, 0.4]))
    method.evict(kv, step)
    assert sorted(kv.positions[0, 0].tolist()) == [0, 3]
    order = kv.positions[0, 0].argsort()
    assert torch.allclose(kv.scores[0, 0][order], torch.tensor([2.0, 0.4]))


@pytest.mark.parametrize("chunk", [None, 1, 7])
def test_every_query_adds_one(chunk):
    """After a prefill of N tokens a KV head's scores sum to N for each query head of its group."""
    with Session(tiny_model(), H2O(), chunk=chunk) as session:
        session.prefill(torch.arange(50)[None] % 37)
        for store in session.layers:
            assert torch.allclose(store.scores.sum(-1), torch.tensor(2 * 50.0))


@pytest.mark.parametrize("recent", [0.0, 0.5, 1.0])
def test_the_size_is_exact_and_nothing_comes_back(recent):
    """After every step there are C entries, the recent ones among them, and none that was evicted before."""
    model, rows = tiny_model(), 10
    method = H2O(recent=recent).fit(Budget("rows", rows), model.shape(40))
    with Session(model, method, capacity=80) as session:
        session.prefill(torch.arange(40)[None] % 37)
        session.ask([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], 1, stop=frozenset())
        before = None
        for token in range(12):
            heads = [set(x.tolist()) for store in session.layers for x in store.positions[0]]
            assert all(len(x) == rows for x in heads)
            assert all({*range(session.seen - round(rows * recent), session.seen)} <= x for x in heads)
            if before is not None:
                assert all(x <= old | {session.seen - 1} for x, old in zip(heads, before, strict=True))
            before = heads
            session.forward(torch.tensor([[token]]), Moment.DECODE)


def test_scores_travel_with_their_entries(make_step):
    """Entries dropped in place take their scores along; here each score is its entry's position."""
    kv = H2O(rows=8, length=10).layer(0)
    kv.append(make_step(torch.zeros(1, 4, 10, 8), torch.zeros(1, 2, 10, 8)))
    kv.scores.copy_(kv.positions)
    kv.drop(torch.tensor([[[2, 5], [0, 9]]]))
    assert kv.scores.equal(kv.positions.float())
    assert kv.positions.sort(-1).values.tolist() == [[[0, 1, 3, 4, 6, 7, 8, 9], [*range(1, 9)]]]


@pytest.mark.parametrize("recent", [-0.1, 1.1])
def test_settings_without_a_meaning_are_refused(recent):
    """The message names the method, the setting and the value."""
    with pytest.raises(UserError, match=f"h2o: recent must be between 0 and 1, got {recent}"):
        H2O(recent=recent)
