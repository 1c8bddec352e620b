"""Scores from keys and values alone: CUR, LagKV and leverage."""

from __future__ import annotations

import pytest
import torch

from kvbench.errors import UserError
from kvbench.hf.rope import NO_ROPE
from kvbench.hf.tiny import tiny_model
from kvbench.methods.eviction.cur import CUR
from kvbench.methods.eviction.lagkv import LagKV
from kvbench.methods.eviction.leverage import Leverage


def draw(*shape, seed=0):
    """Normal random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def score(method, step):
    """Scores of a context that came in one pass."""
    kv = method.layer(0)
    kv.append(step)
    return method.score(kv, step)


def test_cur_multiplies_shares_among_neighbors(make_step):
    """Squared norms 1, 3 | 2, 2 of keys and 1, 1 | 9, 1 of values, in groups of two, by hand."""
    key = torch.tensor([1.0, 3, 2, 2]).sqrt().view(1, 1, 4, 1)
    value = torch.tensor([1.0, 1, 9, 1]).sqrt().view(1, 1, 4, 1)
    step = make_step(key, key, value)
    shares = torch.tensor([1 / 4, 3 / 4, 1 / 2, 1 / 2]), torch.tensor([1 / 2, 1 / 2, 9 / 10, 1 / 10])
    wanted = {"product": shares[0] * shares[1], "mean": (shares[0] + shares[1]) / 2, "key": shares[0],
              "value": shares[1]}
    for kind, expected in wanted.items():
        assert torch.allclose(score(CUR(sinks=0, local=2, leverage=kind), step)[0, 0], expected)


def test_cur_s_last_group_may_be_shorter(make_step):
    """Three entries in groups of two: the third is alone and has a share of one."""
    key = draw(1, 2, 3, 4)
    assert torch.allclose(score(CUR(sinks=0, local=2), make_step(key, key))[..., 2], torch.ones(1, 2))


def test_cur_keeps_its_sinks_and_no_others(make_step):
    """The first tokens are infinite, whatever their norms; a key of zeros is no fault."""
    key = draw(1, 2, 40, 4)
    key[:, :, :16] = 0
    scores = score(CUR(), make_step(key, key))
    assert scores[..., :4].isinf().all()
    assert scores[..., 4:].isfinite().all()


def test_lagkv_follows_its_equations(make_step):
    """Naive loops over heads, parts and tokens: deviation of channels in the next part's range, softmax, rank."""
    key, value = draw(2, 2, 4 + 3 * 6 + 5, 8), draw(2, 2, 4 + 3 * 6 + 5, 8, seed=1)
    found = score(LagKV(lag=6), make_step(key, key, value))
    for batch in range(2):
        for head in range(2):
            for start in (4, 10):
                total = torch.zeros(6)
                for rows in (key[batch, head], value[batch, head]):
                    after = rows[start + 6 : start + 12]
                    low, high = after.min(0).values, after.max(0).values
                    spread = torch.stack([((x - low) / (high - low)).std() for x in rows[start : start + 6]])
                    total += spread.softmax(0) / 2
                ranks = [sum(bool(x < y) for x in total) / 6 for y in total]
                assert found[batch, head, start : start + 6].tolist() == pytest.approx(ranks)
    assert found[..., :4].isinf().all()
    assert (found[..., 16:] >= 1).all()


def test_a_channel_without_range_does_not_decide(make_step):
    """A channel that is constant in the next part, or everywhere, leaves scores that are numbers."""
    key = draw(1, 1, 4 + 3 * 6, 8)
    key[..., 0] = 0
    key[:, :, 10:16, 1] = 3
    scores = score(LagKV(lag=6), make_step(key, key))
    assert not scores.isnan().any()
    rest = key[0, 0, 4:16, 2:]
    low, high = rest[6:].min(0).values, rest[6:].max(0).values
    channels = torch.cat([torch.zeros(6, 2), (rest[:6] - low) / (high - low)], dim=1)
    spread = channels.std(-1)
    assert scores[0, 0, 4:10].argsort().equal(spread.argsort())


def test_lagkv_keeps_equally_many_of_every_part(make_step):
    """With room for the last parts and six more entries, each of two scored parts keeps its three best."""
    key = draw(1, 1, 4 + 3 * 6, 8)
    method = LagKV(lag=6, rows=4 + 6 + 6, length=22)
    kv = method.layer(0)
    kv.track = True
    step = make_step(key, key)
    kv.append(step)
    method.evict(kv, step)
    kept = kv.positions[0, 0].tolist()
    assert kept[:4] == [0, 1, 2, 3]
    assert kept[-6:] == list(range(16, 22))
    assert [sum(low <= x < low + 6 for x in kept) for low in (4, 10)] == [3, 3]


def test_lagkv_keeps_recent_entries_where_no_part_has_one_after_it(make_step):
    """A context shorter than two parts keeps sinks and the most recent entries, as kvpress does."""
    key = draw(1, 1, 20, 8)
    scores = score(LagKV(lag=10), make_step(key, key))[0, 0]
    assert scores[4:].argsort().tolist() == list(range(16))


def naive_leverage(keys, ridge):
    """The diagonal of X (X'X + ridge)^-1 X', with the whole n x n matrix, in float64."""
    centered = keys.double() - keys.double().mean(0)
    gram = centered.T @ centered + ridge * torch.eye(keys.shape[1], dtype=torch.float64)
    return (centered @ gram.inverse() @ centered.T).diagonal()


@pytest.mark.parametrize("rope", [NO_ROPE, tiny_model().ropes[0]], ids=["plain", "rotated"])
def test_leverage_is_the_hat_matrix_of_keys_before_rotation(make_step, rope):
    """Without a projection the scores are the exact diagonal; rotation of the keys does not enter."""
    plain = draw(2, 2, 30, 16)
    here = torch.arange(30).expand(2, -1)
    key = rope.rotate(plain, here)
    found = score(Leverage(sketch=16), make_step(key, key, rope=rope))
    for batch in range(2):
        for head in range(2):
            wanted = naive_leverage(plain[batch, head], 0.01)
            torch.testing.assert_close(found[batch, head].double(), wanted, atol=1e-4, rtol=1e-3)


def test_leverage_of_a_projection_follows_the_exact_one(make_step):
    """With 12 of 16 channels an outlier is still the first, and the sum of scores is near the number of channels."""
    key = draw(1, 1, 200, 16)
    key[0, 0, 77] *= 8
    found = score(Leverage(sketch=12), make_step(key, key))[0, 0]
    assert found.argmax() == 77
    assert found.sum().item() == pytest.approx(12, rel=1e-3)


def test_leverage_does_not_depend_on_blocks(make_step, monkeypatch):
    """The Gram matrix adds up over blocks of keys."""
    key = draw(1, 2, 50, 16)
    whole = score(Leverage(), make_step(key, key))
    monkeypatch.setattr("kvbench.methods.eviction.leverage.AT_ONCE", 7)
    assert torch.allclose(score(Leverage(), make_step(key, key)), whole, atol=1e-6)


@pytest.mark.parametrize("settings", [{"sketch": 0}, {"ridge": 0.0}], ids=str)
def test_leverage_refuses_settings_without_a_meaning(settings):
    """No channels, or no ridge, which lets equal keys divide by zero."""
    with pytest.raises(UserError, match=f"leverage: {next(iter(settings))} must be"):
        Leverage(**settings)
