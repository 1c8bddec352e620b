"""Statistical power: the smallest difference that a run of a given size can detect."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvbench.analysis.significance import ALPHA, flip_signs
from kvbench.log import count
from kvbench.models.sources import is_random

if TYPE_CHECKING:
    from kvbench.runs.request import ResolvedRequest
    from kvbench.runs.results import Result

POWER = 0.8
"""Probability of detecting the minimum detectable effect."""
FEWEST = 6
"""Contexts that must differ before a test by context can reach p < 0.05: with n contexts the least p-value is
2 / 2**n."""
MANY = 40
"""Contexts from which the test by context has the power of McNemar's test on their questions if these are independent.
With fewer contexts it has less, and its power is simulated."""
DRAWS = 200
"""Simulated pairs of runs."""
REACH = 10
"""Standard deviations around the expected number of questions on which two methods differ; others have no weight."""
COARSE, FINE = 0.005, 1e-4
"""Precision of a difference from simulated and from exact power."""
SIZES = 4
"""Most run sizes that are reported one by one before a sweep."""


def describe_powers(plans: Sequence[ResolvedRequest]) -> Iterator[str]:
    """One line per size of the runs to come; of many sizes only the smallest and the largest.

    Runs without an accuracy are left out: random weights, and scores of which lower is better.
    """
    sizes = Counter(
        (x.request.samples, x.protocol.turns) for x in plans
        if x.scorer.higher_is_better and not is_random(x.request.model)
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
    size = count(samples, "sample" if turns == 1 else "context")
    size += f" x {turns} questions" if turns > 1 else ""
    accuracy = None if full is None else full.score.mean
    if samples < FEWEST:
        return f"{size} cannot detect any difference at p < 0.05. Use more --samples."
    if full is not None and accuracy is not None and not 0 <= accuracy <= 1:
        return (
            f"{size}: no detectable difference is predicted, because {full.run_id} scores {accuracy:.3f}, and only the "
            "power of scores from 0 to 1 is known."
        )
    assumed = "worst case" if full is None else f"full cache at {accuracy:.3f} in {full.run_id}"
    independent, correlated = (find_detectable(samples, accuracy, x) for x in (turns, 1))
    if independent is None:
        return f"{size} detect no difference with 80 % power (p < 0.05, {assumed}). Use more --samples."
    points = f"{100 * independent:.0f}"
    if turns == 1:
        points += " points"
    elif correlated is None:
        points += " points (answers independent), and none if answers are correlated within a context"
    else:
        points += f" (answers independent) to {100 * correlated:.0f} points (answers correlated within a context)"
    return f"{size} can detect a difference of about {points} (80 % power, p < 0.05, {assumed})."


def find_detectable(n: int, accuracy: float | None = None, turns: int = 1) -> float | None:
    """The smallest difference of two accuracies that a test by context detects with probability POWER.

    The answers are right or wrong, with errors independent between the methods and between the questions. Graded
    scores between 0 and 1 vary less than right-or-wrong ones of the same mean, so their detectable difference is
    smaller. The power of one question per context is exact, that of McNemar's test.

    Args:
        n: contexts.
        accuracy: of one of the methods; the other's is on the side with more room. None: the pair of accuracies for
            which a difference is hardest to detect.
        turns: questions per context.

    Returns:
        The difference, between 0 and 1; None if none is detected with this probability.
    """
    best = None if accuracy is None else max(accuracy, 1 - accuracy)
    simulated = turns > 1 and n < MANY

    def power(x: float) -> float:
        first = (1 + x) / 2 if best is None else best
        second = first - x
        if simulated:
            return _simulate_power(n, turns, first, second)
        return _power(n * turns, first * (1 - second), second * (1 - first))

    return _find_least(power, 1.0 if best is None else best, COARSE if simulated else FINE)


def find_detectable_between(n: int, unequal: float) -> float | None:
    """The smallest difference that the test detects between methods whose answers differ on this share of questions.

    Args:
        n: questions.
        unequal: share of the questions that one of the methods answers and the other does not.

    Returns:
        The difference, between 0 and `unequal`; None where n questions cannot detect any.
    """
    return _find_least(lambda x: _power(n, (unequal + x) / 2, (unequal - x) / 2), unequal, FINE)


def _find_least(power: Callable[[float], float], most: float, precision: float) -> float | None:
    """The least difference up to `most` that is detected with probability POWER."""
    low, high = 0.0, most
    if power(high) < POWER:
        return None
    while high - low > precision:
        middle = (low + high) / 2
        low, high = (low, middle) if power(middle) >= POWER else (middle, high)
    return high


def _power(n: int, only_first: float, only_second: float) -> float:
    """Power of McNemar's exact test, from the shares of questions that only one of the two methods answers."""
    from scipy.special import bdtr, bdtrik  # type: ignore[import-untyped]  # as scipy.stats.binom, in half the time

    unequal = only_first + only_second
    middle, reach = n * unequal, REACH * (1 + math.sqrt(n * unequal * max(0.0, 1 - unequal)))
    least, most = max(FEWEST, math.floor(middle - reach)), min(n, math.ceil(middle + reach))
    if least > most or not unequal:
        return 0.0
    k = np.arange(least, most + 1)  # questions on which the methods differ
    critical = np.floor(bdtrik(ALPHA / 2, k, 0.5))  # the largest count of one method's wins that is significant
    share = only_second / unequal
    found = bdtr(critical, k, share) + bdtr(critical, k, 1 - share)
    chance = np.diff(bdtr(np.arange(least - 1, most + 1), n, unequal))
    return float((chance * found).sum())


def _simulate_power(contexts: int, turns: int, first: float, second: float) -> float:
    """Power of sign flips by context, from the accuracies of the two methods on independent questions."""
    rng = np.random.default_rng(0)
    right = [rng.binomial(turns, x, size=(DRAWS, contexts)) for x in (first, second)]
    return float(np.mean([flip_signs(x) < ALPHA for x in (right[1] - right[0]).tolist()]))
