"""Intervals that respect what was sampled: contexts are drawn, the turns of one context are not independent."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

DRAWS = 2000


def bootstrap_interval(clusters: Sequence[Sequence[float]], seed: int = 0) -> tuple[float, float]:
    """Percentile bootstrap 95 % interval of the mean of all values, whole clusters drawn with replacement."""
    sums = np.array([sum(x) for x in clusters], dtype=float)
    counts = np.array([len(x) for x in clusters], dtype=float)
    drawn = np.random.default_rng(seed).integers(0, len(clusters), size=(DRAWS, len(clusters)))
    means = sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def quantile(values: Sequence[float], share: float) -> float | None:
    """A quantile, None of nothing."""
    return float(np.quantile(values, share)) if values else None
