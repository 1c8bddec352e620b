"""R-KV: redundancy and attention against loops, what is dropped first, and eviction after every period."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvbench.engine.session import Session
from kvbench.hf.tiny import tiny_model
from kvbench.method import Budget, Moment
from kvbench.methods.eviction import r_kv
from kvbench.methods.eviction.r_kv import RKV, pool_by_position, redundancy


def draw(*shape, seed=0):
    """Normal random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def naive_redundancy(keys, positions, similar):
    """Loops over tokens: cosines of each to all others, but for its latest similar one, averaged by the other."""
    count = len(keys)
    sums = torch.zeros(count)
    for i in range(count):
        cosines = torch.cosine_similarity(keys[i], keys, dim=-1)
        cosines[i] = 0
        alike = [j for j in range(count) if cosines[j] > similar]
        if alike:
            cosines[max(alike, key=lambda j: positions[j])] = 0
        sums += cosines
    return (sums / count).softmax(0)


@pytest.mark.parametrize("block", [1 << 22, 100])
def test_redundancy_follows_its_equations(block, monkeypatch):
    """Random keys in random order, in blocks or not."""
    monkeypatch.setattr("kvbench.kernels.blocks.BLOCK_ELEMENTS", block)
    keys = draw(2, 2, 15, 4)
    positions = torch.stack([torch.randperm(15, generator=torch.Generator().manual_seed(i)) for i in range(4)])
    positions = positions.view(2, 2, 15).int()
    found = redundancy(keys, positions, 0.5)
    for batch in range(2):
        for head in range(2):
            wanted = naive_redundancy(keys[batch, head], positions[batch, head].tolist(), 0.5)
            assert torch.allclose(found[batch, head], wanted, atol=1e-6)


def test_of_equal_keys_the_latest_is_the_least_redundant():
    """Three equal keys and one across: the latest of the three counts for nobody, wherever it is stored."""
    keys = torch.tensor([[1.0, 0], [1, 0], [1, 0], [0, 1]])[None, None]
    for order in ([0, 1, 2, 3], [2, 0, 1, 3]):
        positions = torch.tensor(order).int()[None, None]
        scores = redundancy(keys, positions, 0.5)[0, 0]
        latest = order.index(2)
        others = [i for i in range(3) if i != latest]
        assert all(scores[latest] < scores[i] for i in others)
        assert scores[3] < scores[others[0]]


def test_neighbors_are_those_of_the_text():
    """A peak at position 2 reaches positions 1 and 3, in whichever slots these are stored."""
    positions = torch.tensor([[[4, 2, 0, 3, 1]]])
    scores = torch.tensor([[[0.0, 1, 0, 0, 0]]])
    assert pool_by_position(scores, positions, 3).tolist() == [[[0, 1, 0, 1, 1]]]


def test_the_score_mixes_attention_and_redundancy(make_step):
    """Loops over the last three queries: softmax over earlier entries of the group's largest logit."""
    query, key = draw(1, 4, 20, 8), draw(1, 2, 20, 8, seed=1)
    method = replace(RKV(window=3, kernel=1, mix=0.3, period=4), rows=10, length=20)
    kv, step = method.layer(0), make_step(query, key, scale=0.4)
    kv.append(step)
    r_kv.roll_queries(kv, step, 3)
    found = method.score(kv, step, 10)
    for head in range(2):
        attention = torch.zeros(17)
        for i in (17, 18, 19):
            logits = torch.stack([key[0, head, :17] @ query[0, 2 * head + g, i] for g in range(2)]).amax(0) * 0.4
            attention += logits.softmax(0) / 3
        wanted = 0.3 * attention - 0.7 * naive_redundancy(key[0, head], list(range(20)), 0.5)[:17]
        assert torch.allclose(found[0, head, :17], wanted, atol=1e-6)
    assert found[..., 17:].isinf().all()


def test_entries_are_dropped_once_a_period():
    """From 20 entries the cache grows to 27 and falls back to 20 with the eighth token; the last tokens always stay."""
    model, sizes = tiny_model(), []
    fitted = RKV(window=4, period=8).fit(Budget("rows", 20), model.shape(40))
    with Session(model, fitted, capacity=100) as session:
        session.prefill([x % 64 for x in range(40)])
        storage = session.layers[0].keys.untyped_storage().data_ptr()
        for token in range(24):
            session.forward(torch.tensor([[token % 64]]), Moment.DECODE)
            sizes.append(session.layers[0].n)
            if sizes[-1] == 20:
                recent = session.layers[0].positions.sort(-1).values[..., -4:]
                assert (recent == torch.arange(session.seen - 4, session.seen)).all()
        assert session.layers[0].keys.untyped_storage().data_ptr() == storage
    assert sizes == [*range(21, 28), 20] * 3


def test_a_short_context_s_queries_are_all_there_are(make_step):
    """Before the window is full only the tokens so far are averaged: zeros stand for none."""
    query, key = draw(1, 2, 6, 8), draw(1, 2, 6, 8, seed=1)
    method = replace(RKV(window=8), rows=20, length=6)
    kv, step = method.layer(0), make_step(query, key)
    kv.append(step)
    method.evict(kv, step)
    assert kv.state["queries"][:, :, :2].abs().sum() == 0
    assert kv.state["queries"][:, :, 2:].equal(query)
    later = make_step(draw(1, 2, 1, 8, seed=2), draw(1, 2, 1, 8, seed=3), before=6, moment=Moment.DECODE)
    kv.append(later)
    method.evict(kv, later)
    assert kv.state["queries"][:, :, 1:].equal(torch.cat([query, later.query], dim=2))
