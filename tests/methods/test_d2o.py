"""D2O: merges by hand and against loops, budgets over layers, and layers that are left whole."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kvbench.budget import LayerShape, Shape
from kvbench.errors import UserError
from kvbench.method import Budget
from kvbench.methods.merging.d2o import D2O, inequality, merge_similar

LAYERS, TOKENS, ROWS = 4, 40, 16


def draw(*shape, seed=0):
    """Normal random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_shape(layers, length=TOKENS):
    """A model of equal layers."""
    layer = LayerShape(kv_heads=4, query_heads=4, key_dim=8, value_dim=8, window=None)
    return Shape(length=length, layers=(layer,) * layers, itemsize=4)


def run(method, make_step, layers=LAYERS):
    """Stores after all layers, with positions."""
    fitted = method.fit(Budget("rows", ROWS), make_shape(layers))
    stores = [fitted.layer(i) for i in range(layers)]
    for i, kv in enumerate(stores):
        step = make_step(draw(1, 4, TOKENS, 8, seed=i) * (i + 1), draw(1, 4, TOKENS, 8, seed=50 + i),
                         draw(1, 4, TOKENS, 8, seed=90 + i))
        step = replace(step, layer=i)
        kv.track = True
        kv.append(step)
        fitted.evict(kv, step)
        fitted.end_of_layer(stores, step)
        kv.settle()
    return fitted, stores


def test_a_merge_by_hand():
    """(1.2, 1.6) has cosine .6 with the kept (1, 0): weights .5987 and .4013 give (1.0803, .6421)."""
    keys = torch.tensor([[1.0, 0.0], [1.2, 1.6]])[None, None]
    found, values = merge_similar(keys, keys + 1, torch.tensor([[[True, False]]]))
    share = math.e / (math.e + math.exp(0.6))
    assert found[0, 0, 0].tolist() == pytest.approx([1.0803, 0.6421], abs=1e-4)
    assert values[0, 0, 0].tolist() == pytest.approx([share * 2 + (1 - share) * 2.2, share + (1 - share) * 2.6])


def test_merging_follows_its_equations():
    """Loops over sequences, heads and evicted entries, with the mean cosine of the sequence as threshold."""
    keys, values = draw(2, 2, 14, 4), draw(2, 2, 14, 4, seed=1)
    kept = draw(2, 2, 14, seed=2).argsort(-1).argsort(-1) < 6
    found = merge_similar(keys, values, kept)
    for batch in range(2):
        pairs = []
        for head in range(2):
            places = [i for i in range(14) if kept[batch, head, i]]
            for i in range(14):
                if i not in places:
                    cosines = torch.cosine_similarity(keys[batch, head, i], keys[batch, head, places], dim=-1)
                    pairs.append((head, i, places[int(cosines.argmax())], cosines.max().item()))
        threshold = sum(x[3] for x in pairs) / len(pairs)
        for rows, result in zip((keys, values), found, strict=True):
            for head in range(2):
                for place in [i for i in range(14) if kept[batch, head, i]]:
                    mine = [(i, u) for h, i, j, u in pairs if (h, j) == (head, place) and u >= threshold]
                    total = math.e + sum(math.exp(u) for _, u in mine)
                    wanted = math.e * rows[batch, head, place] / total
                    for i, u in mine:
                        wanted = wanted + math.exp(u) * rows[batch, head, i] / total
                    assert torch.allclose(result[batch, head, place], wanted, atol=1e-5)


def test_equal_values_stay_equal():
    """Weights add up to one; by the authors' rule values would shrink."""
    keys = draw(1, 2, 20, 8)
    kept = torch.arange(20).expand(1, 2, -1) % 3 == 0
    _, values = merge_similar(keys, torch.full((1, 2, 20, 8), 3.0), kept)
    assert torch.allclose(values, torch.full_like(values, 3.0))


def test_inequality_is_scaled_to_the_heads():
    """Variances 1, 3 and 5 become 0, .5 and 1: their mean is .5, and equal heads give 0."""
    sums = torch.tensor([[[-1.0, 0, 1], [-1, 0, 1], [-1, 0, 1]]]) * torch.tensor([1.0, 3, 5]).sqrt().view(1, 3, 1)
    assert inequality(sums).item() == pytest.approx(0.5, abs=1e-6)
    assert inequality(sums[:, :1].expand(-1, 3, -1)).item() == 0
    assert inequality(sums[:, :2]).item() == pytest.approx(0.5, abs=1e-6)  # as of any two heads that differ


@pytest.mark.parametrize("merge", [True, False])
def test_the_budget_sinks_and_recent_entries_are_kept(make_step, merge):
    """The total is the budget, layers differ, and positions do not depend on merging; only keys and values do."""
    fitted, stores = run(D2O(merge=merge), make_step)
    sizes = [x.n for x in stores]
    assert sum(sizes) == ROWS * LAYERS
    assert len(set(sizes)) > 1
    for kv in stores:
        recent = round(kv.n * 0.5)
        assert (kv.positions[..., :4] == torch.arange(4)).all()
        assert (kv.positions[..., -recent:] == torch.arange(TOKENS - recent, TOKENS)).all()
        assert not kv.state
    plain = run(D2O(merge=False), make_step)[1]
    assert all(x.positions.equal(y.positions) for x, y in zip(stores, plain, strict=True))
    assert all(x.keys.equal(y.keys) is not merge for x, y in zip(stores, plain, strict=True))
    assert fitted.pooled == (0, 1, 2, 3)


def test_layers_with_unequal_heads_keep_fewer_entries(make_step):
    """The order of the budgets is the reverse of that of the inequality of heads."""
    _, stores = run(D2O(), make_step)
    unequal = []
    for i in range(LAYERS):
        kv = D2O().layer(i)
        kv.append(make_step(draw(1, 4, TOKENS, 8, seed=i) * (i + 1), draw(1, 4, TOKENS, 8, seed=50 + i)))
        unequal.append(inequality(kv.scores).item())
    order = sorted(range(LAYERS), key=lambda i: unequal[i])
    sizes = [stores[i].n for i in order]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1]


def test_layers_can_be_left_whole(make_step):
    """One of four layers keeps everything; the others share what is left, or a small budget is refused by name."""
    fitted, stores = run(D2O(whole=(0,), sinks=1), make_step)
    assert stores[0].n == TOKENS
    assert sum(x.n for x in stores[1:]) == fitted.shared_rows * 3
    assert ROWS * LAYERS - 3 < TOKENS + fitted.shared_rows * 3 <= ROWS * LAYERS
    with pytest.raises(UserError, match=r"Use --budget (\d+) or more, or --set whole"):
        D2O(whole=(0, 1)).fit(Budget("rows", ROWS), make_shape(LAYERS))
    with pytest.raises(UserError, match="whole names layer 4 of a model of 4"):
        D2O(whole=(4,)).fit(Budget("rows", ROWS), make_shape(LAYERS))


def test_the_budget_that_a_refusal_names_is_enough():
    """On 30 layers the authors' three are whole."""
    with pytest.raises(UserError) as refusal:
        D2O().fit(Budget("rows", 100), make_shape(30, 1000))
    least = int(str(refusal.value).split("--budget ")[1].split()[0])
    assert D2O().fit(Budget("rows", least), make_shape(30, 1000)).shared_rows >= 6
    with pytest.raises(UserError):
        D2O().fit(Budget("rows", least - 1), make_shape(30, 1000))
