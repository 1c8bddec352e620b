"""DefensiveKV: the worst case and the floor by hand, the whole score against loops, budgets over heads and layers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvbench.engine.session import Session
from kvbench.hf.tiny import tiny_model
from kvbench.kernels.dense_attention.naive import attention_weights
from kvbench.method import Budget
from kvbench.methods.allocation.defensivekv import DefensiveKV, DefensiveScores, LayerDefensiveKV, count_first
from kvbench.store import LayerKV


def draw(*shape, seed=0):
    """Normal random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Scores(DefensiveScores):
    """The scores alone."""

    card = DefensiveKV.card


def test_the_worst_case_and_the_floor_by_hand():
    """Rows .4 .1 0 0 and 0 .2 .1 .1: the maxima are .4 .2 .1 .1, and their mean .2 is the floor."""
    weights = torch.tensor([[[[0.4, 0.1, 0, 0], [0, 0.2, 0.1, 0.1]]]])
    assert Scores(kernel=1).risk(weights)[0].tolist() == pytest.approx([0.4, 0.2, 0.2, 0.2])
    assert Scores(kernel=1, prior=False).risk(weights)[0].tolist() == pytest.approx([0.4, 0.2, 0.1, 0.1])
    assert Scores(kernel=1, prior=False, aggregate="mean").risk(weights)[0].tolist() == pytest.approx(
        [0.2, 0.15, 0.05, 0.05]
    )


def test_the_worst_case_keeps_what_the_mean_drops():
    """One of two queries needs entry 0 badly, both need entry 1 a little: the maximum and the mean disagree."""
    weights = torch.tensor([[[[0.5, 0.3, 0.0], [0.0, 0.3, 0.1]]]])
    assert Scores(kernel=1).risk(weights).argmax() == 0
    assert Scores(kernel=1, aggregate="mean").risk(weights).argmax() == 1


def test_smoothing_keeps_the_sum_of_every_query():
    """Pooled rows are scaled back to their sums: the mean over queries, summed over entries, stays."""
    weights = draw(2, 2, 3, 20).abs()
    found = Scores(prior=False, aggregate="mean").risk(weights)
    assert torch.allclose(found.sum(-1), weights.sum(-1).mean((1, 2)), atol=1e-5)


def test_the_first_stage_stops_below_its_share():
    """Mean attention .4 .2 .1 and .3 in the window: with .4 it has .7, with .2 more .9; alone it may be enough."""
    mean = torch.tensor([[[0.1, 0.4, 0.2]]])
    assert [count_first(mean, x).item() for x in (0.69, 0.71, 0.91, 0.25)] == [0, 1, 2, 0]


@pytest.mark.parametrize("mass", [0.1, 0.4, 0.7])
def test_the_first_stage_and_the_window_hold_the_share(mass):
    """One entry more would reach 90 % of the attention, however much the window holds."""
    mean = draw(2, 3, 200).softmax(-1) * (1 - mass)
    ordered = mean.sort(dim=-1, descending=True).values
    for held, count in zip(ordered.flatten(0, 1), count_first(mean, 0.9).flatten(), strict=True):
        assert mass + held[:count].sum() < 0.9 <= mass + held[: count + 1].sum()


