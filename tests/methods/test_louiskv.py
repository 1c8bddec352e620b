"""LouisKV: when clusters are chosen again, which ones, and that a repeated choice is the same."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf.tiny import VOCABULARY, tiny_model
from kvbench.method import Budget, Moment
from kvbench.methods.baseline.full import Full
from kvbench.methods.retrieval import louiskv
from kvbench.methods.retrieval.louiskv import CosineRecorder, LouisKV
from kvbench.store.chosen import ChosenKV
from kvbench.techniques.calibration import calibration_ids


def draw(*shape, seed=0):
    """Normal random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ids(count, seed=1):
    """Random tokens."""
    return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def started(make_step, rows=12, turn=0.7):
    """A layer of one sequence and one KV head with 64 entries, two sinks and two recent ones."""
    method = LouisKV(sinks=2, recent=2, cluster=4, rows=rows, length=64, turn=turn)
    kv = method.layer(0)
    step = make_step(draw(1, 2, 64, 8), draw(1, 1, 64, 8, seed=1), draw(1, 1, 64, 8, seed=2))
    kv.append(step)
    method.evict(kv, step)
    return method, kv


def ask(method, kv, make_step, query):
    """One token with this query."""
    step = make_step(
        query.view(1, 2, 1, 8), draw(1, 1, 1, 8, seed=kv.n), before=kv.n, moment=Moment.DECODE,
    )
    kv.append(step)
    return method.attend(kv, step)


def test_entries_stay_until_the_query_turns(make_step):
    """The same direction keeps the choice, at any length; the opposite one chooses again."""
    method, kv = started(make_step)
    query = draw(2, 8, seed=3)
    ask(method, kv, make_step, query)
    first = kv.state["chosen"].clone()
    ask(method, kv, make_step, 3 * query)
    assert kv.reads["retrievals"] == 1
    assert kv.state["chosen"].equal(first)
    ask(method, kv, make_step, -query)
    assert kv.reads["retrievals"] == 2
    assert not kv.state["chosen"].equal(first)


def test_the_lowest_threshold_chooses_once_and_the_highest_every_time(make_step):
    """Of six tokens in different directions."""
    for threshold, wanted in ((-1.0, 1), (1.0, 6)):
        method, kv = started(make_step, turn=threshold)
        for seed in range(6):
            ask(method, kv, make_step, draw(2, 8, seed=seed))
        assert kv.reads["retrievals"] == wanted


def test_a_step_without_a_choice_reads_entries_only(make_step):
    """12 entries of the context and the later ones; a step that chooses also reads every center and offset."""
    method, kv = started(make_step)
    query = draw(2, 8, seed=3)
    ask(method, kv, make_step, query)
    entry, index = 2 * 8 * 4, 15 * 8 * 4 + 16 * 4
    assert kv.reads["bytes"] == 13 * entry + index
    ask(method, kv, make_step, query)
    assert kv.reads["bytes"] == (13 + 14) * entry + index


def test_the_threshold_is_calibrated_to_a_share_of_the_tokens():
    """On the text of the calibration that share of the tokens chooses again, over both layers, in one chunk or two."""
    model = tiny_model()
    text = calibration_ids(model, 700)
    with Session(model, CosineRecorder(), capacity=700) as session:
        session.forward(text, Moment.CONTEXT_CHUNK)
        cosines = torch.cat([x.state["cosines"] for x in session.layers])
    assert len(cosines) == 2 * 699
    for rate in (0.1, 0.5):
        bound = LouisKV(rate=rate, tokens=700).bind(model)
        assert float((cosines < bound.turn).float().mean()) == pytest.approx(rate, abs=0.005)


def test_a_given_threshold_is_not_calibrated(monkeypatch):
    """It is the one that decides."""
    monkeypatch.setattr(louiskv, "calibrate", None)
    assert LouisKV(threshold=0.7).bind(tiny_model()).turn == 0.7
    assert LouisKV(threshold=0.7).own_card.calibration is None
    assert LouisKV().own_card == LouisKV.card


