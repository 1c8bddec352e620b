"""QuaRot's cache: the rotation against its matrix, outliers, clipping and bytes."""

from __future__ import annotations

import pytest
import torch

from kvbench.errors import UserError
from kvbench.hf.tiny import tiny_model
from kvbench.methods.quantization.quarot_kv import QuaRotKV
from kvbench.store.coders import GroupCoder, HadamardCoder
from kvbench.store.rotation import hadamard


def sylvester(size):
    """Element (i, j) is negative if i and j have an odd number of common bits."""
    return torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)])


@pytest.mark.parametrize("width", [1, 2, 16, 64])
def test_the_rotation_is_that_of_the_matrix(width):
    """Its rows are orthonormal, and it is its own inverse."""
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(hadamard(x), x @ sylvester(width) / width**0.5, atol=1e-5)
    assert torch.allclose(hadamard(hadamard(x)), x, atol=1e-5)


def test_other_widths_are_rotated_in_blocks():
    """Twelve channels in three blocks of four."""
    x = torch.randn(2, 12, generator=torch.Generator().manual_seed(0))
    blocks = torch.cat([part @ sylvester(4) / 2 for part in x.split(4, dim=1)], dim=1)
    assert torch.allclose(hadamard(x), blocks, atol=1e-6)


def test_an_outlier_channel_costs_little():
    """A channel fifty times the others would set the scale of all; rotated, the error is a tenth of that."""
    x = torch.randn(1, 1, 300, 128, generator=torch.Generator().manual_seed(0))
    x[..., 7] += 50
    errors = []
    for coder in (GroupCoder(4, None), HadamardCoder(4, None)):
        found = coder.back(coder.decode(coder.encode(x), 128))
        errors.append((found - x)[..., :7].square().mean().item())
    assert errors[1] < errors[0] / 10


def test_a_clipped_range_by_hand():
    """Rotated elements -8, 0, 2, 8 with half of the range: -4, 0, 2, 4, rounded to 4 levels."""
    x = hadamard(torch.tensor([-8.0, 0.0, 2.0, 8.0]))[None, None, None]
    coder = HadamardCoder(2, None, 0.5)
    found = coder.decode(coder.encode(x), 4).flatten()
    assert found.tolist() == pytest.approx([-4, -4 + 8 / 3, -4 + 16 / 3, 4], abs=0.02)
    assert {x.clip for x in QuaRotKV(clip=0.5).coders(0)} == {0.5}


def test_bytes_at_128_channels():
    """4 bits, and a scale and a minimum: 4.25 bits per element."""
    keys, values = QuaRotKV().coders(0)
    assert keys.entry_bytes(128) == values.entry_bytes(128) == 68


def test_groups_that_do_not_divide_a_head_are_refused():
    """Twelve of sixteen channels."""
    with pytest.raises(UserError, match="divisor of 16"):
        QuaRotKV(group=12).fit(None, tiny_model().shape(80))
