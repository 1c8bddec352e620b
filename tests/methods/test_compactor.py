"""Attention within blocks, causal or not, and Compactor's blend of it with leverage."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvbench.engine.session import Session
from kvbench.hf.tiny import tiny_model
from kvbench.method import Budget, Moment
from kvbench.methods.eviction.compactor import Compactor, standardize
from kvbench.methods.eviction.leverage import Leverage
from kvbench.methods.eviction.noncausal import NonCausal

TOKENS = 27


def draw(*shape, seed=0):
    """Normal random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def feed(method, query, key, value, cuts, make_step):
    """The store after a context that came in chunks of these sizes, and its last step."""
    kv, start, steps = method.layer(0), 0, []
    for i, cut in enumerate(cuts):
        part = slice(start, start + cut)
        moment = Moment.CONTEXT_END if i == len(cuts) - 1 else Moment.CONTEXT_CHUNK
        steps.append(make_step(query[:, :, part], key[:, :, part], value[:, :, part], before=start, moment=moment,
                               scale=0.5))
        kv.append(steps[-1])
        method.attend(kv, steps[-1])
        start += cut
    return kv, steps[-1]


def naive_mass(query, key, block, scale):
    """Loops over blocks and heads; no mask, and no token of another block."""
    mass = torch.zeros(key.shape[:3])
    group = query.shape[1] // key.shape[1]
    for start in range(0, key.shape[2], block):
        part = slice(start, min(start + block, key.shape[2]))
        for head in range(query.shape[1]):
            weights = (query[:, head, part] @ key[:, head // group, part].mT * scale).softmax(-1)
            mass[:, head // group, part] += weights.sum(1) / group
    return mass


def smooth(x):
    """The mean of three neighbors, zeros at both ends counted."""
    padded = torch.cat([torch.zeros_like(x[..., :1]), x, torch.zeros_like(x[..., :1])], dim=-1)
    return (padded[..., :-2] + padded[..., 1:-1] + padded[..., 2:]) / 3


@pytest.mark.parametrize("cuts", [[TOKENS], [5, 5, 17], [26, 1]], ids=str)
@pytest.mark.parametrize("scaled", [True, False])
def test_noncausal_sums_attention_within_blocks(make_step, cuts, scaled):
    """Naive sums times value norms, whatever the chunks of the prefill."""
    query, key, value = draw(2, 4, TOKENS, 8), draw(2, 2, TOKENS, 8, seed=1), draw(2, 2, TOKENS, 8, seed=2)
    method = NonCausal(block=8, scaled=scaled)
    kv, step = feed(method, query, key, value, cuts, make_step)
    wanted = smooth(naive_mass(query, key, 8, 0.5 if scaled else 1.0) * value.norm(dim=-1))
    assert torch.allclose(method.score(kv, step), wanted, atol=1e-5)


def test_an_earlier_query_counts_for_a_later_key(make_step):
    """The first query looks for the last key of its block, which causal attention would hide from it."""
    query, key = torch.zeros(1, 1, 8, 8), torch.eye(8)[None, None].clone()
    query[0, 0, 0] = 20 * key[0, 0, 3]
    kv, _ = feed(NonCausal(block=4), query, key, key, [8], make_step)
    assert kv.state["mass"][0, 0].argmax() == 3
    assert kv.state["mass"].sum().item() == pytest.approx(8)  # each query gives one in all


def test_compactor_blends_standardized_scores(make_step):
    """Leverage with weight plus attention, each with mean 0 and deviation 1, between the outermost tokens."""
    query, key, value = draw(1, 4, TOKENS, 8), draw(1, 2, TOKENS, 8, seed=1), draw(1, 2, TOKENS, 8, seed=2)
    method = Compactor(first=4, last=3, block=8, sketch=8, blending=0.7)
    kv, step = feed(method, query, key, value, [TOKENS], make_step)
    inner = slice(4, TOKENS - 3)
    attention = smooth(naive_mass(query[:, :, inner], key[:, :, inner], 8, 0.5) * value[:, :, inner].norm(dim=-1))
    alone = make_step(key[:, :, inner], key[:, :, inner])
    store = Leverage(sketch=8).layer(0)
    store.append(alone)
    leverage = Leverage(sketch=8).score(store, alone)
    wanted = 0.7 * (leverage - leverage.mean()) / leverage.std() + (attention - attention.mean()) / attention.std()
    found = method.score(kv, step)
    assert torch.allclose(found[:, :, inner], wanted, atol=1e-4)
    assert found[..., :4].isinf().all()
    assert found[..., -3:].isinf().all()


def test_the_default_blend_is_the_share_that_is_evicted(make_step):
    """At a budget of a third, leverage has the weight two thirds."""
    query, key = draw(1, 2, TOKENS, 8), draw(1, 2, TOKENS, 8, seed=1)
    method = Compactor(first=2, last=2, block=8, rows=9, length=27)
    kv, step = feed(method, query, key, key, [TOKENS], make_step)
    assert torch.allclose(method.score(kv, step), replace(method, blending=2 / 3).score(kv, step))


def test_constant_scores_standardize_to_zero():
    """No division by a deviation of zero."""
    assert standardize(torch.full((2, 2, 5), 3.0)).tolist() == torch.zeros(2, 2, 5).tolist()


@pytest.mark.parametrize("method", [NonCausal(block=16), Compactor(block=16)], ids=lambda x: x.card.name)
@pytest.mark.parametrize("rows", [30, 100])
def test_sums_are_freed_with_the_context(method, rows):
    """After the context, evicted or not, only entries are stored."""
    model = tiny_model()
    with Session(model, method.bind(model).fit(Budget("rows", rows), model.shape(100)), chunk=30) as session:
        session.prefill(torch.randint(64, (100,), generator=torch.Generator().manual_seed(0)).tolist())
        assert all(not store.state for store in session.layers)
