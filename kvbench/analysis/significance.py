"""Whether a difference is more than noise: paired by question, drawn by context, held to 5 % over all rows at once.

`stats.py` has what a run writes into its result; nothing here is part of a run, so nothing here changes one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import takewhile
from typing import TypeVar

import numpy as np

from kvbench.runs.stats import bootstrap_interval

ALPHA = 0.05
"""False positives that are accepted, over all rows that are compared with one."""
CELLS = 50_000
DENOMINATOR = 1000
"""Greatest denominator that is looked for in a difference of scores."""
ROUNDING = 1e-10
"""What sums of scores may have lost as floats."""

T = TypeVar("T")


@dataclass(frozen=True)
class Paired:
    """The second of two methods minus the first, over the questions that both answered."""

    n: int
    """Questions."""
    contexts: int
    mean: float
    ci95: tuple[float, float]
    """Paired bootstrap: contexts are drawn, with both methods' answers to all their questions."""
    p: float
    """Of `flip_signs`."""


def compare_scores(contexts: Sequence[Sequence[tuple[float, float]]]) -> Paired:
    """Paired scores (first, second) of the questions of each context; at least one of each."""
    differences = [[b - a for a, b in pairs] for pairs in contexts]
    sums = [sum(x) for x in differences]
    n = sum(map(len, differences))
    return Paired(n, len(differences), sum(sums) / n, bootstrap_interval(differences), flip_signs(sums))


def flip_signs(differences: Sequence[float]) -> float:
    """Two-sided p-value of differences by context: how often random signs bring a sum as far from 0 as theirs.

    Where two methods do not differ, their names could be swapped in any context. Unlike the bootstrap's own p-value it
    promises no more than it keeps with few contexts, or where methods disagree in few of them. With one right-or-wrong
    question per context it is McNemar's exact test. Every combination of signs counts, without drawing any: the
    distribution of the sum is built up context by context (Fisher 1935; Pagano and Tritchler 1983). It is exact for
    scores that share a denominator which leaves no more than CELLS sums. Others are rounded to one of CELLS parts of
    what they sum to, and a sum that rounding alone may keep from reaching theirs counts as reaching it: the p-value
    comes out too large, never too small.
    """
    values = abs(np.array(differences, dtype=float))
    total = float(values.sum())
    if not total:
        return 1.0
    shared = _share_denominator(values.tolist())
    if shared is None:
        scaled = values * (CELLS / total)
        steps = np.rint(scaled).astype(np.int64)
        slack = int(2 * abs(scaled - steps).sum()) + 1  # theirs and another sum, each as wrong as it can be
    else:
        steps, slack = np.array(shared), 0
    middle = int(steps.sum())
    chance = np.zeros(2 * middle + 1)  # of every sum from -middle to middle
    chance[middle] = 1.0
    for step in steps[steps > 0]:
        chance = (np.roll(chance, step) + np.roll(chance, -step)) / 2
    reached = abs(int((np.sign(differences) * steps).sum())) - slack
    if reached <= 0:
        return 1.0
    return min(1.0, float(chance[: middle - reached + 1].sum() + chance[middle + reached :].sum()))


def _share_denominator(values: Sequence[float]) -> list[int] | None:
    """The values as whole numbers of one part; None: there is none with which they sum to no more than CELLS."""
    exact = [Fraction(x).limit_denominator(DENOMINATOR) for x in values]
    if any(abs(x - y) > ROUNDING for x, y in zip(values, exact, strict=True)):
        return None
    part = math.lcm(*(x.denominator for x in exact))
    parts = [int(x * part) for x in exact]
    least = math.gcd(*parts) or 1  # rounding alone is no difference
    return [x // least for x in parts] if sum(parts) <= CELLS * least else None


def adjust(p_values: Sequence[float]) -> list[float]:
    """Holm's adjustment: rejecting those below ALPHA errs at all with probability ALPHA at most (Holm 1979)."""
    adjusted = [0.0] * len(p_values)
    most = 0.0
    for tested, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        most = max(most, min(1.0, (len(p_values) - tested) * p_values[index]))
        adjusted[index] = most
    return adjusted


def group_ties(best_first: Sequence[T], p_value: Callable[[T, T], float]) -> list[list[T]]:
    """Groups that share a rank.

    The best leads the first group, and those below it are in it, up to the first one that differs from the leader
    (p-values adjusted over all that are left); that one leads the next group.
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
