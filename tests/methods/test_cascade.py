"""One budget over layers: exact shares, earlier layers that only shrink, and the result of a division at the end."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvbench.budget import LayerShape, Shape
from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf.tiny import tiny_model
from kvbench.kernels.dense_attention.naive import attention_weights
from kvbench.method import Budget
from kvbench.methods.allocation.cake import CAKE
from kvbench.methods.allocation.prefixkv import PrefixKV
from kvbench.methods.allocation.simlayerkv import SimLayerKV
from kvbench.techniques.cascade import fill_water, round_shares

LAYERS, TOKENS, ROWS = 6, 60, 20
METHODS = [CAKE(window=8), PrefixKV(), SimLayerKV(recent=4)]


def draw(*shape, seed=0):
    """Normal random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_layers(make_step, batch=1):
    """Steps of one context through layers whose attention is more and more peaked, in no order."""
    steps = []
    for layer in range(LAYERS):
        sharp = [1.0, 0.2, 2.0, 0.5, 3.0, 0.1][layer]
        query, key = draw(batch, 4, TOKENS, 8, seed=layer) * sharp, draw(batch, 2, TOKENS, 8, seed=100 + layer)
        steps.append(replace(make_step(query, key, draw(batch, 2, TOKENS, 8, seed=200 + layer)), layer=layer))
    return steps


def run(method, steps):
    """Stores after all layers, and the entries of every layer after each of them."""
    method = replace(method, rows=ROWS, length=TOKENS, pooled=tuple(range(LAYERS)))
    stores = [method.layer(i) for i in range(LAYERS)]
    history = []
    for step, kv in zip(steps, stores, strict=True):
        kv.track = True
        kv.append(step)
        method.evict(kv, step)
        history.append([x.n for x in stores[: step.layer + 1]])
        method.end_of_layer(stores, step)
        history.append([x.n for x in stores[: step.layer + 1]])
        kv.settle()
    return method, stores, history


@pytest.mark.parametrize(("weights", "total", "most", "wanted"), [
    ([3, 6, 3], 12, 5, [4, 5, 3]), ([1, 1, 1], 10, 9, [4, 3, 3]), ([12], 12, 5, [5]), ([0, 0], 7, 9, [4, 3]),
    ([1, 0], 7, 5, [5, 2]), ([8, 4, 2, 2], 20, 6, [6, 6, 4, 4]),
])
def test_shares_by_hand(weights, total, most, wanted):
    """Shares in proportion to the weights, capped, with the largest remainders rounded up; ties go to lower layers."""
    found = fill_water(torch.tensor([weights], dtype=torch.float64), total, most)
    assert round_shares(found, min(total, most * len(weights))).tolist() == [wanted]


@given(
    weights=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=12), share=st.floats(0.01, 1.0),
    most=st.integers(1, 500),
)
def test_shares_spend_the_budget_and_never_grow(weights, share, most):
    """The sum is the total, no share is above the most, and a further layer lowers every share or leaves it."""
    total = max(1, int(share * most * len(weights)))
    every = torch.tensor([weights], dtype=torch.float64)
    before = None
    for count in range(1, len(weights) + 1):
        found = fill_water(every[:, :count], total, most)
        assert found.max() <= most
        assert found.sum().item() == pytest.approx(min(total, most * count))
        if before is not None:
            assert (found[:, :-1] <= before + 1e-6).all()
        before = found
    assert round_shares(before, total).sum().item() == total


@pytest.mark.parametrize("method", METHODS, ids=lambda x: x.card.name)
def test_earlier_layers_shrink_and_the_total_is_the_budget(make_step, method):
    """At most the budget and one whole layer are stored at any time; at the end exactly the budget, unequally."""
    _, stores, history = run(method, make_layers(make_step))
    for before, after in pairwise(history):
        assert all(x >= y for x, y in zip(before, after, strict=False))
        assert sum(before) <= ROWS * LAYERS + LAYERS + TOKENS
    assert sum(history[-1]) == ROWS * LAYERS
    assert len(set(history[-1])) > 1
    assert all(set(x.state) == set() for x in stores)


@pytest.mark.parametrize("method", METHODS, ids=lambda x: x.card.name)
def test_a_cascade_keeps_what_one_division_at_the_end_keeps(make_step, method):
    """Every layer holds its best entries by scores over the whole context, as many as the last division gives it."""
    steps = make_layers(make_step)
    fitted, stores, _ = run(method, steps)
    measures, scores = [], []
    for step in steps:
        kv = fitted.layer(step.layer)
        kv.append(step)
        scores.append(fitted.score(kv, step))
        measures.append(fitted.measure(kv, step, scores[-1]))
    counts = fitted.divide(torch.stack(measures, dim=1), ROWS * LAYERS, TOKENS)[0].long().tolist()
    for kv, score, count in zip(stores, scores, counts, strict=True):
        best = score.argsort(dim=-1, descending=True, stable=True)[..., :count].sort(-1).values
        assert kv.positions.equal(best.int())


def test_sequences_of_a_batch_get_their_own_shares(make_step):
    """Two sequences with unlike layers keep what each keeps alone."""
    both = make_layers(make_step, batch=2)
    both[0].query[1] *= 5
    _, together, _ = run(CAKE(window=8), both)
    for i in range(2):
        part = slice(i, i + 1)
        alone = [replace(x, query=x.query[part], key=x.key[part], value=x.value[part], positions=x.positions[part])
                 for x in both]
        _, stores, _ = run(CAKE(window=8), alone)
        assert [x.entries_kept() for x in stores] == [x.entries_kept()[2 * i : 2 * i + 2] for x in together]
    assert together[0].entries_kept()[0] != together[0].entries_kept()[2]


