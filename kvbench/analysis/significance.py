"""Significance of score differences: paired tests by context, Holm adjustment, and groups of ties.

The confidence interval in a run's own result is computed in `kvbench/runs/stats.py`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import takewhile
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvbench.runs.stats import bootstrap_interval

ALPHA = 0.05
"""Family-wise error rate, over all runs that are compared with one baseline."""
UNADJUSTED = (
    "Verdicts go by p-values of sign flips, adjusted over the runs of the table; intervals of differences are a "
    "bootstrap without adjustment, or exact where all contexts agree. Ranks compare the best run with each one below "
    "it; as the best is chosen after the fact, equal methods can get more than one rank in more than 5 % of tables."
)
"""Why a difference may be called not significant although its interval excludes 0, and what ranks do not promise."""
CELLS = 50_000
"""Most sums in the exact distribution of `flip_signs`."""
SLACK = 0.02
"""Largest rounding error of a sum, in standard deviations, with which all sign combinations are counted."""
DRAWS = 20_000
"""Sign combinations that are drawn where they cannot be counted."""
DRAWN_AT_ONCE = 500
DENOMINATOR = 1000
"""Largest denominator tried when a score difference is written as a fraction."""
BETS = 1000
"""Bets that `find_margin_p` averages over."""
ROUNDING = 1e-10
"""Tolerance for rounding errors in sums of scores."""

T = TypeVar("T")


@dataclass(frozen=True)
class Paired:
    """The paired difference of two methods, second minus first, over the questions that both answered."""

    n: int
    """Questions."""
    contexts: int
    mean: float
    ci95: tuple[float, float] | None
    """Paired bootstrap over contexts: each draw takes both methods' answers to all questions of a context.

    Where all contexts agree, Clopper and Pearson's bound on the contexts that may differ; None for unbounded scores.
    """
    p: float
    """From `flip_signs`."""


def find_least_p(contexts: int, comparisons: int = 1) -> float:
    """The smallest adjusted p-value that a test by context can reach: all contexts differ in the same direction."""
    return min(1.0, comparisons * 2.0 ** (1 - contexts))


def find_needed_contexts(comparisons: int) -> int:
    """The fewest contexts with which a test can find a difference, adjusted for this many comparisons."""
    return next(n for n in itertools.count(1) if find_least_p(n, comparisons) < ALPHA)


def name_too_few(contexts: int) -> str:
    """The words for a number of contexts that is too small."""
    return f"{contexts} context{' is' if contexts == 1 else 's are'} too few to tell"


def describe_too_few(contexts: int, comparisons: int) -> str:
    """One line on why contexts are too few to tell, and how many are enough."""
    runs = f"{comparisons} comparisons" if comparisons > 1 else "a comparison"
    return (
        f"{name_too_few(contexts)}: even if all of them agreed, no difference would be significant. "
        f"Use --samples {find_needed_contexts(comparisons)} or more for {runs}."
    )


def compare_scores(contexts: Sequence[Sequence[tuple[float, float]]]) -> Paired:
    """Compare two methods.

    Args:
        contexts: for each context the paired scores (first, second) of its questions; none is empty.
    """
    differences = [[b - a for a, b in pairs] for pairs in contexts]
    sums = [sum(x) for x in differences]
    n = sum(map(len, differences))
    mean, scores = sum(sums) / n, [score for pairs in contexts for pair in pairs for score in pair]
    interval: tuple[float, float] | None = None
    if len({round(sum(x) / len(x), 12) for x in differences}) > 1:
        interval = bootstrap_interval(differences)
    elif all(0 <= x <= 1 for x in scores):
        interval = _find_alike_interval(mean, len(differences))
    return Paired(n, len(differences), mean, interval, flip_signs(sums))


def _find_alike_interval(mean: float, contexts: int) -> tuple[float, float]:
    """The interval of a difference that is the same in all contexts, for scores from 0 to 1.

    Where none of n contexts differs from the others, up to 1 - 0.025 ** (1 / n) of all contexts may (Clopper and
    Pearson), by as much as the scores allow.
    """
    others = 1 - 0.025 ** (1 / contexts)
    return mean - others * (1 + mean), mean + others * (1 - mean)


def flip_signs(differences: Sequence[float]) -> float:
    """Two-sided p-value of the sign-flip permutation test on differences by context.

    Under the null hypothesis the two methods are exchangeable in each context, so each difference may change its sign.
    The p-value is the share of all sign combinations whose sum is at least as far from 0 as the observed one. Unlike
    the bootstrap's p-value it keeps its level with few contexts, and where methods disagree in few of them. With one
    right-or-wrong question per context it is McNemar's exact test.

    The distribution of the sum is built up context by context (Fisher 1935; Pagano and Tritchler 1983). It is exact for
    scores with a common denominator that leaves at most CELLS sums. Other scores are rounded to 1 / CELLS of their
    total, and a sum within the rounding error of the observed one counts as reaching it, so the p-value can be too
    large but never too small. The error grows with the number of contexts: from some 200 on it would hide differences,
    and DRAWS combinations are drawn instead, always the same ones. The observed one counts as one of them, so that the
    test keeps its level (Phipson and Smyth 2010), and no p-value is below 1 / (DRAWS + 1).

    Args:
        differences: one sum of score differences per context.
    """
    values = np.abs(np.array(differences, dtype=np.float64))
    shared = _share_denominator(values.tolist())
    if shared is None:
        scaled = values * (CELLS / values.sum())
        steps = np.rint(scaled).astype(np.int64)
        slack = int(2 * abs(scaled - steps).sum()) + 1  # the rounding error of two sums at most
        if slack > SLACK * np.sqrt(np.square(scaled).sum()):
            return _draw_signs(values, abs(math.fsum(differences)))
    else:
        steps, slack = np.array(shared), 0
    whole = int(steps.sum())
    reached = abs(int((np.sign(differences) * steps).sum())) - slack
    chance = np.ones(1)  # the probability of each sum of the differences that are positive
    for step in np.sort(steps[steps > 0]):  # the smallest first, so that the array stays short for long
        after = np.zeros(len(chance) + step)
        after[:-step] = chance
        after[step:] += chance
        chance = after / 2
    return min(1.0, 2 * float(chance[: (whole - reached) // 2 + 1].sum()))  # both ends are alike


def find_margin_p(differences: Sequence[float], by: float) -> float:
    """Two-sided p-value of the hypothesis that differences from -1 to 1 by context have the mean `by`.

    Sign flips need differences that are symmetric around `by`. Those of right-or-wrong answers are not: if 5 % of
    answers are lost, 30 contexts have no loss with probability 0.21, and then all differences are above -0.05.

    The test is by betting. If the mean is at most `by`, the product of 1 + bet * (difference - by) over contexts has an
    expectation of at most 1 for any fixed bet that cannot make it negative, and so has the mean over several bets. So
    by Markov's inequality the inverse of this mean is a p-value, for any distribution and number of contexts
    (Waudby-Smith and Ramdas, Estimating means of bounded random variables by betting, JRSS B 2024). Bets have
    Jeffreys's distribution over the allowed ones, because the largest are best where hardly anything varies.
    """
    above, below = _bet(differences, by), _bet([-x for x in differences], -by)
    return min(1.0, 2 / max(above, below))


def _bet(differences: Sequence[float], by: float) -> float:
    """Evidence that the mean is above `by`: at most 1 in expectation if it is not."""
    bets = np.sin(np.pi / 2 * (np.arange(BETS) + 0.5) / BETS) ** 2 / (1 + by)
    factors = 1 + bets[:, None] * (np.array(differences) - by)  # [bets, contexts]
    with np.errstate(over="ignore"):  # many contexts may win; no bet loses everything
        return float(np.exp(np.log(factors).sum(1)).mean())


def _draw_signs(values: NDArray[np.floating[Any]], observed: float) -> float:
    """The share of drawn sign combinations whose sum is at least as far from 0 as the observed one, which is one."""
    rng = np.random.default_rng(0)
    reached = 1
    for _ in range(DRAWS // DRAWN_AT_ONCE):
        bits = np.unpackbits(np.frombuffer(rng.bytes(DRAWN_AT_ONCE * -(-len(values) // 8)), np.uint8))
        positive = bits.reshape(DRAWN_AT_ONCE, -1)[:, : len(values)] @ values
        reached += int((abs(2 * positive - values.sum()) >= observed * (1 - ROUNDING)).sum())
    return reached / (DRAWS + 1)


def _share_denominator(values: Sequence[float]) -> list[int] | None:
    """The values as multiples of a common fraction; None if there is none with which they sum to at most CELLS."""
    exact = []
    for x in values:
        exact.append(_find_fraction(x))
        if abs(x - exact[-1]) > ROUNDING:
            return None
    part = math.lcm(*(x.denominator for x in exact))
    parts = [int(x * part) for x in exact]
    least = math.gcd(*parts) or 1  # all values are 0 after rounding
    return [x // least for x in parts] if sum(parts) <= CELLS * least else None


@functools.lru_cache(maxsize=4096)
def _find_fraction(value: float) -> Fraction:
    """Cached, because the scores of most tasks have few values."""
    return Fraction(value).limit_denominator(DENOMINATOR)


def adjust(p_values: Sequence[float]) -> list[float]:
    """Holm-adjusted p-values, in the order given; p < ALPHA bounds the family-wise error rate (Holm 1979)."""
    adjusted = [0.0] * len(p_values)
    most = 0.0
    for tested, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        most = max(most, min(1.0, (len(p_values) - tested) * p_values[index]))
        adjusted[index] = most
    return adjusted


def group_ties(best_first: Sequence[T], p_value: Callable[[T, T], float]) -> list[list[T]]:
    """Split a ranking into groups that share a rank.

    The best item leads the first group. The items below it join, up to the first one that differs significantly from
    the leader (p-values adjusted over all remaining items). That item leads the next group. The leader is chosen from
    the data and the adjustment does not cover this choice, so equal items are split more often than ALPHA.
    """
    groups = []
    rest = list(best_first)
    while rest:
        leader, *others = rest
        adjusted = adjust([p_value(leader, x) for x in others])
        tied = [x for x, _ in takewhile(lambda pair: pair[1] >= ALPHA, zip(others, adjusted, strict=True))]
        groups.append([leader, *tied])
        rest = others[len(tied) :]
    return groups
