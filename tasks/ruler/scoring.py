"""RULER's post-processing and string match (scripts/eval at c3f5e3b4)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvbench.task import Scorer
from kvbench.text.scorers import make_strict

CONTROL = re.compile(r"[\x00-\x1f]")


def post_process(prediction: str) -> str:
    """Strip, replace control characters by newlines, strip again."""
    return CONTROL.sub("\n", prediction.strip()).strip()


def string_match_all(prediction: str, references: Sequence[str]) -> float:
    """Share of references that the prediction contains, case-insensitive."""
    text = post_process(prediction).lower()
    return sum(reference.lower() in text for reference in references) / len(references)


def string_match_part(prediction: str, references: Sequence[str]) -> float:
    """Whether the prediction contains any reference, case-insensitive: for RULER's questions about documents.

    A reference may match a part of a word: `no` matches in `not`.
    """
    text = post_process(prediction).lower()
    return float(any(reference.lower() in text for reference in references))


STRING_MATCH_ALL = Scorer("ruler-string-match-all@1", "string_match_all", string_match_all)
STRICT_ALL = make_strict(STRING_MATCH_ALL, every=True)
STRING_MATCH_PART = Scorer("ruler-string-match-part@1", "string_match_part", string_match_part)
STRICT_PART = make_strict(STRING_MATCH_PART, every=False)
