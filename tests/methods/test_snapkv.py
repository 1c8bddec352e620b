"""SnapKV against its card: planted keys, the last softmax row, the whole pipeline by hand, grouped heads."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf.tiny import tiny_model
from kvbench.kernels.dense_attention.naive import attention_weights
from kvbench.method import Budget, Moment
from kvbench.methods.eviction.snapkv import SnapKV


def random_rows(rows=40, heads=4, kv_heads=2, width=8, batch=2):
    """Queries and keys."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, heads, rows, width, generator=generator), torch.randn(
        batch, kv_heads, rows, width, generator=generator
    )


def evicted(method, rows, *steps):
    """Positions kept by a layer that these steps went through. [B, H_kv, rows]"""
    method = replace(method, rows=rows, length=steps[-1].seen)
    kv = method.layer(0)
    kv.track = True
    for step in steps:
        kv.append(step)
        method.evict(kv, step)
    return kv.positions


@pytest.mark.parametrize("kernel", [1, 3, 7])
@pytest.mark.parametrize("planted", [6, 20, 29])
def test_a_planted_key_stays_with_its_neighbors(kernel, planted, make_step):
    """The key that the window looks for stays, with half a kernel on either side, and nothing else does."""
    query, key = torch.zeros(1, 2, 40, 8), torch.zeros(1, 2, 40, 8)
    query[:, :, -4:, 0] = 10
    key[:, :, planted, 0] = 10
    kept = evicted(SnapKV(window=4, kernel=kernel), 4 + kernel, make_step(query, key))
    half = kernel // 2
    assert kept[0, 0].tolist() == [*range(planted - half, planted + half + 1), 36, 37, 38, 39]


def test_a_window_of_one_without_pooling_is_the_last_softmax_row(make_step):
    """With w = 1 and k = 1 the entries kept are the best of the last query's weights, and the last entry."""
    query, key = random_rows(heads=2, kv_heads=2)
    kept = evicted(SnapKV(window=1, kernel=1), 10, make_step(query, key))
    row = (query[:, :, -1:] @ key.mT).softmax(-1)[:, :, 0, :-1]
    best = row.topk(9).indices.sort(-1).values
    assert kept[..., :-1].equal(best.int())
    assert (kept[..., -1] == 39).all()


@pytest.mark.parametrize("cuts", [[40], [13, 27], [36, 2, 1, 1]], ids=str)
@pytest.mark.parametrize("pool", ["max", "avg"])
def test_scores_are_the_card_s_pipeline(pool, cuts, make_step):
    """Softmax over all entries, window dropped, averaged over it and the group, pooled; independent of chunks."""
    query, key = random_rows()
    weights = attention_weights(query[:, :, -6:], key, scale=0.7, seen=40)[..., :-6]  # [B, H_kv, G, w, n - w]
    mass = weights.mean(3).flatten(1, 2)
    function = F.max_pool1d if pool == "max" else F.avg_pool1d
    wanted = function(mass.unflatten(1, (2, 2)).mean(2), 5, stride=1, padding=2)
    method = SnapKV(window=6, kernel=5, pool=pool)
    kv, steps, start = method.layer(0), [], 0
    for i, cut in enumerate(cuts):
        part = slice(start, start + cut)
        steps.append(make_step(query[:, :, part], key[:, :, part], before=start, scale=0.7,
                               moment=Moment.CONTEXT_END if i == len(cuts) - 1 else Moment.CONTEXT_CHUNK))
        kv.append(steps[-1])
        start += cut
    scores = method.score(kv, steps[-1])
    assert torch.allclose(scores[..., :-6], wanted.float(), atol=1e-5)
    assert (scores[..., -6:] == torch.inf).all()
    best = wanted.float().argsort(dim=-1, descending=True, stable=True)[..., :10].sort(-1).values
    assert evicted(method, 16, *steps)[..., :-6].equal(best.int())


def test_the_mean_over_the_group_is_pooled_and_not_the_other_way_round(make_step):
    """One query head attends to entry 2, the other to 6: no entry between them gets more than they do.

    The heads' weights are 8 at their entry and 1 at the nine others, in 18ths. Their mean is 4.5 at both entries, and
    its maxima over five entries are 4.5 at entries 0 to 8. If heads were pooled first, both would have 8 at entry 4.
    """
    logits = torch.zeros(2, 10)
    logits[0, 2] = logits[1, 6] = math.log(8)
    key = torch.zeros(1, 1, 11, 2)
    key[0, 0, :10] = logits.T
    query = torch.zeros(1, 2, 11, 2)
    query[0, 0, -1, 0] = query[0, 1, -1, 1] = 1
    method = SnapKV(window=1, kernel=5)
    kv = method.layer(0)
    step = make_step(query, key)
    kv.append(step)
    scores = method.score(kv, step)[0, 0]
    assert torch.allclose(scores[:10] * 18, torch.tensor([4.5] * 9 + [1.0]))  # 18: the sum of a head's masses


def test_equal_query_heads_are_one(make_step):
    """A group of identical query heads keeps what a single one does."""
    query, key = random_rows(heads=2, kv_heads=2)
    one = evicted(SnapKV(window=4, kernel=3), 12, make_step(query, key))
    group = evicted(SnapKV(window=4, kernel=3), 12, make_step(query.repeat_interleave(3, dim=1), key))
    assert group.equal(one)


def test_later_turns_are_appended_whole():
    """After the context nothing is evicted, and the window's queries are freed."""
    model = tiny_model()
    method = SnapKV(window=4, kernel=3).fit(Budget("rows", 12), model.shape(40))
    with Session(model, method, capacity=80) as session:
        session.prefill(torch.arange(40)[None] % 31)
        assert all(store.recent_queries is None for store in session.layers)
        session.ask([1, 2, 3], 5, stop=frozenset())
        assert all(store.entries_kept() == [12 + 3 + 4] * 2 for store in session.layers)


@pytest.mark.parametrize("window", [3, 6, 12, 20])
def test_windows_about_a_sliding_layer_s(window):
    """Where a sliding layer holds fewer entries than the observation window wants, its entries and scores stay sane."""
    model = tiny_model(4, 2, 12)
    method = SnapKV(window=window, kernel=3).fit(Budget("rows", window + 1), model.shape(60))
    with Session(model, method, capacity=90, track=True) as session:
        session.prefill(torch.arange(60)[None] % 31)
        stored = min(12, window + 1)
        for store in session.layers:
            assert store.entries_kept() == [stored] * 2
            recent = min(stored, window)
            assert store.positions[0, 0, -recent:].tolist() == list(range(60 - recent, 60))
        assert session.ask([1, 2, 3], 5, stop=frozenset()).steps == 4


@pytest.mark.parametrize("settings", [{"window": 0}, {"kernel": 4}, {"kernel": 0}, {"kernel": -1}], ids=str)
def test_settings_without_a_meaning_are_refused(settings):
    """The message names the method, the setting and the value."""
    name, value = next(iter(settings.items()))
    with pytest.raises(UserError, match=f"snapkv: {name} must be .* got {value}"):
        SnapKV(**settings)
