"""Confidence intervals over contexts: turns of one context are not independent (docs/statistics.md)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvbench.runs.results import IntervalMethod

DRAWS = 2000
"""Bootstrap resamples."""
DRAWN_AT_ONCE = 4_000_000
"""Most clusters that are drawn at once: all draws of tens of thousands of contexts would take gigabytes."""
CONFIDENCE = 0.95

INTERVAL: IntervalMethod = "exact"
"""The method of new results."""


def find_interval(
    clusters: Sequence[Sequence[float]], method: IntervalMethod = INTERVAL
) -> tuple[float, float] | None:
    """The 95 % interval of the mean of all values, in whole clusters.

    Scores of 0 and 1: Clopper and Pearson's interval with the effective number of questions. Graded scores: bootstrap;
    None if all contexts agree, which includes a single context: there is no variation to draw from.
    """
    if method == "bootstrap":
        return bootstrap_interval(clusters)
    if all(x in (0.0, 1.0) for cluster in clusters for x in cluster):
        return find_exact_interval(clusters)
    means = {round(float(np.mean(x)), 12) for x in clusters}
    return bootstrap_interval(clusters) if len(means) > 1 else None


def find_exact_interval(clusters: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Clopper and Pearson's 95 % interval of a share of right answers, for clustered answers (Korn and Graubard 1998).

    The number of questions is replaced by the effective number, at which independent answers would vary as much as the
    contexts do; at least the number of contexts, at most that of questions. If the contexts do not vary, as at 0 and
    1, it is the number of contexts. Contexts of unequal size count as fewer of equal size (Kish 1965).
    """
    from scipy.special import betaincinv, stdtrit  # type: ignore[import-untyped]

    right, asked = (np.array([f(x) for x in clusters], dtype=float) for f in (sum, len))
    contexts, questions = len(clusters), float(asked.sum())
    mean = float(right.sum()) / questions
    n = questions**2 / float((asked**2).sum())
    if (right * questions != right.sum() * asked).any():  # exact, where the variance may be rounded to more than 0
        variance = contexts / (contexts - 1) * float(((right - mean * asked) ** 2).sum()) / questions**2
        upper = (1 + CONFIDENCE) / 2
        few = stdtrit(questions - 1, upper) / stdtrit(contexts - 1, upper)
        n = min(max(mean * (1 - mean) / variance * few**2, n), questions)
    tail, hits = (1 - CONFIDENCE) / 2, mean * n
    low = float(betaincinv(hits, n - hits + 1, tail)) if hits else 0.0
    high = float(betaincinv(hits + 1, n - hits, 1 - tail)) if hits < n else 1.0
    return low, high


def bootstrap_interval(clusters: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Percentile bootstrap 95 % interval of the mean of all values, whole clusters resampled."""
    return bootstrap_ratio([sum(x) for x in clusters], [len(x) for x in clusters])


def bootstrap_ratio(sums: Sequence[float], counts: Sequence[float]) -> tuple[float, float]:
    """Percentile bootstrap 95 % interval of the ratio of two totals, whole clusters resampled."""
    above, below = np.array(sums, dtype=float), np.array(counts, dtype=float)
    ratios = [above[x].sum(axis=1) / below[x].sum(axis=1) for x in draw_clusters(len(sums), DRAWS, seed=0)]
    low, high = np.percentile(np.concatenate(ratios), [2.5, 97.5])
    return float(low), float(high)


def draw_clusters(n: int, draws: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """The resamples of a bootstrap, some at a time: indices of `n` clusters [draws, n], whatever the number at once."""
    rng = np.random.default_rng(seed)
    most = max(1, DRAWN_AT_ONCE // max(1, n))
    for start in range(0, draws, most):
        yield rng.integers(0, n, size=(min(most, draws - start), n))


def quantile(values: Sequence[float], share: float) -> float | None:
    """A quantile; None if there are no values."""
    return float(np.quantile(values, share)) if values else None