def test_the_score_follows_its_equations(make_step):
    """Loops over sequences and heads, in float64 where it matters."""
    query, key, value = draw(2, 4, 40, 8), draw(2, 2, 40, 8, seed=1), draw(2, 2, 40, 8, seed=2)
    key[:, :, 34:] = query[:, ::2, 34:]  # the window gets much of its own attention, unlike the entries before it
    output = draw(4, 8, 24, seed=3)
    method = replace(Scores(window=6, kernel=3), rows=20, length=40)
    step = make_step(query, key, value, scale=0.6, output=output)
    kv = method.layer(0)
    kv.append(step)
    found = method.score(kv, step)
    weights = attention_weights(query[:, :, -6:], key, scale=0.6, seen=40).float()  # [B, H_kv, G, 6, 40]
    for batch in range(2):
        norms = [
            sum((value[batch, head, :34] @ output[2 * head + i]).abs().sum(-1) for i in range(2)) / 2
            for head in range(2)
        ]
        for head in range(2):
            rows = weights[batch, head, ..., :34]
            padded = torch.nn.functional.pad(rows, (1, 1))
            smooth = (padded[..., :-2] + padded[..., 1:-1] + padded[..., 2:]) / 3
            smooth = smooth * rows.sum(-1, keepdim=True) / smooth.sum(-1, keepdim=True)
            risk = smooth.amax((0, 1))
            risk = torch.maximum(risk, risk.mean())
            mean = rows.mean((0, 1))
            order = mean.argsort(descending=True)
            share = 0.9 - weights[batch, head, ..., 34:].sum(-1).mean()
            taken = (mean[order].cumsum(0) < share).sum().clamp_max(14)
            wanted = risk * norms[head] / sum(norms)  # the head's share of each token's
            wanted[order[:taken]] = torch.inf
            assert torch.allclose(found[batch, head, :34], wanted, atol=1e-6)
    assert found[..., 34:].isinf().all()


@pytest.mark.parametrize("method", [
    DefensiveKV(window=8, first_stage=0.2), LayerDefensiveKV(window=8, first_stage=0.2),
], ids=lambda x: x.card.name)
def test_budgets_are_exact_and_unequal(method):
    """A layer, or all layers, keep exactly the budget, heads and layers unequal numbers, and every window stays."""
    model = tiny_model()
    fitted = method.fit(Budget("rows", 30), model.shape(120))
    with Session(model, fitted, track=True) as session:
        session.prefill(torch.randint(64, (120,), generator=torch.Generator().manual_seed(0)).tolist())
        kept = [x.entries_kept() for x in session.layers]
        shared = isinstance(method, LayerDefensiveKV)
        assert sum(map(sum, kept)) == 120
        assert shared or [sum(x) for x in kept] == [60, 60]
        assert not shared or sum(kept[0]) != 60
        assert kept[0][0] != kept[0][1]
        for store in session.layers:
            heads = store.frozen.position.split(store.frozen.counts)
            assert all(set(range(112, 120)) <= set(x.tolist()) for x in heads)


def test_scaling_a_layer_s_values_changes_no_choice(make_step):
    """Norms are shares of a token's in all heads, so that layers with large values win nothing in the common budget."""
    steps = [
        replace(make_step(draw(1, 4, 40, 8, seed=i), draw(1, 2, 40, 8, seed=9 + i), draw(1, 2, 40, 8, seed=19 + i),
                          output=draw(4, 8, 24, seed=29)), layer=i)
        for i in range(2)
    ]
    kept = []
    for scale in (1, 100):
        method = replace(LayerDefensiveKV(window=4), rows=10, length=40, pooled=(0, 1))
        stores = [method.layer(i) for i in range(2)]
        for kv, step in zip(stores, steps, strict=True):
            kv.append(replace(step, value=step.value * (scale if step.layer == 0 else 1)))
            method.evict(kv, step)
            method.end_of_layer(stores, step)
        kept.append([x.frozen.key for x in stores])
    assert all(x.equal(y) for x, y in zip(*kept, strict=True))


def test_a_token_without_values_has_no_risk(make_step):
    """A vector of zeros, as some models have for a token, has no share in any head, and is no fault."""
    value = draw(1, 2, 40, 8, seed=2)
    value[:, :, 5] = 0
    step = make_step(draw(1, 4, 40, 8), draw(1, 2, 40, 8, seed=1), value, output=draw(4, 8, 24, seed=3))
    kv = LayerKV(queries=6)
    kv.append(step)
    scores = Scores(window=6, rows=20, length=40, first_stage=0.0).score(kv, step)
    assert scores[..., 5].equal(torch.zeros(1, 2))
    assert scores[..., :34].isfinite().all()
