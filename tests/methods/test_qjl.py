"""QJL: products without bias, the variance of the theory, and bytes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from kvbench.check.invariants import check
from kvbench.errors import UserError
from kvbench.hf.tiny import tiny_model
from kvbench.methods.quantization.qjl import QJL, SketchCoder
from kvbench.store.rotation import mean_component


def products(bits, width, angle):
    """Estimated products of many keys of length 3 with unit queries at an angle to them. [n]"""
    generator = torch.Generator().manual_seed(bits)
    keys, other = F.normalize(torch.randn(2, 1, 1, 20_000, width, generator=generator), dim=-1)
    other = F.normalize(other - (other * keys).sum(-1, keepdim=True) * keys, dim=-1)
    query = math.cos(angle) * keys + math.sin(angle) * other
    coder = SketchCoder(bits)
    return (coder.turn(query) * coder.decode(coder.encode(3 * keys), width)).sum(-1)[0, 0]


@pytest.mark.parametrize("width", [6, 8, 64])
@pytest.mark.parametrize("angle", [0.0, 1.0, 2.5])
def test_products_have_no_bias(width, angle):
    """Also for narrow keys, where the constant of normal numbers is 3 % off, and 12 signs in two bytes."""
    found = products(2, width, angle)
    assert abs(found.mean() - 3 * math.cos(angle)) < 4.5 * found.std() / math.sqrt(len(found))


def test_four_times_the_signs_halve_the_error():
    """The spread falls with the root of the number of signs."""
    assert products(2, 64, 1.5).std() / products(8, 64, 1.5).std() == pytest.approx(2, rel=0.1)


def test_the_mean_component_of_a_direction():
    """1 for a number, sqrt(2) * 2 / pi in a plane, that of a normal number in the limit."""
    assert mean_component(1) == pytest.approx(1)
    assert mean_component(2) == pytest.approx(math.sqrt(2) * 2 / math.pi)
    assert mean_component(10**6) == pytest.approx(math.sqrt(2 / math.pi), rel=1e-5)


def test_bytes_at_128_channels():
    """Layers from the sixteenth on: 240 signs of 120 channels, 256 of 8, two norms; values as in KIVI."""
    method = replace(QJL(), layers=32)
    (first, values), (later, _) = method.coders(14), method.coders(15)
    assert later.entry_bytes(128) == 240 // 8 + 256 // 8 + 4
    assert first.entry_bytes(128) == 480 // 8 + 128 // 8 + 4
    assert values.entry_bytes(128) == 32 + 4 * 4


@pytest.mark.slow
def test_small_blocks_pass_the_checks():
    """The checks' contexts are shorter than the authors' blocks."""
    assert [x.detail for x in check(QJL, {"residual": 32}) if not x.passed] == []


def test_a_shallow_model_has_both_kinds_of_layers():
    """15 of 32 layers are 2 of 4, 14 of 28 and 15 of 30."""
    for layers, first in ((2, 1), (4, 2), (28, 14), (30, 15)):
        bits = [replace(QJL(outliers=0), layers=layers).coders(i)[0].bits for i in range(layers)]
        assert bits == [4] * first + [2] * (layers - first)


@pytest.mark.parametrize(("settings", "message"), [
    ({"outliers": 0.05}, "less than one"), ({"group": 12}, "divisor of 16"),
])
def test_settings_that_cannot_be_are_refused(settings, message):
    """With the reason."""
    with pytest.raises(UserError, match=message):
        QJL(**settings).fit(None, tiny_model().shape(100))
