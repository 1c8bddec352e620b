"""InstInfer: scores from a few channels, and the mean value for what is not read."""

from __future__ import annotations

import pytest
import torch

from kvbench.errors import UserError
from kvbench.hf.tiny import tiny_model
from kvbench.method import Budget, Moment
from kvbench.methods.retrieval.instinfer import InstInfer


def draw(*shape, seed=0):
    """Normal random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def naive(query, keys, values, channels, rows, last, scale):
    """One KV head and one token in plain Python numbers. query: [G, D]; keys: [n, D]; values: [n, D_v]"""
    size = query.abs().sum(0)
    best = sorted(range(len(size)), key=lambda c: -size[c])[:channels]
    shares = []
    for q in query:
        covered = q[best].abs().sum() / q.abs().sum()
        shares.append(torch.stack([q[best] @ k[best] * scale / covered.sqrt() for k in keys]).softmax(0))
    total = sum(shares)
    recent = list(range(len(keys) - last, len(keys)))
    others = sorted(range(len(keys) - last), key=lambda i: -total[i])[: rows - last]
    chosen = sorted(others + recent)
    outputs = []
    for q, share in zip(query, shares, strict=True):
        weights = torch.stack([q @ keys[i] * scale for i in chosen]).softmax(0)
        exact = sum(w * values[i] for w, i in zip(weights, chosen, strict=True))
        alpha = share[chosen].sum()
        outputs.append(alpha * exact + (1 - alpha) * values.mean(0))
    return torch.stack(outputs)


def answer(method, make_step, count=3):
    """Outputs of the new tokens of one layer, and what they were computed from."""
    key, value = draw(1, 2, 30, 8, seed=1), draw(1, 2, 30, 8, seed=2)
    kv = method.layer(0)
    step = make_step(draw(1, 4, 30, 8), key, value, scale=0.35)
    kv.append(step)
    method.evict(kv, step)
    more = make_step(
        2 * draw(1, 4, count, 8, seed=3), draw(1, 2, count, 8, seed=4), draw(1, 2, count, 8, seed=5), before=30,
        moment=Moment.TURN_END, scale=0.35,
    )
    kv.append(more)
    return method.attend(kv, more), more, torch.cat([key, more.key], 2), torch.cat([value, more.value], 2), kv


def test_outputs_are_those_of_the_definition(make_step):
    """Three tokens, two KV heads and their groups, against the definition in plain numbers."""
    method = InstInfer(rows=9, length=30, key_channels=3, last=2)
    output, step, keys, values, _ = answer(method, make_step)
    for t in range(3):
        for head in range(2):
            wanted = naive(
                step.query[0, head * 2 : head * 2 + 2, t], keys[0, head, : 31 + t], values[0, head, : 31 + t], 3, 9, 2,
                0.35,
            )
            assert torch.allclose(output[0, head * 2 : head * 2 + 2, t], wanted, atol=1e-5)


def test_the_mean_value_is_there(make_step, monkeypatch):
    """A planted fault: with the sum of the values lost, the outputs are not those of the definition."""
    method = InstInfer(rows=9, length=30, key_channels=3, last=2)
    right = answer(method, make_step)[0]
    monkeypatch.setattr("kvbench.methods.retrieval.instinfer.ChannelKV.add_value", lambda _, value: value * 0)
    assert (answer(method, make_step)[0] - right).abs().max() > 1e-2


def test_all_channels_and_entries_are_dense(make_step):
    """With every channel and every entry the output is that of full attention."""
    output, step, *_, kv = answer(InstInfer(rows=29, length=30, key_channels=8, last=2), make_step)
    assert kv.selective
    big = InstInfer(rows=100, length=30, key_channels=8, last=2)
    wanted = kv.attend(step)
    assert torch.allclose(big.attend(kv, step), wanted, atol=1e-5)
    assert not torch.allclose(output, wanted, atol=1e-5)


def test_bytes_read_are_channels_entries_and_a_sum(make_step):
    """Three of eight channels of all keys, nine entries, and the sum of the values, per KV head in float32."""
    *_, kv = answer(InstInfer(rows=9, length=30, key_channels=3, last=2), make_step, count=1)
    assert kv.read_bytes() == 2 * (31 * 3 * 4 + 9 * 2 * 8 * 4 + 8 * 4)


def test_more_channels_than_there_are_is_refused():
    """With the number that the model has."""
    with pytest.raises(UserError, match="channels is 17, and keys of the model have 16"):
        InstInfer(channels=17).fit(Budget("rows", 10), tiny_model().shape(100))


def test_a_head_whose_keys_another_head_outvotes_gets_the_mean_value(make_step):
    """Two heads of a group each need one key alone, and one is read: the other head's share of it is zero."""
    key, value = torch.zeros(1, 1, 10, 4), draw(1, 1, 10, 4)
    key[0, 0, 2, 0] = key[0, 0, 5, 1] = 300.0
    method = InstInfer(rows=2, length=10, key_channels=4, last=1)
    kv, step = method.layer(0), make_step(torch.zeros(1, 2, 10, 4), key, value)
    kv.append(step)
    method.evict(kv, step)
    more = make_step(
        torch.eye(4)[None, :2, None], torch.zeros(1, 1, 1, 4), draw(1, 1, 1, 4, seed=1), before=10,
        moment=Moment.DECODE,
    )
    kv.append(more)
    found = method.attend(kv, more)[0, :, 0]
    mean = torch.cat([value, more.value], 2)[0, 0].mean(0)
    torch.testing.assert_close(found, torch.stack([value[0, 0, 2], mean]))
