"""Stores of codes: attention is that over the decoded entries, in whatever coordinates they are decoded."""

from __future__ import annotations

import pytest
import torch

from kvbench.budget import LayerShape, Shape
from kvbench.hf.rope import NO_ROPE
from kvbench.kernels.dense_attention.naive import attention_weights
from kvbench.method import Moment, Step
from kvbench.methods.quantization.polarquant import PolarCoder
from kvbench.methods.quantization.qjl import SketchCoder
from kvbench.methods.quantization.turboquant import RotatedCoder
from kvbench.store import LayerKV, coded
from kvbench.store.coded import CodedKV
from kvbench.store.coders import GroupCoder, HadamardCoder, SplitCoder, as_half

CODERS = {
    "groups": (GroupCoder(4, None), GroupCoder(2, 8)), "hadamard": (HadamardCoder(4, 8, 0.9), HadamardCoder(3, None)),
    "rotated": (RotatedCoder(3), RotatedCoder(2)),
    "signs": (RotatedCoder(2, sign=True), RotatedCoder(3)), "sketch": (SketchCoder(4), GroupCoder(4, 16)),
    "angles": (PolarCoder((4, 2, 2, 2)), PolarCoder((4, 2))),
    "outliers": (SplitCoder(0.25, RotatedCoder(3, sign=True), RotatedCoder(2, sign=True)),
                 SplitCoder(0.25, RotatedCoder(4), RotatedCoder(3))),
}


def draw(*shape, seed=0):
    """Normal random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_step(query, key, value, before, **options):
    """A step of these tensors."""
    count = key.shape[2]
    return Step(
        layer=0, positions=torch.arange(before, before + count).expand(key.shape[0], -1), seen=before + count,
        query=query, key=key, value=value, scale=0.3, causal=True, rope=NO_ROPE,
        **{"moment": Moment.CONTEXT_END, "window": None, "softcap": None, "sinks": None, **options},
    )



@pytest.mark.parametrize("window", [None, 13])
@pytest.mark.parametrize("name", CODERS)
def test_attention_is_that_over_decoded_entries(name, window, monkeypatch):
    """In blocks of a few entries, for grouped queries, across the context and the entries of a later turn."""
    monkeypatch.setattr(coded, "BLOCK", 16 * 4 * 9)
    keys, values = CODERS[name]
    context = [draw(2, heads, 40, 16, seed=heads) for heads in (4, 2, 2)]
    kv = CodedKV(key_coder=keys, value_coder=values)
    kv.append(make_step(*context, 0))
    kv.encode()
    more = [draw(2, heads, 5, 16, seed=10 + heads) for heads in (4, 2, 2)]
    step = make_step(*more, 40, moment=Moment.TURN_END, window=window)
    kv.append(step)
    fitted = [x.fit(y) for x, y in zip((keys, values), context[1:], strict=True)]
    whole = [torch.cat([x, y], dim=2) for x, y in zip(context[1:], more[1:], strict=True)]
    units = torch.eye(16).expand(2, 2, -1, -1)
    seen = fitted[0].decode(fitted[0].encode(whole[0]), 16) @ fitted[0].turn(units).mT
    held = fitted[1].back(fitted[1].decode(fitted[1].encode(whole[1]), 16))
    weights = attention_weights(more[0], seen, scale=0.3, seen=45, window=window).float()
    assert torch.allclose(kv.attend(step), (weights @ held[:, :, None]).flatten(1, 2), atol=1e-5)


@pytest.mark.parametrize("window", [None, 13])
@pytest.mark.parametrize("name", CODERS)
def test_entries_since_the_last_whole_block_are_exact(name, window):
    """In blocks of 8: of 30 entries 24 are codes, of 39 at a turn's end 32; a fork goes on by itself."""
    keys, values = CODERS[name]
    context = [draw(2, heads, 30, 16, seed=heads) for heads in (4, 2, 2)]
    kv = CodedKV(key_coder=keys, value_coder=values, residual=8)
    kv.append(make_step(*context, 0))
    kv.encode()
    fitted = [x.fit(y) for x, y in zip((keys, values), context[1:], strict=True)]
    units, before, whole = torch.eye(16).expand(2, 2, -1, -1), 30, context[1:]
    for count, encoded in ((5, 24), (4, 24), (3, 32)):
        more = [draw(2, heads, count, 16, seed=10 * count + heads) for heads in (4, 2, 2)]
        step = make_step(*more, before, moment=Moment.TURN_END, window=window)
        kv, left = kv.fork(), kv
        left.append(make_step(*(-x for x in more), before))  # what a fork appends must not be seen by another
        kv.append(step)
        before += count
        whole = [torch.cat([x, y], dim=2) for x, y in zip(whole, more[1:], strict=True)]
        coded_keys = fitted[0].decode(fitted[0].encode(whole[0]), 16) @ fitted[0].turn(units).mT
        coded_values = fitted[1].back(fitted[1].decode(fitted[1].encode(whole[1]), 16))
        seen = torch.cat([coded_keys[:, :, :encoded], whole[0][:, :, encoded:]], dim=2)
        held = torch.cat([coded_values[:, :, :encoded], whole[1][:, :, encoded:]], dim=2)
        weights = attention_weights(more[0], seen, scale=0.3, seen=before, window=window).float()
        assert torch.allclose(kv.attend(step), (weights @ held[:, :, None]).flatten(1, 2), atol=1e-5)
        if count == 4:
            kv.flush()
            assert kv.n == 32
        assert kv.entries_kept() == [before] * 4


