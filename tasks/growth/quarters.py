"""Scorers of long answers: over the whole reference answer, and over each quarter of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from kvbench.task import Scorer

QUARTERS = 4
Right = Callable[..., list[bool]]
"""A function with the arguments of a scorer that returns, for each reference, whether the prediction has it."""


def share(
    right: Right, prediction: str, references: Sequence[str], quarters: tuple[int, int] = (0, QUARTERS), **facts: object
) -> float:
    """Share of references that the prediction has, from the first to before the last of `quarters`."""
    first, last = (len(references) * quarter // QUARTERS for quarter in quarters)
    found = right(prediction, references, **facts)[first:last]
    return sum(found) / len(found)


def score_quarters(name: str, metric: str, right: Right) -> tuple[Scorer, ...]:
    """Version 1 of five scorers: over the whole answer, `name@1`, and its quarters, `name-q1@1` to `name-q4@1`."""
    return (
        Scorer(f"{name}@1", metric, partial(share, right)),
        *(
            Scorer(f"{name}-q{i + 1}@1", f"{metric}_q{i + 1}", partial(share, right, quarters=(i, i + 1)))
            for i in range(QUARTERS)
        ),
    )
