"""What needles are hidden in: RULER's noise lines, or prose that is generated or read from a file."""

from __future__ import annotations

import hashlib
import itertools
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from kvbench.errors import UserError
from kvbench.tasks.prose import sentences

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
DEPTHS = 40
"""RULER's needles sit at distinct ones of 40 depths between 0 and 100 percent."""
FEWEST_WORDS = 200
"""A file shorter than this is a mistake: its text would be repeated in the shortest prompt."""


def cut(units: Iterator[str], words: int) -> list[str]:
    """The first `words` words of a stream of units (sentences or lines); the last unit may be cut."""
    taken: list[str] = []
    left = words
    while left > 0:
        parts = next(units).split(" ")
        taken.append(" ".join(parts[:left]))
        left -= len(parts)
    return taken


@dataclass
class NoiseHaystack:
    """Copies of RULER's noise line, needles on lines of their own at distinct random places."""

    rng: random.Random
    seed: int = field(init=False)

    def __post_init__(self) -> None:
        self.seed = self.rng.getrandbits(64)

    def least(self, needles: int) -> int:
        """Fewest words: a line for each needle to stand before."""
        return needles * len(NOISE.split(" "))

    def text(self, words: int, needles: Sequence[str]) -> str:
        """The haystack of so many words with its needles."""
        lines = cut(itertools.repeat(NOISE), words)
        # Reseeded, so that a search over the number of words places the needles of one sample in one way.
        places = random.Random(self.seed).sample(range(len(lines)), len(needles))
        for place, needle in sorted(zip(places, needles, strict=True), reverse=True):
            lines.insert(place, needle)
        return "\n".join(lines)


@dataclass
class ProseHaystack:
    """Sentences, needles between them at depths drawn without replacement."""

    rng: random.Random
    source: Iterator[str] | None = None
    """Sentences; None: generated."""

    def __post_init__(self) -> None:
        self.depth_seed = self.rng.getrandbits(64)
        self.stream = self.source or sentences(random.Random(self.rng.getrandbits(64)))
        self.seen: list[str] = []

    def units(self) -> Iterator[str]:
        """The sentences from the start, drawing from the stream where they were not yet seen."""
        for index in itertools.count():
            if index == len(self.seen):
                self.seen.append(next(self.stream))
            yield self.seen[index]

    def least(self, needles: int) -> int:
        """Fewest words."""
        del needles  # they stand between sentences, however few there are
        return 1

    def text(self, words: int, needles: Sequence[str]) -> str:
        """The haystack of so many words with its needles."""
        parts = cut(self.units(), words)
        points = max(DEPTHS, len(needles))
        chosen = random.Random(self.depth_seed).sample(range(points), len(needles))
        places = sorted(int(len(parts) * round(100 * point / (points - 1)) / 100) for point in chosen)
        for place, needle in reversed(list(zip(places, needles, strict=True))):
            parts.insert(place, needle)
        return " ".join(parts)


@cache
def read_sentences(path: str) -> tuple[tuple[str, ...], str]:
    """The sentences of a text file with white space collapsed as RULER does, and the hash of the file.

    Sentences end at `.`, `!` or `?` and white space (RULER asks NLTK, which needs a download). Raises UserError.
    """
    try:
        data = Path(path).read_bytes()
        text = " ".join(data.decode("utf-8").split())
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise UserError(
            f"haystack file '{path}' cannot be read: {reason}. Allowed: prose, or the path of a text file. "
            "Check the path, or leave the setting out for generated prose."
        ) from error
    if len(text.split(" ")) < FEWEST_WORDS:
        raise UserError(
            f"haystack file '{path}' has {len(text.split())} words; at least {FEWEST_WORDS} are needed. "
            "Give a longer text, or leave the setting out for generated prose."
        )
    return tuple(re.split(r"(?<=[.!?]) ", text)), hashlib.sha256(data).hexdigest()
