"""Scores of long answers over their parts: all of the reference answer, and each quarter of it, by output position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from kvbench.task import Scorer

QUARTERS = 4
Right = Callable[..., list[bool]]
"""Of each part of the references, whether the prediction has it: takes what a scorer takes."""


def share(
    right: Right, prediction: str, references: Sequence[str], quarters: tuple[int, int] = (0, QUARTERS), **facts: object
) -> float:
    """The share of right parts among the reference ones from one quarter of them up to another."""
    first, last = (len(references) * quarter // QUARTERS for quarter in quarters)
    found = right(prediction, references, **facts)[first:last]
    return sum(found) / len(found)


def score_quarters(name: str, metric: str, right: Right) -> tuple[Scorer, ...]:
    """Version 1 of five scorers: of the whole, `name@1`, and of its quarters, `name-q1@1` to `name-q4@1`."""
    return (
        Scorer(f"{name}@1", metric, partial(share, right)),
        *(
            Scorer(f"{name}-q{i + 1}@1", f"{metric}_q{i + 1}", partial(share, right, quarters=(i, i + 1)))
            for i in range(QUARTERS)
        ),
    )
