"""Mustafar: which elements stay, what they cost, and attention over sparse entries."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf.tiny import tiny_model
from kvbench.kernels.bitmap_attention import SparseEntries
from kvbench.kernels.bitmap_attention.naive import expand
from kvbench.kernels.dense_attention.naive import attention_weights
from kvbench.method import Moment
from kvbench.methods.baseline.full import Full
from kvbench.methods.channels.mustafar import Mustafar

CONTEXT = [x % 64 for x in range(80)]


def draw(*shape, seed=0):
    """Normal random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def zero_smallest(x, dropped):
    """The vectors with this many elements of smallest magnitude set to zero, one vector at a time."""
    flat = [
        [0.0 if sorted(map(abs, vector)).index(abs(y)) < dropped else y for y in vector]
        for vector in x.flatten(0, -2).tolist()
    ]
    return torch.tensor(flat).view(x.shape)


def expand_held(kv, name, width):
    """The sparse keys or values with zeros."""
    held = kv.sparse.held()
    return expand(SparseEntries(held[f"{name}_bitmap"], held[f"{name}_values"], width)).float()


def store_after(method, *steps):
    """The store after these steps."""
    kv = method.layer(0)
    for step in steps:
        kv.append(step)
        method.evict(kv, step)
    return kv


def test_every_vector_keeps_its_largest_elements(make_step):
    """Half of the elements of a key and a quarter of those of a value go, in all but the last entries."""
    key, value = draw(2, 2, 20, 8, seed=1), draw(2, 2, 20, 8, seed=2)
    method = Mustafar(key_sparsity=0.5, value_sparsity=0.25, recent=3)
    kv = store_after(method, make_step(draw(2, 4, 20, 8), key, value))
    assert kv.n == 3
    assert kv.keys.equal(key[:, :, 17:])
    assert expand_held(kv, "key", 8).equal(zero_smallest(key[:, :, :17], 4))
    assert expand_held(kv, "value", 8).equal(zero_smallest(value[:, :, :17], 2))
    assert kv.facts()["elements_dropped"].value == 17 * 4 * (4 + 2)


@pytest.mark.parametrize(("sparsity", "kept"), [(0.5, 64), (0.7, 39), (0.0, 128)])
def test_the_count_of_kept_elements(sparsity, kept):
    """128 elements keep 128 - int(128 s): one less than the authors' threshold at 50 and 70 %."""
    shape = tiny_model().shape(64)
    layer = replace(shape.layers[0], key_dim=128, value_dim=128)
    assert Mustafar(key_sparsity=sparsity).layer(0).kept(layer) == (kept, 64)


def test_at_128_channels_half_of_the_elements_take_56_percent():
    """64 elements of 2 bytes and a bitmap of 16: 144 of 256 bytes."""
    shape = replace(tiny_model().shape(1032), itemsize=2)
    layer = replace(shape.layers[0], key_dim=128, value_dim=128, kv_heads=1)
    assert Mustafar().layer(0).bytes_for(layer, shape, 1032) == 1000 * 2 * 144 + 32 * 2 * 256


@pytest.mark.parametrize("window", [None, 12])
def test_attention_is_that_of_entries_with_zeros(make_step, window):
    """Dropped elements act as zeros, and a window counts tokens across the sparse and the whole entries."""
    query, key, value = draw(1, 4, 30, 8), draw(1, 2, 30, 8, seed=1), draw(1, 2, 30, 8, seed=2)
    method = Mustafar(key_sparsity=0.5, value_sparsity=0.5, recent=5)
    kv = store_after(method, make_step(query, key, value, scale=0.3))
    more = make_step(draw(1, 4, 3, 8, seed=3), draw(1, 2, 3, 8, seed=4), draw(1, 2, 3, 8, seed=5), before=30,
                     moment=Moment.TURN_END, scale=0.3, window=window)
    kv.append(more)
    keys = torch.cat([zero_smallest(key[:, :, :25], 4), key[:, :, 25:], more.key], dim=2)
    values = torch.cat([zero_smallest(value[:, :, :25], 4), value[:, :, 25:], more.value], dim=2)
    weights = attention_weights(more.query, keys, scale=0.3, seen=33, window=window).float()
    assert torch.allclose(kv.attend(more), (weights @ values[:, :, None]).flatten(1, 2), atol=1e-5)


def test_later_entries_are_pruned_in_blocks(make_step):
    """With four whole entries, a turn of five leaves five whole; the next one of three makes a block of four sparse."""
    method = Mustafar(recent=4)
    kv = store_after(method, make_step(draw(1, 4, 10, 8), draw(1, 2, 10, 8, seed=1)))
    assert (kv.sparse.n, kv.n) == (6, 4)
    for count, before, wanted in ((3, 10, (6, 7)), (2, 13, (10, 5))):
        step = make_step(draw(1, 4, count, 8), draw(1, 2, count, 8, seed=before), before=before, moment=Moment.TURN_END)
        kv.append(step)
        method.evict(kv, step)
        assert (kv.sparse.n, kv.n) == wanted


def test_a_fork_prunes_for_itself(make_step):
    """Sparse entries that one fork adds are not in the other."""
    method = Mustafar(recent=2)
    kv = store_after(method, make_step(draw(1, 4, 10, 8), draw(1, 2, 10, 8, seed=1)))
    before = expand_held(kv, "key", 8)
    step = make_step(draw(1, 4, 6, 8), draw(1, 2, 6, 8, seed=7), before=10, moment=Moment.TURN_END)
    other = kv.fork()
    other.append(step)
    method.evict(other, step)
    assert (other.sparse.n, kv.sparse.n) == (14, 8)
    assert expand_held(kv, "key", 8).equal(before)


def test_no_sparsity_is_the_full_cache():
    """Nothing is dropped: the same logits, and the settings count as lossless."""
    model = tiny_model()
    method = Mustafar(key_sparsity=0.0, value_sparsity=0.0)
    assert method.identity(model.shape(80))
    assert not Mustafar().identity(model.shape(80))
    assert Mustafar().identity(model.shape(32))
    logits = []
    for x in (method, Full()):
        with Session(model, x, capacity=90) as session:
            session.prefill(CONTEXT)
            logits.append(session.force([5, 6, 7]))
    assert torch.allclose(*logits, atol=1e-5)


def test_pruned_entries_are_not_compressed_again(make_step):
    """With --recompress a second compression is refused, not skipped."""
    method = Mustafar(recent=2)
    step = make_step(draw(1, 4, 10, 8), draw(1, 2, 10, 8, seed=1))
    kv = store_after(method, step)
    with pytest.raises(UserError, match="a second time"):
        method.evict(kv, step)