def test_a_result_gives_the_threshold_back():
    """Without a model; a number that is no cosine is refused."""
    model = tiny_model()
    shape, bound = model.shape(140), LouisKV(tokens=64).bind(model)
    assert LouisKV(tokens=64).rebind(bound.resolution, shape) == bound
    for wrong in (1.5, "0.7"):
        with pytest.raises(UserError, match=f"turn {wrong} must be a number from -1 to 1"):
            LouisKV().rebind({"turn": wrong}, shape)


def test_clusters_divide_the_entries_and_centers_are_their_means(make_step):
    """Every entry of the context is held once; each center is the mean of the keys between its offsets."""
    _, kv = started(make_step)
    keys = draw(1, 1, 64, 8, seed=1)
    assert kv.keys[0, 0].sort(0).values.equal(keys[0, 0].sort(0).values)
    assert kv.keys[:, :, :2].equal(keys[:, :, :2])
    assert kv.keys[:, :, 62:].equal(keys[:, :, 62:])
    offsets = kv.index["offsets"][0, 0].tolist()
    assert (offsets[0], offsets[-1]) == (0, 60)
    for i, (low, high) in enumerate(pairwise(offsets)):
        if low < high:
            members = kv.keys[0, 0, 2 + low : 2 + high]
            assert torch.allclose(kv.index["centers"][0, 0, i], members.mean(0), atol=1e-6)


def test_a_planted_cluster_is_found(make_step):
    """Eight equal keys at places far apart are read by the query that they answer."""
    keys, values = 0.1 * draw(1, 1, 64, 8), draw(1, 1, 64, 8, seed=2)
    places = [5, 11, 19, 23, 37, 41, 52, 60]
    keys[0, 0, places] = 4.0
    method = LouisKV(sinks=2, recent=2, cluster=4, rows=12, length=64, turn=0.7)
    kv = method.layer(0)
    step = make_step(draw(1, 2, 64, 8), keys, values)
    kv.append(step)
    method.evict(kv, step)
    output = ask(method, kv, make_step, torch.ones(2, 8))
    assert torch.allclose(output[0, :, 0], values[0, 0, places].mean(0).expand(2, -1), atol=1e-3)


def test_the_mean_share_over_the_group_chooses(make_step):
    """Shares .6 .4 0 and 0 .5 .5 of two query heads: the second cluster has the largest mean, the first the maximum."""
    method, kv = started(make_step)
    kv.index = {"centers": torch.eye(8)[None, None, :3], "offsets": torch.tensor([[[0, 8, 16, 60]]])}
    query = torch.zeros(1, 2, 8)
    query[0, :, :3] = torch.tensor([[0.6, 0.4, 1e-9], [1e-9, 0.5, 0.5]]).log()
    chosen = method.choose(kv, query, torch.tensor([True]), 1.0)
    assert chosen[0, 0].tolist() == list(range(2 + 8, 2 + 16))


def test_every_cluster_is_the_full_cache(monkeypatch):
    """Always choosing, and with every entry of the context chosen: the full cache's logits."""
    model = tiny_model()
    method = LouisKV(threshold=1.0).bind(model).fit(Budget("rows", 139), model.shape(140))
    monkeypatch.setattr(LouisKV, "chosen", property(lambda _: 140 - 64))
    with Session(model, method, capacity=200) as ours, Session(model, Full(), capacity=200) as full:
        ours.prefill(ids(140)), full.prefill(ids(140))
        assert all(isinstance(x, ChosenKV) and x.selective for x in ours.layers)
        found, wanted = (x.forward(torch.tensor([ids(9, 2)]), Moment.TURN_END, keep=9) for x in (ours, full))
        assert ours.effect().facts["entries_skipped"] == 0
    assert (found - wanted).abs().max() < 1e-4
