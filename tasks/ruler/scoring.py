"""RULER's post-processing and string match (scripts/eval at c3f5e3b4)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvbench.task import Scorer

CONTROL = re.compile(r"[\x00-\x1f]")


def post_process(prediction: str) -> str:
    """Strip, turn control characters into newlines, strip again."""
    return CONTROL.sub("\n", prediction.strip()).strip()


def string_match_all(prediction: str, references: Sequence[str]) -> float:
    """Mean over the references of: the lower-cased reference is inside the lower-cased prediction."""
    text = post_process(prediction).lower()
    return sum(reference.lower() in text for reference in references) / len(references)


STRING_MATCH_ALL = Scorer("ruler-string-match-all@1", "string_match_all", string_match_all)
