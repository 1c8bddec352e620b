"""Exact lengths: finds the largest number of haystack units whose prompt still fits.

Prompts are measured whole and with the model's own tokenizer, because the token counts of parts do not add up to that
of their concatenation. Every unit must add at least one token. The search starts at an estimate from a line through two
measurements of a fixed example, and typically needs three measurements.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from kvbench.errors import UserError


@dataclass(frozen=True)
class LengthEstimate:
    """A rough estimate of a prompt's tokens as a function of its haystack units, to start a search."""

    base: float
    slope: float
    """Tokens per unit."""

    @classmethod
    def through(cls, count: Callable[[int], int], low: int, high: int) -> LengthEstimate:
        """The line through the measurements at `low` and `high` units."""
        first, second = count(low), count(high)
        slope = max(0.1, (second - first) / (high - low))
        return cls(first - slope * low, slope)


def largest_fit(count: Callable[[int], int], budget: int, *, least: int, line: LengthEstimate, what: str) -> int:
    """The largest n >= least with count(n) <= budget, if every unit adds at least one token.

    what: name of the request for the error message.

    Raises:
        UserError: `least` units do not fit.
    """
    low: int | None = None  # the most units known to fit
    high: int | None = None  # the fewest units known not to fit
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
                    f"{what} needs {measured} tokens at least, and {budget} are left for them. Use a greater --length "
                    "or fewer --turns."
                )
            high = n
            step = -max(1, math.ceil((measured - budget) / line.slope))
        if low is not None and high is not None and high - low == 1:
            return low
        n = max(n + step, least if low is None else low + 1)
        if high is not None:
            n = min(n, high - 1)
