"""FINCH: attention weighed by what each query sees, and keys that are moved together."""

from __future__ import annotations

import torch

from kvbench.engine.session import Session
from kvbench.hf.tiny import tiny_model
from kvbench.kernels.dense_attention.naive import attention_weights
from kvbench.method import Budget
from kvbench.methods.eviction.finch import Finch


def draw(*shape, seed=0):
    """Normal random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_each_query_s_weights_are_multiplied_by_the_keys_it_sees(make_step):
    """Loops over the last five queries: the first of them sees 36 of 40 keys, the last all."""
    query, key = draw(2, 4, 40, 8), draw(2, 2, 40, 8, seed=1)
    method, step = Finch(window=5), make_step(query, key, scale=0.5)
    kv = method.layer(0)
    kv.append(step)
    weights = attention_weights(query[:, :, -5:], key, scale=0.5, seen=40)
    wanted = sum(weights[:, :, :, i] * (36 + i) for i in range(5)).mean(2) / 5
    found = method.score(kv, step)
    assert torch.allclose(found[..., :-5].double(), wanted[..., :-5], atol=1e-5)
    assert found[..., -5:].isinf().all()


def test_kept_keys_are_moved_together(make_step):
    """The keys before rotation are those of the kept tokens, and the rotated ones stand at the last positions."""
    rope, here = tiny_model().ropes[0], torch.arange(40)[None]
    plain = draw(1, 2, 40, 16, seed=1)
    step = make_step(draw(1, 4, 40, 16), rope.rotate(plain, here), draw(1, 2, 40, 16, seed=2), rope=rope)
    method = Finch(window=5, rows=12, length=40)
    kv = method.layer(0)
    kv.track = True
    kv.append(step)
    method.evict(kv, step)
    for head in range(2):
        kept = plain[:, head : head + 1, kv.positions[0, head].long()]
        wanted = rope.rotate(kept, torch.arange(28, 40)[None])
        assert torch.allclose(kv.keys[:, head : head + 1], wanted, atol=1e-4)
    assert not kv.positions[0, 0].equal(kv.positions[0, 1])
    assert "kept" not in kv.state


def test_consecutive_entries_do_not_move():
    """The window and, in the first layer, its keys stay as they are; only older entries come closer."""
    model, found = tiny_model(), []
    ids = torch.randint(64, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    for way in ("consecutive", "original"):
        fitted = Finch(window=20, positions=way).fit(Budget("rows", 21), model.shape(60))
        with Session(model, fitted, capacity=70) as session:
            session.prefill(ids)
            found.append((session.layers[0].keys.clone(), session.force([1, 2, 3])))
    assert torch.equal(found[0][0][:, :, -20:], found[1][0][:, :, -20:])
    assert not torch.equal(found[0][0][:, :, 0], found[1][0][:, :, 0])
    assert not torch.equal(found[0][1], found[1][1])
