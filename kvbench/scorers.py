"""Scorers for tasks without code (`kvbench.custom`)."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.task import Scorer


def contains(prediction: str, references: Sequence[str]) -> float:
    """1.0 if the prediction contains one of the references, case-sensitive."""
    return float(any(x in prediction for x in references))


def exact(prediction: str, references: Sequence[str]) -> float:
    """1.0 if the prediction equals one of the references after stripping white space."""
    return float(prediction.strip() in {x.strip() for x in references})


def string_match_all(prediction: str, references: Sequence[str]) -> float:
    """Share of the references that the prediction contains, case-insensitive."""
    return sum(x.lower() in prediction.lower() for x in references) / len(references)


SCORERS = {
    f"{name}@1": Scorer(f"{name}@1", name, score)
    for name, score in (("contains", contains), ("exact", exact), ("string-match-all", string_match_all))
}
"""Scorers for tasks without code; `kvbench show TASK` lists the ids of all other scorers."""
