"""CompressKV: which heads vote, that the others do not, and how retrieval heads are found."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from kvbench.errors import UserError
from kvbench.hf.tiny import tiny_model
from kvbench.kernels.dense_attention.naive import attention_weights
from kvbench.method import Moment
from kvbench.methods.allocation import compresskv
from kvbench.methods.allocation.compresskv import CompressKV, NeedleRecorder, find_scores, rank_heads
from kvbench.store.scores import attention_mass_of


def draw(*shape, seed=0):
    """Normal random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def kept(method, step):
    """Positions kept of a context, and the scores."""
    fitted = replace(method, rows=15, length=step.seen)
    kv = fitted.layer(0)
    kv.track = True
    kv.append(step)
    scores = fitted.score(kv, step)
    fitted.evict(kv, step)
    return kv.positions, scores


def test_the_voting_heads_choose_by_pooled_attention(make_step):
    """Naive mean over two of four heads of pooled means over the window; every head keeps the same."""
    query, key = draw(2, 4, 40, 8), draw(2, 2, 40, 8, seed=1)
    positions, scores = kept(CompressKV(window=5, kernel=3, heads=((1, 2),)), make_step(query, key, scale=0.5))
    mass = attention_weights(query[:, :, -5:], key, scale=0.5, seen=40).mean(3).flatten(1, 2)[:, [1, 2], :35].float()
    wanted = F.avg_pool1d(mass, 3, stride=1, padding=1).mean(1)
    assert torch.allclose(scores[:, 0, :35], wanted, atol=1e-5)
    assert positions[:, 0].equal(positions[:, 1])
    assert positions[:, 0, :10].equal(wanted.topk(10).indices.sort(-1).values.int())


@pytest.mark.parametrize("window", [None, 20])
def test_voters_are_scored_as_among_all_heads(make_step, window):
    """With positions, a soft cap and learned sinks."""
    step = make_step(draw(2, 6, 40, 8), draw(2, 2, 40, 8, seed=1), window=window, softcap=5.0, sinks=draw(6, seed=2))
    method = replace(CompressKV(window=5, kernel=1, heads=((0, 2, 4),)), rows=15, length=40)
    kv = method.layer(0)
    kv.track = True
    kv.append(step)
    wanted = attention_mass_of(kv.recent_queries, kv, step)[:, [0, 2, 4]].mean(1) / 5
    assert torch.allclose(method.score(kv, step)[:, 1, :35], wanted[:, :35], atol=1e-6)


def test_the_other_heads_change_nothing(make_step):
    """With other queries in the heads that do not vote, the same entries stay; with others in a voter, not."""
    query, key = draw(1, 4, 40, 8), draw(1, 2, 40, 8, seed=1)
    method = CompressKV(window=5, heads=((1, 2),))
    first, _ = kept(method, make_step(query, key))
    for changed, same in (([0, 3], True), ([1], False)):
        other = query.clone()
        other[:, changed] = draw(1, len(changed), 40, 8, seed=7) * 3
        assert kept(method, make_step(other, key))[0].equal(first) is same


def test_a_head_that_attends_to_the_needle_scores_one(make_step):
    """A head that copies: all its attention is on the needle, the other head's on the first token. In chunks too."""
    key = torch.zeros(1, 1, 12, 2)
    key[:, :, 3:6, 0], key[:, :, 0, 1] = 50.0, 50.0
    query = torch.zeros(1, 2, 12, 2)
    query[:, 0, :, 0], query[:, 1, :, 1] = 1.0, 1.0
    recorder = NeedleRecorder(start=3, needle=3, copy=9)
    kv = recorder.layer(0)
    for low, high in ((0, 9), (9, 12)):
        step = make_step(query[:, :, low:high], key[:, :, low:high], before=low, moment=Moment.CONTEXT_CHUNK)
        kv.append(step)
        recorder.attend(kv, step)
    assert kv.state["score"].tolist() == pytest.approx([3, 0], abs=1e-4)


def test_scores_are_shares_and_chunks_do_not_matter(monkeypatch):
    """Each is a mean of attention shares, from 0 to 1, whatever the chunks of the calibration."""
    whole = find_scores(tiny_model(), 128, 16, 2)
    monkeypatch.setattr(compresskv, "CHUNK", 11)
    for one, other in zip(find_scores(tiny_model(), 128, 16, 2), whole, strict=True):
        assert torch.allclose(one, other, atol=1e-5)
        assert one.min() >= 0 and one.max() <= 1
        assert one.std() > 0


def test_heads_are_ranked_bound_and_restored():
    """The best heads of each layer, ascending; a result's heads fit the model or are refused."""
    assert rank_heads([torch.tensor([0.1, 0.5, 0.3])]) == ((1, 2, 0),)
    model = tiny_model()
    bound = CompressKV(tokens=128, needle=16, voters=2).bind(model)
    assert [len(x) for x in bound.heads] == [2, 2]
    shape = model.shape(100)
    assert CompressKV().rebind({"heads": [[0, 3], [1, 2]]}, shape).heads == ((0, 3), (1, 2))
    for wrong in ([[0, 4], [1, 2]], [[0, 1]]):
        with pytest.raises(UserError, match="do not name query heads"):
            CompressKV().rebind({"heads": wrong}, shape)


def test_a_needle_without_room_is_refused():
    """The message names a needle that fits."""
    with pytest.raises(UserError, match="Use --set needle=16 or less"):
        CompressKV(tokens=64, needle=32).bind(tiny_model())
