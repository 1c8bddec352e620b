"""Exact lengths: the largest number of haystack units whose prompt still fits.

A length in tokens is a promise to the model under test, so text is measured with its own tokenizer, whole: the sum of
tokenised pieces is not the length of their concatenation. The search starts from the slope of what it has measured,
and typically needs four measurements.
"""

from __future__ import annotations

from collections.abc import Callable

from kvbench.errors import UserError


def largest_fit(count: Callable[[int], int], budget: int, *, least: int, guess: float, what: str) -> int:
    """The largest n >= least with count(n) <= budget, where count grows with n.

    guess: tokens per unit, roughly. what: names the request in the UserError raised when `least` does not fit.
    """
    low, low_count = least, count(least)
    if low_count > budget:
        raise UserError(
            f"{what} needs {low_count} prompt tokens at least, but only {budget} are left beside the generation limit. "
            "Ask for a greater --length or fewer --turns."
        )
    high: int | None = None
    slope = guess
    while high is None or high - low > 1:
        n = low + max(1, int((budget - low_count) / slope))
        if high is not None:
            n = min(n, high - 1)
        measured = count(n)
        if measured <= budget:
            if measured > low_count:
                slope = (measured - low_count) / (n - low)
            low, low_count = n, measured
        else:
            slope = max(slope / 4, (measured - low_count) / (n - low))
            high = n
    return low
