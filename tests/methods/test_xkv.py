"""xKV: the factors of a group of layers, what they restore, and bytes."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf.tiny import VOCABULARY, tiny_model
from kvbench.kernels.lowrank_keys import factor_keys
from kvbench.methods.baseline.full import Full
from kvbench.methods.quantization.xkv import XKV, CrossLayerKV
from kvbench.store.entries import storage_bytes

LENGTH = 90
CONTEXT = torch.randint(VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(3)).tolist()


@contextmanager
def prefilled(method, model):
    """A session right after the context."""
    with Session(model, method.bind(model).fit(None, model.shape(LENGTH)), capacity=LENGTH + 20) as session:
        session.prefill(CONTEXT)
        yield session


def plain_entries(model):
    """Keys before rotation and values of every layer, from the full cache. [H_kv, n, D] each"""
    with Session(model, Full(), capacity=LENGTH) as session:
        session.prefill(CONTEXT)
        at = torch.arange(LENGTH)[None]
        return [
            (rope.rotate(x.keys, at, inverse=True)[0], x.values[0]) for x, rope in zip(session.layers, model.ropes,
                                                                                      strict=True)
        ]


@pytest.mark.parametrize("group", [1, 2])
def test_restored_entries_are_the_best_of_their_rank(group):
    """By a singular value decomposition over all heads and layers of a group, written out."""
    model = tiny_model()
    exact = plain_entries(model)
    with prefilled(XKV(group=group, key_rank=0.25, value_rank=0.5), model) as session:
        restored = [x.restore(0, LENGTH) for x in session.layers]
    for low in range(0, len(restored), group):
        own = range(low, low + group)
        for kind, share in ((0, 0.25), (1, 0.5)):
            joined = torch.cat([x for i in own for x in exact[i][kind]], dim=1).double()  # [n, channels]
            left, sizes, right = torch.linalg.svd(joined, full_matrices=False)
            rank = int(share * joined.shape[1])
            best = (left[:, :rank] * sizes[:rank]) @ right[:rank]
            found = []
            for i in own:
                entries = restored[i][kind]
                if kind == 0:
                    entries = model.ropes[i].rotate(entries, torch.arange(LENGTH)[None], inverse=True)
                found += list(entries[0])
            assert torch.allclose(torch.cat(found, dim=1).double(), best, atol=1e-4)


def test_layers_of_a_group_share_what_depends_on_the_token():
    """And each has a basis of its own."""
    with prefilled(XKV(), tiny_model()) as session:
        first, second = session.layers
        assert all(a is b for a, b in zip(first.factors, second.factors, strict=True))
        assert not any(a.equal(b) for a, b in zip(first.bases, second.bases, strict=True))
    with prefilled(XKV(group=1), tiny_model()) as session:
        first, second = session.layers
        assert not any(a.equal(b) for a, b in zip(first.factors, second.factors, strict=True))


def test_whole_rank_is_the_full_cache():
    """Up to rounding, over a question and an answer."""
    model, logits = tiny_model(), []
    for method in (XKV(key_rank=1, value_rank=1), Full()):
        with prefilled(method, model) as session:
            logits.append(session.score([5, 6, 7, 8]))
    assert torch.allclose(*logits, atol=1e-4)


def test_a_bias_of_keys_costs_no_precision_in_16_bits(make_step):
    """Entries are the best of their rank to bfloat16 of what differs between tokens, not of a bias of 100 or 300."""
    entries = torch.randn(1, 2, 200, 16, generator=torch.Generator().manual_seed(0))
    entries[..., [3, 7, 15]] += torch.tensor([300.0, -100, 100])
    rope, store = tiny_model().ropes[0], CrossLayerKV()
    keys = rope.rotate(entries, torch.arange(200)[None]).bfloat16()
    step = make_step(keys, keys, entries.bfloat16(), rope=rope)
    store.append(step)
    exact = [x.float() for x in store.plain()]
    XKV(group=1, key_rank=0.5, value_rank=0.5).end_of_layer([store], step)
    keys, values = store.restore(0, 200)
    for found, wanted in zip((rope.rotate(keys, step.positions, inverse=True), values), exact, strict=True):
        factors, basis = factor_keys(wanted, 16)
        assert (found - factors[:, None] @ basis).square().mean().sqrt() < 0.01


def test_stored_bytes_are_those_of_distinct_storages():
    """The factors once, though both layers hold them, and four bytes a channel for offsets; each layer reads them."""
    model = tiny_model()
    with prefilled(XKV(key_rank=0.25, value_rank=0.5), model) as session:
        held = storage_bytes(x for kv in session.layers for x in (*kv.factors, *kv.bases, *kv.offsets))
        memory = session.memory()
    channels = 2 * 2 * 16  # layers, KV heads, width
    ranks = channels // 4 + channels // 2
    assert memory.stored_bytes == held == 4 * ranks * (LENGTH + channels) + 2 * 4 * channels
    assert memory.read_bytes_per_step == 4 * ranks * (2 * LENGTH + channels) + 2 * 4 * channels
    fitted = XKV(key_rank=0.25, value_rank=0.5).fit(None, model.shape(LENGTH))
    assert memory.read_bytes_per_step == fitted.declared_read_bytes(model.shape(LENGTH))


def test_layers_that_cannot_share_a_basis_and_empty_ranks_are_refused():
    shape = tiny_model().shape(LENGTH)
    unequal = replace(shape, layers=(shape.layers[0], replace(shape.layers[1], kv_heads=1)))
    with pytest.raises(UserError, match="cannot share a basis"):
        XKV().fit(None, unequal)
    with pytest.raises(UserError, match=r"key_rank=0\.001 of 64 channels is less than one"):
        XKV(key_rank=0.001).fit(None, shape)
