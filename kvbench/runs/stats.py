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
    parts = np.array([sums, counts], dtype=float)  # [2, clusters]
    drawn = np.random.default_rng(seed).integers(0, len(sums), size=(DRAWS, len(sums)))
    totals = parts[:, drawn].sum(axis=2)  # [2, DRAWS]
    low, high = np.percentile(totals[0] / totals[1], [2.5, 97.5])
    return float(low), float(high)


def quantile(values: Sequence[float], share: float) -> float | None:
    """A quantile; None if there are no values."""
    return float(np.quantile(values, share)) if values else None
