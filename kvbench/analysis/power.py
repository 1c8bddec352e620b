"""Statistical power: the smallest difference that a run of a given size can detect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvbench.analysis.significance import ALPHA

if TYPE_CHECKING:
    from kvbench.runs.request import ResolvedRequest
    from kvbench.runs.results import Result

POWER = 0.8
"""Probability of detecting the minimum detectable effect."""
FEWEST = 6
"""Contexts that must differ before a test by context can reach p < 0.05: with n contexts the least p-value is
2 / 2**n."""
SIZES = 4
"""Most run sizes that are reported one by one before a sweep."""


def describe_powers(plans: Sequence[ResolvedRequest]) -> Iterator[str]:
    """One line per size of the runs to come; of many sizes only the smallest and the largest.

    Runs without an accuracy are left out: random weights, and scores of which lower is better.
    """
    sizes = Counter(
        (x.request.samples, x.protocol.turns) for x in plans
        if x.scorer.higher_is_better and not x.request.model.startswith("random:")
    )
    shown = sorted(sizes)
    between = shown[1:-1] if len(shown) > SIZES else []
    for size in shown:
        if size not in between:
            runs = f"each of {sizes[size]} runs" if sizes[size] > 1 else "1 run"
            yield f"{runs}: {describe_power(*size)}"
    if between:
        yield f"{sum(sizes[x] for x in between)} runs of {len(between)} sizes in between are not listed."


def describe_power(samples: int, turns: int, full: Result | None = None) -> str:
    """The minimum detectable effect of a run, in one line.

    Args:
        samples: contexts.
        turns: questions per context. With several, the effect depends on how correlated the answers of one context
            are, so both extremes are given.
        full: a run of the full cache on the same questions, whose accuracy is used; None: the worst case.
    """
    size = f"{samples} {'sample' if turns == 1 else 'context'}{'s' if samples > 1 else ''}"
    size += f" x {turns} questions" if turns > 1 else ""
    accuracy = None if full is None else full.score.mean
    correlated = find_detectable(samples, accuracy)
    if correlated is None:
        return f"{size} cannot detect any difference at p < 0.05. Use more --samples."
    points = f"{100 * correlated:.0f} points"
    if turns > 1:
        independent = find_detectable(samples * turns, accuracy)
        assert independent is not None, samples
        points = f"{100 * independent:.0f} (answers independent) to {points} (answers correlated within a context)"
    assumed = "worst case" if full is None else f"full cache at {accuracy:.3f} in {full.run_id}"
    return f"{size} can detect a difference of about {points} (80 % power, p < 0.05, {assumed})."


def find_detectable(n: int, accuracy: float | None = None) -> float | None:
    """The smallest difference of two accuracies that McNemar's exact test detects with probability POWER.

    The answers are right or wrong, with errors independent between the methods and between the questions. Graded
    scores between 0 and 1 vary less than right-or-wrong ones of the same mean, so their detectable difference is
    smaller.

    Args:
        n: questions.
        accuracy: of one of the methods; the other's is on the side with more room. None: the pair of accuracies for
            which a difference is hardest to detect.

    Returns:
        The difference, between 0 and 1; None where n questions cannot detect any.
    """
    best = None if accuracy is None else max(accuracy, 1 - accuracy)

    def power(x: float) -> float:
        first = (1 + x) / 2 if best is None else best
        second = first - x
        return _power(n, first * (1 - second), second * (1 - first))

    return _find_least(power, 1.0 if best is None else best)


def find_detectable_between(n: int, unequal: float) -> float | None:
    """The smallest difference that the test detects between methods whose answers differ on this share of questions.

    Args:
        n: questions.
        unequal: share of the questions that one of the methods answers and the other does not.

    Returns:
        The difference, between 0 and `unequal`; None where n questions cannot detect any.
    """
    return _find_least(lambda x: _power(n, (unequal + x) / 2, (unequal - x) / 2), unequal)


def _find_least(power: Callable[[float], float], most: float) -> float | None:
    """The least difference up to `most` that is detected with probability POWER."""
    low, high = 0.0, most
    if power(high) < POWER:
        return None
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if power(middle) >= POWER else (middle, high)
    return high


def _power(n: int, only_first: float, only_second: float) -> float:
    """Power of McNemar's exact test, from the shares of questions that only one of the two methods answers."""
    from scipy.special import bdtr, bdtrik  # type: ignore[import-untyped]  # as scipy.stats.binom, in half the time

    unequal = only_first + only_second
    if n < FEWEST or not unequal:
        return 0.0
    k = np.arange(FEWEST, n + 1)  # questions on which the methods differ
    critical = np.floor(bdtrik(ALPHA / 2, k, 0.5))  # the largest count of one method's wins that is significant
    share = only_second / unequal
    found = bdtr(critical, k, share) + bdtr(critical, k, 1 - share)
    chance = np.diff(bdtr(np.arange(FEWEST - 1, n + 1), n, unequal))
    return float((chance * found).sum())