@pytest.mark.parametrize("residual", [0, 4])
@pytest.mark.parametrize("name", CODERS)
def test_bytes_are_those_of_the_formula(name, residual):
    """Every part of an entry and what is kept per head, for keys and values of other widths."""
    kv = CodedKV(key_coder=CODERS[name][0], value_coder=CODERS[name][1], sinks=2, residual=residual)
    kv.append(make_step(draw(1, 4, 9, 32), draw(1, 2, 9, 32), draw(1, 2, 9, 16), 0))
    kv.encode()
    layer = LayerShape(kv_heads=2, query_heads=4, key_dim=32, value_dim=16, window=None)
    assert kv.nbytes() - kv.spare_bytes() == kv.bytes_for(layer, Shape(9, (layer,), itemsize=4), 9)


def test_channels_are_split_by_norm_and_come_back():
    """The two loudest channels of each head go to the first coder; an output has every channel in its place."""
    x = draw(1, 2, 50, 8)
    x[:, 0, :, [1, 6]] *= 20
    x[:, 1, :, [0, 3]] *= 20
    coder = SplitCoder(0.25, GroupCoder(8, None), GroupCoder(8, None)).fit(x)
    assert coder.order[0].tolist() == [[1, 6, 0, 2, 3, 4, 5, 7], [0, 3, 1, 2, 4, 5, 6, 7]]
    back = coder.back(coder.decode(coder.encode(x), 8))
    assert torch.allclose(back, x, atol=0.3)
    quiet = back[:, 0, :, [0, 2, 3, 4, 5, 7]] - x[:, 0, :, [0, 2, 3, 4, 5, 7]]
    assert quiet.abs().max() < 0.03


def test_rounding_between_equally_loud_channels_changes_no_code():
    """The codes depend on which channels are apart, not on their order by norm, which rounding decides."""
    orders = []
    for factor in (0.999, 1.001):
        x = draw(1, 2, 50, 8)
        x[..., 1] *= 20
        x[..., 6] = x[..., 1] * factor
        orders.append(SplitCoder(0.25, GroupCoder(8, None), GroupCoder(8, None)).fit(x).order)
    assert orders[0].equal(orders[1])


@pytest.mark.parametrize("number", [7e4, -7e4])
def test_a_number_beyond_float16_is_refused(number):
    """It would become infinite; the message has the largest magnitude."""
    with pytest.raises(ValueError, match=r"numbers up to 7e\+04 cannot be stored in float16, whose limit is 65504"):
        as_half(torch.tensor([3.0, number]))


@pytest.mark.parametrize("sinks", [0, 4])
def test_exact_first_entries_of_a_sliding_layer_leave_its_window(sinks):
    """They are the first that the window left at the end of the context, not the first of the conversation."""
    window = 16
    kv = CodedKV(key_coder=GroupCoder(8, None), value_coder=GroupCoder(8, None), sinks=sinks)
    exact = LayerKV()
    step = make_step(*(draw(1, heads, 40, 16, seed=heads) for heads in (4, 2, 2)), 0, window=window)
    for store in (kv, exact):
        store.append(step)
        store.keep_last(window)
    kv.encode()
    for seen in range(40, 45):
        more = [draw(1, heads, 1, 16, seed=seen + heads) for heads in (4, 2, 2)]
        step = make_step(*more, seen, moment=Moment.DECODE, window=window)
        kv.append(step)
        exact.append(step)
        assert torch.allclose(kv.attend(step), exact.attend(step), atol=0.02)
