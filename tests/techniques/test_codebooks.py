"""Codebooks against published levels, and the two conditions that the best levels meet."""

from __future__ import annotations

import math

import pytest
import torch

from kvbench.techniques.codebooks import (
    CELLS,
    angle_levels,
    count_on_grid,
    fit_levels,
    midpoints,
    nearest_level,
    sphere_levels,
)

CPU = torch.device("cpu")
NORMAL = {
    1: [0.7979], 2: [0.4528, 1.5104], 3: [0.2451, 0.7560, 1.3439, 2.1520],
    4: [0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6180, 2.0690, 2.7326],
}
"""Max's levels for a normal number, the positive half."""


@pytest.mark.parametrize("bits", NORMAL)
def test_levels_of_wide_vectors_are_those_of_normal_numbers(bits):
    """To the last digit that is printed."""
    wanted = [*(-x for x in reversed(NORMAL[bits])), *NORMAL[bits]]
    assert sphere_levels(10**6, bits, CPU).tolist() == pytest.approx(wanted, abs=1e-4)


def test_levels_of_three_channels_are_evenly_spaced():
    """A coordinate of a random direction in space is uniform (Archimedes): four levels at -3/4, -1/4, 1/4, 3/4."""
    wanted = [x * math.sqrt(3) / 4 for x in (-3, -1, 1, 3)]
    assert sphere_levels(3, 2, CPU).tolist() == pytest.approx(wanted, abs=1e-5)


def test_levels_of_numbers_are_the_means_of_their_cells():
    """Each level is the mean of the numbers that are nearest to it, of a mixture of two clusters."""
    x = torch.cat([torch.randn(4000), 9 + torch.randn(2000)], dim=0).sort().values
    levels = fit_levels(x, torch.ones(len(x)), 8)
    codes = nearest_level(x, levels.float())
    means = [x[codes == i].mean().item() for i in range(8)]
    assert levels.tolist() == pytest.approx(means, abs=0.01)
    nearest = (x[:, None] - levels.float()).abs().argmin(-1)
    assert (codes != nearest).float().mean() < 1e-3


def test_numbers_are_counted_between_points():
    """0.3 of a cell from a point is 0.7 of a number there and 0.3 at the next; the sum and the mean stay."""
    x = torch.tensor([-1.0, 1.0, -1 + 0.3 * 2 / CELLS], dtype=torch.float64)
    points, weights = count_on_grid(x)
    assert weights[[0, 1, -1]].tolist() == pytest.approx([1.7, 0.3, 1.0])
    assert (points * weights).sum().item() == pytest.approx(x.sum().item())


@pytest.mark.parametrize("bits", [2, 3])
@pytest.mark.parametrize("level", [2, 3, 4])
def test_levels_of_angles_are_those_of_sampled_radii(level, bits):
    """The angle between the norms of two halves of normal numbers, sampled, has these cells' means as levels."""
    generator = torch.Generator().manual_seed(level)
    norms = torch.randn(2, 200_000, 2 ** (level - 1), generator=generator).norm(dim=-1)
    angle = torch.atan2(norms[0], norms[1])
    levels = angle_levels(level, bits, CPU)
    codes = torch.bucketize(angle, midpoints(levels))
    means = [angle[codes == i].mean().item() for i in range(2**bits)]
    assert levels.tolist() == pytest.approx(means, abs=3e-3)


def test_the_first_angles_are_the_middles_of_equal_sectors():
    """An angle of two normal numbers is uniform."""
    assert angle_levels(1, 2, CPU).tolist() == pytest.approx([math.pi / 4 * x for x in (1, 3, 5, 7)])
