"""TurboQuant: errors against the published table, products without bias, and outlier channels."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from kvbench.errors import UserError
from kvbench.hf.tiny import tiny_model
from kvbench.methods.quantization import turboquant
from kvbench.methods.quantization.turboquant import RotatedCoder, TurboQuant
from kvbench.store.rotation import random_rotation

ERRORS = {1: 0.360, 2: 0.116, 3: 0.0339, 4: 0.0093}
"""Squared error of a random unit vector of 128 channels, by bits."""


def directions(count, width=128, seed=0):
    """Random unit vectors. [1, 1, count, width]"""
    return F.normalize(torch.randn(1, 1, count, width, generator=torch.Generator().manual_seed(seed)), dim=-1)


def restore(coder, x):
    """The vectors, encoded and decoded."""
    return coder.back(coder.decode(coder.encode(x), x.shape[3]))


def test_the_rotation_is_orthogonal():
    """So products and norms are those of the exact entries."""
    rotation = random_rotation(128, 0, torch.device("cpu"))
    assert torch.allclose(rotation @ rotation.mT, torch.eye(128), atol=1e-5)


@pytest.mark.parametrize("bits", ERRORS)
def test_errors_are_those_of_the_table(bits):
    """Within 2 %, at any norm."""
    x = 37 * directions(4000)
    error = (restore(RotatedCoder(bits), x) - x).square().sum(-1).mean() / 37**2
    assert error.item() == pytest.approx(ERRORS[bits], rel=0.02)


def test_one_large_channel_costs_no_more_than_others():
    """Vectors along one axis have the error of random ones; without the rotation it would be many times larger."""
    x = torch.eye(128)[None, None]
    error = (restore(RotatedCoder(3), x) - x).square().sum(-1).mean()
    assert error.item() == pytest.approx(ERRORS[3], rel=0.1)


def test_signs_of_the_residual_make_products_unbiased(monkeypatch):
    """The mean product with itself over projections: 1 with signs; with levels alone it is less by the error."""
    x, means = directions(500, 32), []
    for seed in range(1, 41):
        monkeypatch.setattr(turboquant, "PROJECTION", seed)
        coder = RotatedCoder(2, sign=True)
        means.append((coder.turn(x) * coder.decode(coder.encode(x), 32)).sum(-1).mean())
    found = torch.stack(means)
    assert abs(found.mean() - 1) < 4 * found.std() / math.sqrt(len(found))
    plain = RotatedCoder(2)
    assert (plain.turn(x) * plain.decode(plain.encode(x), 32)).sum(-1).mean() == pytest.approx(1 - ERRORS[2], abs=0.01)


def test_zero_vectors_stay_zero():
    """The norm is stored, so nothing is divided by zero."""
    assert restore(RotatedCoder(2), torch.zeros(1, 1, 3, 16)).equal(torch.zeros(1, 1, 3, 16))


def test_bytes_at_128_channels():
    """The paper's 2.5 bits are 32 channels of 3 and 96 of 2 bits, with two norms: 40 bytes of 256, and 8 bits fewer."""
    shape = tiny_model().shape(100)
    keys, values = TurboQuant(key_bits=2, value_bits=2).coders(0)
    assert keys.entry_bytes(128) == values.entry_bytes(128) == 32 * 3 // 8 + 96 * 2 // 8 + 2 * 2
    assert TurboQuant(outliers=0.0, key_bits=4, value_bits=4).coders(0)[0].entry_bytes(128) == 66
    assert TurboQuant(variant="prod", outliers=0.0).coders(0)[0].entry_bytes(128) == 128 * 3 // 8 + 4
    assert TurboQuant().fit(None, shape) == TurboQuant()


@pytest.mark.parametrize(("settings", "message"), [
    ({"key_bits": 4}, "leaves no bit more"), ({"variant": "prod", "key_bits": 1}, "2 or more"),
    ({"outliers": 0.1}, "below 3 channels"), ({"outliers": 0.6}, "between 0 and 0.5"),
])
def test_settings_that_cannot_be_are_refused(settings, message):
    """With the reason."""
    with pytest.raises(UserError, match=message):
        TurboQuant(**settings).fit(None, tiny_model().shape(100))
