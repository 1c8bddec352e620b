"""PolarQuant: a block worked out by hand, exact radii, and 3.875 bits."""

from __future__ import annotations

import math

import pytest
import torch

from kvbench.errors import UserError
from kvbench.hf.tiny import tiny_model
from kvbench.kernels.pack import unpack
from kvbench.methods.quantization.polarquant import PolarCoder, PolarQuant
from kvbench.store.rotation import random_rotation
from kvbench.techniques.codebooks import angle_levels

CPU = torch.device("cpu")


def test_a_block_of_four_by_hand():
    """(3, 4) and (-12, 5): radii 5 and 13, angles in the 1st, 3rd and 7th of 16 sectors' quarters, and one of radii."""
    plain = torch.tensor([3.0, 4.0, -12.0, 5.0])
    x = (plain @ random_rotation(4, 0, CPU))[None, None, None]
    parts = PolarCoder((4, 2)).encode(x)
    sectors = [int(math.atan2(4, 3) / (2 * math.pi) * 16), int(math.atan2(5, -12) / (2 * math.pi) * 16)]
    assert unpack(parts["angle1"], 4, 2).flatten().tolist() == sectors == [2, 6]
    levels = angle_levels(2, 2, CPU)
    nearest = (levels - math.atan2(13, 5)).abs().argmin().item()
    assert unpack(parts["angle2"], 2, 1).flatten().tolist() == [nearest]
    assert parts["radius"].item() == pytest.approx(math.hypot(5, 13), rel=1e-3)
    turned = [(sector + 0.5) * math.pi / 8 for sector in sectors]
    radii = [parts["radius"].item() * x for x in (math.cos(levels[nearest]), math.sin(levels[nearest]))]
    wanted = [r * f(a) for r, a in zip(radii, turned, strict=True) for f in (math.cos, math.sin)]
    assert PolarCoder((4, 2)).decode(parts, 4).flatten().tolist() == pytest.approx(wanted, rel=1e-4)


def test_norms_of_blocks_are_kept():
    """Angles turn, and only the radius has a length: to float16, the norm is exact at any number of bits."""
    x = torch.randn(1, 2, 50, 64, generator=torch.Generator().manual_seed(1))
    coder = PolarCoder((2, 1, 1, 1))
    found = coder.back(coder.decode(coder.encode(x), 64))
    assert torch.allclose(found.norm(dim=-1), x.norm(dim=-1), rtol=1e-3)


def test_more_bits_are_nearer():
    """The error of the paper's bits is some percent, and falls by three quarters with every bit more on all levels."""
    x = torch.randn(1, 2, 500, 64, generator=torch.Generator().manual_seed(1))
    errors = []
    for bits in ((3, 1, 1, 1), (4, 2, 2, 2), (4, 3, 3, 3)):
        coder = PolarCoder(bits)
        found = coder.back(coder.decode(coder.encode(x), 64))
        errors.append(((found - x).square().sum() / x.square().sum()).item())
    assert errors[0] > 2.5 * errors[1] > 2.5 * errors[2]
    assert errors == pytest.approx([0.1158, 0.0321, 0.0182], rel=0.02)


def test_the_default_is_the_paper_s_bits():
    """62 bytes for 128 channels: 3.875 bits per coordinate."""
    assert PolarQuant().coders(0)[0].entry_bytes(128) * 8 / 128 == 3.875


def test_blocks_must_divide_a_vector():
    """16 channels have no blocks of 32."""
    with pytest.raises(UserError, match="do not divide 16"):
        PolarQuant(levels=5).fit(None, tiny_model().shape(100))
