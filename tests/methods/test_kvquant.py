"""KVQuant: outliers and ranges by hand, keys before rotation, exact first entries, and calibrated levels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvbench.errors import UserError
from kvbench.hf.tiny import tiny_model
from kvbench.kernels.dense_attention.naive import attention_weights
from kvbench.method import Moment
from kvbench.methods.quantization.kvquant import KeyCoder, KVQuant, LevelRecorder, ValueCoder
from kvbench.store.coded import CodedKV
from kvbench.store.coders import GroupCoder

LEVELS = torch.tensor([-0.9, -0.2, 0.3, 0.8])


def draw(*shape, seed=0):
    """Normal random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_key_by_hand():
    """Ranges 1..3, 0..2, -100..100, -1..1; 30 is far from the middle of the second and stored as it is."""
    middle, reach = torch.tensor([2.0, 1.0, 0.0, 0.0]), torch.tensor([1.0, 1.0, 100.0, 1.0])
    coder = KeyCoder(2, 0.25, LEVELS, middle, reach)
    x = torch.tensor([2.25, 30.0, 79.0, -0.95])[None, None, None]
    parts = coder.encode(x)
    assert parts["channel"].flatten().tolist() == [1]
    assert coder.decode(parts, 4).flatten().tolist() == pytest.approx([2.3, 30.0, 80.0, -0.9])


def test_a_value_by_hand():
    """9 is farthest from the mean; the others' range is -2..6, of middle 2 and reach 4."""
    coder = ValueCoder(2, 0.25, LEVELS)
    x = torch.tensor([-2.0, 6.0, 19.0, 1.0])[None, None, None]
    parts = coder.encode(x)
    assert parts["channel"].flatten().tolist() == [2]
    assert coder.decode(parts, 4).flatten().tolist() == pytest.approx([2 - 3.6, 2 + 3.2, 19.0, 2 - 0.8], abs=1e-3)


def test_no_outliers_take_no_bytes():
    """And a hundredth of 128 channels is two: three bytes each."""
    assert KeyCoder(4, 0.0).entry_bytes(128) == 64
    assert KeyCoder(4, 0.01).entry_bytes(128) == 64 + 2 * 3
    assert ValueCoder(4, 0.01).entry_bytes(128) == 64 + 2 * 3 + 4
    assert KeyCoder(4, 0.01).fixed_bytes(128, 8) == 16 * 4 + 2 * 8 * 128 * 4


def test_keys_are_encoded_before_rotation_and_first_ones_stay_exact(make_step):
    """Attention is that over keys of few levels, rotated to their positions, in the context and in a later turn."""
    rope = tiny_model().ropes[0]
    coder = GroupCoder(2, None)
    kv = CodedKV(key_coder=coder, value_coder=coder, plain=True, sinks=3)
    tokens = [draw(1, heads, 25, 16, seed=heads) for heads in (4, 2, 3)]
    query, value = tokens[0], tokens[2][:, :2]
    key = coder.decode(coder.encode(tokens[1]), 16)  # on levels, so that rounding decides nothing
    positions = torch.arange(25)[None]
    rotated = rope.rotate(key, positions)
    kv.append(make_step(query[:, :, :20], rotated[:, :, :20], value[:, :, :20], rope=rope, scale=0.3))
    kv.encode()
    step = make_step(query[:, :, 20:], rotated[:, :, 20:], value[:, :, 20:], before=20, moment=Moment.TURN_END,
                     rope=rope, scale=0.3)
    kv.append(step)
    values = torch.cat([value[:, :, :3], coder.decode(coder.encode(value[:, :, 3:]), 16)], dim=2)
    weights = attention_weights(step.query, rotated, scale=0.3, seen=25).float()
    assert kv.entries_kept() == [25, 25]
    assert all(kv.first[name].equal(x[:, :, :3]) for name, x in (("key", rotated), ("value", value)))
    assert torch.allclose(kv.attend(step), (weights @ values[:, :, None]).flatten(1, 2), atol=5e-3)


def test_ranges_are_measured_before_rotation(make_step):
    """Keys that are one vector before rotation are recorded as it; the store is given the setting's exact entries."""
    rope, vector = tiny_model().ropes[0], draw(1, 2, 1, 16)
    key = rope.rotate(vector.expand(-1, -1, 30, -1), torch.arange(30)[None])
    recorder, step = LevelRecorder(), make_step(draw(1, 4, 30, 16), key, rope=rope)
    kv = recorder.layer(0)
    kv.append(step)
    recorder.attend(kv, step)
    assert torch.allclose(kv.state["key"], vector[0].expand(-1, 30, -1), atol=1e-5)
    assert KVQuant(sinks=3).layer(0).sinks == 3


def test_calibrated_ranges_leave_out_the_outliers():
    """Channels uniform in 5..7 and -1..1 with one element in a hundred far off; levels of uniform numbers are even."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.rand(1, 20_000, 2, generator=generator) * 2 + torch.tensor([5.0, -1.0])
    keys[0, ::100, 0] = 500.0
    found = LevelRecorder(key_bits=2, value_bits=2, outliers=0.03).summarize({"key": keys, "value": keys}, 20_000)
    middle, reach, levels = found[:2], found[2:4], found[4:8]
    assert middle.tolist() == pytest.approx([6, 0], abs=0.03)
    assert reach.tolist() == pytest.approx([1, 1], abs=0.05)
    assert levels.tolist() == pytest.approx([-0.75, -0.25, 0.25, 0.75], abs=0.02)


def test_heads_wider_than_a_byte_are_refused():
    """An outlier's channel is a byte."""
    shape = tiny_model().shape(80)
    with pytest.raises(UserError, match="512 channels"):
        KVQuant().fit(None, replace(shape, layers=(replace(shape.layers[0], key_dim=512),)))
