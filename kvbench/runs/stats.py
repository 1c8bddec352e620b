"""Bootstrap confidence intervals over contexts: turns of one context are not independent."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

DRAWS = 2000
"""Bootstrap resamples."""


def bootstrap_interval(clusters: Sequence[Sequence[float]], seed: int = 0) -> tuple[float, float]:
    """Percentile bootstrap 95 % interval of the mean of all values, whole clusters resampled."""
    return bootstrap_ratio([sum(x) for x in clusters], [len(x) for x in clusters], seed)


def bootstrap_ratio(sums: Sequence[float], counts: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """Percentile bootstrap 95 % interval of the ratio of two totals, whole clusters resampled."""
    above, below = np.array(sums, dtype=float), np.array(counts, dtype=float)
    drawn = np.random.default_rng(seed).integers(0, len(sums), size=(DRAWS, len(sums)))
    low, high = np.percentile(above[drawn].sum(axis=1) / below[drawn].sum(axis=1), [2.5, 97.5])
    return float(low), float(high)


def quantile(values: Sequence[float], share: float) -> float | None:
    """A quantile; None if there are no values."""
    return float(np.quantile(values, share)) if values else None