def test_cake_scores_and_prefers_by_its_equations(make_step):
    """Mean and variance over the queries in float64; entropy over the entries before the window, as they are."""
    query, key = draw(2, 4, 40, 8), draw(2, 2, 40, 8, seed=1)
    method = CAKE(window=6, kernel=1, gamma=7.0, dispersion=2.0, shift=0.5, pooled=(0,))
    step = make_step(query, key, scale=0.7)
    kv = method.layer(0)
    kv.append(step)
    weights = attention_weights(query[:, :, -6:], key, scale=0.7, seen=40)  # [B, H_kv, G, w, n]
    wanted = (weights.mean(3) + 7 * weights.var(3)).mean(2)[..., :-6]
    scores = method.score(kv, step)
    assert torch.allclose(scores[..., :-6].double(), wanted, atol=1e-6)
    assert scores[..., -6:].isinf().all()
    before = weights[..., :-6]
    entropy = -(before * before.log()).sum((1, 2, 3, 4))
    variance = before.var(3).sum((1, 2, 3))
    found = method.measure(kv, step, scores)
    assert torch.allclose(found.exp(), entropy ** 0.5 * variance ** 2, rtol=1e-4)


@pytest.mark.parametrize("settings", [{"dispersion": 0.001}, {"shift": 0.001}, {"dispersion": 0.001, "shift": 0.001}])
def test_cake_spends_its_budget_also_where_a_preference_exceeds_float64(settings, make_step):
    """The entropy is above 1 and the variance below, so one power is infinite and the other zero."""
    _, stores, _ = run(CAKE(window=8, **settings), make_layers(make_step))
    assert sum(x.n for x in stores) == ROWS * LAYERS


def test_layers_without_a_preference_share_equally(make_step):
    """Equal queries have no variance, so every preference is zero."""
    steps = [replace(x, query=torch.zeros_like(x.query)) for x in make_layers(make_step)]
    _, stores, _ = run(CAKE(window=8), steps)
    assert [x.n for x in stores] == [ROWS] * LAYERS


def test_prefixkv_gives_every_layer_the_same_share_of_attention(make_step):
    """A threshold found by bisection, as in the paper, keeps as many entries of each layer, within one."""
    steps = make_layers(make_step)
    method, stores, _ = run(PrefixKV(), steps)
    shares = []
    for step in steps:
        kv = method.layer(0)
        kv.append(step)
        mass = kv.scores.mean(1)[0].double()
        shares.append((mass / mass.sum()).sort(descending=True).values.cumsum(0))
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        kept = [int((x < middle).sum()) + 1 for x in shares]
        low, high = (middle, high) if sum(kept) < (ROWS - 2) * LAYERS else (low, middle)
    assert all(abs(kv.n - 2 - x) <= 1 for kv, x in zip(stores, kept, strict=True))
    assert all((kv.positions[0, 0] == kv.positions[0, 1]).all() for kv in stores)
    assert all(kv.positions[0, 0, [0, -1]].tolist() == [0, TOKENS - 1] for kv in stores)


def test_prefixkv_s_equal_layers_get_equal_numbers(make_step):
    """The same attention in every layer gives the same number of entries."""
    steps = [replace(make_layers(make_step)[0], layer=i) for i in range(LAYERS)]
    _, stores, _ = run(PrefixKV(), steps)
    assert [x.n for x in stores] == [ROWS] * LAYERS


def test_simlayerkv_keeps_the_layers_whole_that_look_far_back(make_step):
    """One of six layers can be whole at a third of the bytes: the one whose last query looks at the middle."""
    steps = make_layers(make_step)
    for step in steps:
        step.query[:, :, -1] = 0
        step.key[:, :, -1] = 5 * torch.ones(8)
        target = 30 if step.layer == 3 else TOKENS - 1
        step.query[:, :, -1] = step.key[:, :1, target] * 3
    _, stores, history = run(SimLayerKV(recent=4), steps)
    assert history[-1] == [12, 12, 12, TOKENS, 12, 12]
    for i in (0, 1, 2, 4, 5):
        assert stores[i].positions[0, 0].tolist() == [0, 1, 2, 3, *range(TOKENS - 8, TOKENS)]


def test_memory_peaks_at_the_budget_and_one_layer():
    """The measured peak is that of the first layer whole, and of the budget with one more layer, not of all layers."""
    model = tiny_model()
    ids = torch.randint(64, (400,), generator=torch.Generator().manual_seed(0)).tolist()
    fitted = PrefixKV().fit(Budget("rows", 40), model.shape(400))
    with Session(model, fitted) as session:
        session.prefill(ids)
        found = session.memory()
    layer = found.full_bytes / len(model.layers)
    assert found.stored_bytes == found.full_bytes * 40 / 400
    assert found.peak_bytes < found.full_bytes * 0.2 + layer * 1.25  # keys, values, and a score per entry


def test_layers_with_unequal_heads_are_refused():
    """One budget in entries would not be one budget in bytes."""
    layers = tuple(LayerShape(kv_heads=x, query_heads=4, key_dim=8, value_dim=8, window=None) for x in (1, 2))
    with pytest.raises(UserError, match=r"equal heads.*such as snapkv"):
        CAKE().fit(Budget("rows", 40), Shape(length=100, layers=layers, itemsize=4))
