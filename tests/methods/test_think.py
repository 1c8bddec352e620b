"""ThinK: which channels go, what they cost, and attention over thin keys."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf import Model
from kvbench.hf.tiny import tiny_model
from kvbench.kernels.dense_attention.naive import attention_weights
from kvbench.method import Moment
from kvbench.methods.channels.think import ThinK


def draw(*shape, seed=0):
    """Normal random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def store_after(method, *steps):
    """The store after these steps."""
    kv = method.layer(0)
    for step in steps:
        kv.append(step)
        method.evict(kv, step)
    return kv


def test_the_channels_with_the_smallest_products_go(make_step):
    """Squared queries 1 4 9 16 and squared keys 9 1 4 1 give 9 4 36 16: two of four channels stay, 2 and 3."""
    query = torch.tensor([1.0, 2, 3, 4]).expand(1, 2, 6, 4)
    key = torch.tensor([3.0, 1, 2, 1]).expand(1, 1, 6, 4)
    kv = store_after(ThinK(ratio=0.5, window=2, recent=2), make_step(query, key))
    assert kv.state["channels"].tolist() == [[[2, 3]]]
    assert kv.frozen.key.tolist() == [[2.0, 1.0]] * 4
    assert kv.n == 2


def test_only_the_window_s_queries_count_and_a_group_counts_together(make_step):
    """Naive means over the last three queries of both query heads of each KV head, chunks or not."""
    query, key = draw(2, 4, 30, 8), draw(2, 2, 30, 8, seed=1)
    products = torch.zeros(2, 2, 8)
    for head in range(2):
        for i in (2 * head, 2 * head + 1):
            products[:, head] += query[:, i, -3:].square().mean(1) / 2
        products[:, head] *= key[:, head].square().mean(1)
    wanted = products.topk(5).indices.sort(-1).values
    method = ThinK(ratio=0.4, window=3, recent=4)
    whole = store_after(method, make_step(query, key))
    first = make_step(query[:, :, :28], key[:, :, :28], moment=Moment.CONTEXT_CHUNK)
    parts = store_after(method, first, make_step(query[:, :, 28:], key[:, :, 28:], before=28))
    assert whole.state["channels"].equal(wanted)
    assert parts.state["channels"].equal(wanted)


def test_attention_is_that_of_keys_with_zeros(make_step):
    """Dropped channels act as zeros in all but the last keys of the context, at the scale of whole keys."""
    query, key, value = draw(1, 4, 30, 8), draw(1, 2, 30, 8, seed=1), draw(1, 2, 30, 8, seed=2)
    kv = store_after(ThinK(ratio=0.5, window=4, recent=5), make_step(query, key, value, scale=0.3))
    more = make_step(draw(1, 4, 3, 8, seed=3), draw(1, 2, 3, 8, seed=4), draw(1, 2, 3, 8, seed=5), before=30,
                     moment=Moment.TURN_END, scale=0.3)
    kv.append(more)
    found = kv.attend(more)
    mask = torch.zeros(1, 2, 1, 8).scatter(3, kv.state["channels"][:, :, None], 1.0)
    keys = torch.cat([key[:, :, :25] * mask, key[:, :, 25:], more.key], dim=2)
    values = torch.cat([value, more.value], dim=2)
    weights = attention_weights(more.query, keys, scale=0.3, seen=33).float()
    wanted = (weights @ values[:, :, None]).flatten(1, 2)
    assert torch.allclose(found, wanted, atol=1e-5)


def test_a_channel_of_zeros_is_no_loss():
    """A model whose keys have empty channels gives the same logits without them."""
    module = copy.deepcopy(tiny_model().module)
    empty = [0, 1, 2, 3, 8, 9, 10, 11]  # rotation pairs channel i with i + 8
    for layer in module.model.layers:
        layer.self_attn.k_proj.weight.data.view(2, 16, -1)[:, empty] = 0
    model, logits = Model.from_module(module, id="empty-channels"), []
    ids = torch.randint(64, (80,), generator=torch.Generator().manual_seed(0)).tolist()
    for ratio in (0.0, 0.5):
        with Session(model, ThinK(ratio=ratio, window=8, recent=4), capacity=100) as session:
            session.prefill(ids)
            logits.append(session.force([5, 6, 7]))
            assert session.effect().facts["thin_keys"] == (2 * 2 * 76 if ratio else 0)
    assert torch.allclose(logits[0], logits[1], atol=1e-5)


@pytest.mark.parametrize("ratio", [0.25, 0.4, 0.9])
def test_bytes_fall_with_the_channels(ratio):
    """Half of the bytes are keys, of which the share goes in all but the last 32 entries."""
    model = tiny_model()
    with Session(model, ThinK(ratio=ratio)) as session:
        session.prefill([x % 64 for x in range(1000)])
        found = session.memory()
    dropped = int(16 * ratio) / 16 * (1000 - 32) / 1000 / 2
    assert found.stored_bytes / found.full_bytes == pytest.approx(1 - dropped, abs=0.005)


def test_nothing_is_dropped_twice(make_step):
    """A second compression is refused."""
    step = make_step(draw(1, 2, 50, 8), draw(1, 2, 50, 8))
    kv = store_after(ThinK(), step)
    with pytest.raises(UserError, match="cannot be compressed a second time"):
        ThinK().evict(kv, replace(step, moment=Moment.RECOMPRESS))
