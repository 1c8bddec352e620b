"""Statistical power: the smallest difference that a run of a given size can detect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvbench.analysis.significance import ALPHA

if TYPE_CHECKING:
    from kvbench.runs.request import Plan
    from kvbench.runs.results import Result

POWER = 0.8
"""How often a run finds the smallest difference that it is said to find."""
FEWEST = 6
"""Contexts that must differ before any test by context can find a difference: 2 of 2**6 ways to sign them are 3 %."""
SIZES = 4
"""Most sizes of runs that are spoken of one by one before they start."""


def describe_powers(plans: Sequence[Plan]) -> Iterator[str]:
    """`describe_power` for several runs: one line per size; of many sizes only the smallest and the largest.

    Runs whose score is no accuracy, or that will have none, are left out.
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
        yield f"{sum(sizes[x] for x in between)} runs of {len(between)} other sizes lie between these."


def describe_power(samples: int, turns: int, full: Result | None = None) -> str:
    """The smallest difference that a run of right-or-wrong answers will find, in a line; `full`: what is known."""
    asked = f"{samples} context{'s' if samples > 1 else ''} x {turns} question{'s' if turns > 1 else ''}"
    accuracy = None if full is None else full.score.mean
    together = find_detectable(samples, accuracy)
    if together is None:
        return f"{asked} are too few to tell any difference from noise. Ask for more --samples."
    smallest = f"{100 * together:.0f} points"
    if turns > 1:
        apart = find_detectable(samples * turns, accuracy)
        assert apart is not None, samples
        smallest = (
            f"{100 * apart:.0f} points where the questions of a context are answered independently, {smallest} where "
            "they stand and fall together"
        )
    known = "two methods at the accuracies that are hardest to tell apart"
    if full is not None:
        known = f"the full cache at {accuracy:.3f}, as in {full.run_id}"
    return (
        f"smallest difference that {asked} find 4 times in 5 at the 5 % level: about {smallest} (right-or-wrong "
        f"answers, {known})."
    )


def find_detectable(n: int, accuracy: float | None = None) -> float | None:
    """The smallest difference of two accuracies that n questions find with probability POWER; None: not even the most.

    Of McNemar's exact test, for right-or-wrong answers whose errors are independent between the methods and between
    the questions. Graded scores between 0 and 1 vary less than right-or-wrong ones of the same mean, so for them it is
    smaller.

    accuracy: of one of the methods; the difference is towards the middle, where there is more room for it. None: the
        two for which a difference is the hardest to find.
    """
    best = None if accuracy is None else max(accuracy, 1 - accuracy)

    def power(x: float) -> float:
        first = (1 + x) / 2 if best is None else best
        second = first - x
        return _power(n, first * (1 - second), second * (1 - first))

    low, high = 0.0, 1.0 if best is None else best
    if power(high) < POWER:
        return None
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if power(middle) >= POWER else (middle, high)
    return high


def _power(n: int, only_first: float, only_second: float) -> float:
    """How often McNemar's exact test finds it: the shares of questions that only one of two methods answers."""
    from scipy.special import bdtr, bdtrik  # type: ignore[import-untyped]  # as scipy.stats.binom, in half the time

    unequal = only_first + only_second
    if n < FEWEST or not unequal:
        return 0.0
    k = np.arange(FEWEST, n + 1)  # questions on which the methods differ
    fewest = np.floor(bdtrik(ALPHA / 2, k, 0.5))  # for one of the methods to be significantly few
    share = only_second / unequal
    found = bdtr(fewest, k, share) + bdtr(fewest, k, 1 - share)
    chance = np.diff(bdtr(np.arange(FEWEST - 1, n + 1), n, unequal))
    return float((chance * found).sum())
