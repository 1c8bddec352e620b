"""Exact lengths: the largest number of haystack units whose prompt still fits.

A length in tokens is a promise to the model under test, so text is measured with its own tokenizer, whole: the sum of
tokenized pieces is not the length of their concatenation. Every unit adds a token or more. The search starts where a
line through two measurements of a fixed example says, and typically needs three measurements.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from kvbench.errors import UserError


@dataclass(frozen=True)
class Line:
    """Tokens of a prompt as a function of its haystack units, roughly: where a search starts, never where it ends."""

    base: float
    slope: float
    """Tokens per unit."""

    @classmethod
    def through(cls, count: Callable[[int], int], low: int, high: int) -> Line:
        """The line through two measurements."""
        first, second = count(low), count(high)
        slope = max(0.1, (second - first) / (high - low))
        return cls(first - slope * low, slope)


def largest_fit(count: Callable[[int], int], budget: int, *, least: int, line: Line, what: str) -> int:
    """The largest n >= least with count(n) <= budget, where every unit adds at least one token.

    what: names the request in the UserError raised when `least` does not fit.
    """
    low: int | None = None  # the most units known to fit
    high: int | None = None  # the fewest known not to
    n = max(least, int((budget - line.base) / line.slope))
    while True:
        measured = count(n)
        if measured == budget:
            return n
        if measured < budget:
            low = n
            step = max(1, int((budget - measured) / line.slope))
        else:
            if n == least:
                raise UserError(
                    f"{what} needs {measured} prompt tokens at least, but only {budget} are left beside the generation "
                    "limit. Ask for a greater --length or fewer --turns."
                )
            high = n
            step = -max(1, math.ceil((measured - budget) / line.slope))
        if low is not None and high is not None and high - low == 1:
            return low
        n = max(n + step, least if low is None else low + 1)
        if high is not None:
            n = min(n, high - 1)
