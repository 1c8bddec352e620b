"""WindowKV: whole windows, groups of layers with the same ones, and budgets that fall from group to group."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from kvbench.budget import LayerShape, Shape
from kvbench.method import Budget
from kvbench.methods.allocation.windowkv import WindowKV, score_windows
from kvbench.store.scores import attention_mass_of

LAYERS, TOKENS = 6, 90


def draw(*shape, seed=0):
    """Normal random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_shape(layers, length):
    """A model of equal layers."""
    layer = LayerShape(kv_heads=2, query_heads=4, key_dim=8, value_dim=8, window=None)
    return Shape(length=length, layers=(layer,) * layers, itemsize=4)


def run(method, make_step):
    """Positions kept in each layer, and the stores."""
    fitted = method.fit(Budget("rows", 40), make_shape(LAYERS, TOKENS))
    stores = [fitted.layer(i) for i in range(LAYERS)]
    for i, kv in enumerate(stores):
        step = replace(make_step(draw(1, 4, TOKENS, 8, seed=i), draw(1, 2, TOKENS, 8, seed=10 + i)), layer=i)
        kv.track = True
        kv.append(step)
        fitted.evict(kv, step)
        fitted.end_of_layer(stores, step)
        kv.settle()
    return fitted, [x.positions for x in stores], stores


def test_budgets_fall_from_group_to_group():
    """The authors' numbers for 32 layers, groups of 8 and a mean of 2,048: 2926, 2341, 1756, 1170; the sum is exact."""
    fitted = WindowKV(window=16).fit(Budget("rows", 2064), make_shape(32, 10_000))
    rows = [x - 16 for x in fitted.layer_rows]
    for group, wanted in enumerate((2926, 2341, 1756, 1170)):
        assert all(abs(x - wanted) <= 1 for x in rows[8 * group : 8 * group + 8])
    assert sum(rows) == 2048 * 32


@pytest.mark.parametrize("layers", [1, 2, 9, 17])
def test_any_number_of_layers_spends_the_budget(layers):
    """A last group may be smaller; a single one is uniform; no layer gets more than there is."""
    fitted = WindowKV().fit(Budget("rows", 80), make_shape(layers, 100))
    assert sum(fitted.layer_rows) == 80 * layers
    assert max(fitted.layer_rows) <= 100


def test_the_layers_of_a_group_keep_the_same_windows(make_step):
    """Layers 0 to 2 hold a prefix of one order of windows, 3 to 5 of another, in all heads; the orders are freed."""
    fitted, kept, stores = run(WindowKV(window=6, review=5, share=3), make_step)
    for group in ((0, 1, 2), (3, 4, 5)):
        sets = [set(kept[i][0, 0].tolist()) for i in group]
        sets.sort(key=len)
        assert all(x <= y for x, y in pairwise(sets))
    assert set(kept[0][0, 0].tolist()) != set(kept[3][0, 0].tolist())
    assert all(x[0, 0].equal(x[0, 1]) for x in kept)
    assert all(not x.state for x in stores)
    assert [x.shape[-1] for x in kept] == list(fitted.layer_rows)


def test_the_first_layer_of_a_group_chooses(make_step):
    """Its kept windows are those with the highest mean attention; another layer's own attention does not count."""
    fitted, kept, _ = run(WindowKV(window=6, review=5, share=3), make_step)
    for layer in (0, 3):
        step = make_step(draw(1, 4, TOKENS, 8, seed=layer), draw(1, 2, TOKENS, 8, seed=10 + layer))
        kv = fitted.layer(layer)
        kv.append(step)
        mass = attention_mass_of(kv.recent_queries, kv, step)[0, :, :84].mean(0)
        means = [mass[i : i + 5].mean().item() for i in range(0, 84, 5)]
        order = sorted(range(17), key=lambda i: -means[i])
        for member in range(layer, layer + 3):
            count = fitted.layer_rows[member] - 6
            tokens = [x for i in order for x in range(5 * i, min(5 * i + 5, 84))][:count]
            assert kept[member][0, 0].tolist() == sorted(tokens) + list(range(84, 90))


def test_windows_are_scored_by_all_tokens_or_the_best():
    """Two heads, windows of four and a last one of two: means of all tokens, and of the best half."""
    mass = torch.tensor([[[4.0, 0, 0, 0, 2, 2, 2, 0, 3, 1], [0, 0, 0, 0, 1, 1, 1, 1, 1, 1]]])
    assert score_windows(mass, 4, 1.0)[0].tolist() == [0.5, 1.25, 1.5]
    assert score_windows(mass, 4, 0.5)[0].tolist() == [1.0, 1.5, 2.0]
