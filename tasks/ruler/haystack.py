"""Haystacks: RULER's noise lines, lines that are needles themselves, or prose, generated or from a file."""

from __future__ import annotations

import hashlib
import itertools
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import ClassVar

from kvbench.errors import UserError
from kvbench.tasks.prose import sentences

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
DEPTHS = 40
"""RULER puts needles at distinct ones of 40 depths between 0 and 100 percent."""
FEWEST_WORDS = 200
"""Fewest words of a file; shorter text would repeat in the shortest prompt."""


def cut(units: Iterator[str], words: int) -> list[str]:
    """The first `words` words of a stream of units (sentences or lines); the last unit may be cut."""
    taken: list[str] = []
    left = words
    while left > 0:
        parts = next(units).split(" ")
        taken.append(" ".join(parts[:left]))
        left -= len(parts)
    return taken


def hide(lines: list[str], needles: Sequence[str], seed: int) -> str:
    """Insert each needle as a line of its own at a distinct random place."""
    # A fixed seed, so that places are reproducible while a search varies the number of lines.
    places = random.Random(seed).sample(range(len(lines)), len(needles))
    for place, needle in sorted(zip(places, needles, strict=True), reverse=True):
        lines.insert(place, needle)
    return "\n".join(lines)


class Haystack(ABC):
    """The text of one sample into which needles are inserted, measured in units (words or lines)."""

    stretch: ClassVar[int] = 1000
    """Units between the two measurements for the initial estimate of a length."""

    @abstractmethod
    def least(self, needles: int) -> int:
        """Fewest units."""

    def short(self, needles: int) -> int:
        """Units of a short haystack that has at least as many tokens as `least` units of any other sample."""
        return max(20, self.least(needles))

    @abstractmethod
    def text(self, n: int, needles: Sequence[str]) -> str:
        """The haystack of `n` units with the needles."""


@dataclass
class NoiseHaystack(Haystack):
    """Copies of RULER's noise line, with needles on lines of their own at distinct random places. Units are words."""

    rng: random.Random
    seed: int = field(init=False)

    def __post_init__(self) -> None:
        self.seed = self.rng.getrandbits(64)

    def least(self, needles: int) -> int:
        """The words of one line for each needle."""
        return needles * len(NOISE.split(" "))

    def text(self, n: int, needles: Sequence[str]) -> str:
        """The noise of `n` words with the needles."""
        return hide(cut(itertools.repeat(NOISE), n), needles, self.seed)


@dataclass
class NeedleHaystack(Haystack):
    """Lines that are needles themselves, with the needles asked for at distinct random places. Units are lines.

    RULER draws lines independently; here no key and no value occurs twice, so that every question has one answer.
    """

    rng: random.Random
    pairs: Iterator[tuple[str, str]]
    """Endless keys and values of the lines."""
    needle: Callable[[str, str], str]
    """Formats the line of a key and a value."""
    stretch: ClassVar[int] = 40

    def __post_init__(self) -> None:
        self.seed = self.rng.getrandbits(64)
        self.seen: dict[str, str] = {}
        self.values: set[str] = set()

    def units(self) -> Iterator[tuple[str, str]]:
        """The distinct pairs from the start; further ones are drawn on demand."""
        yield from list(self.seen.items())
        for key, value in self.pairs:
            if key not in self.seen and value not in self.values:
                self.seen[key] = value
                self.values.add(value)
                yield key, value

    def least(self, needles: int) -> int:
        """One line for each needle."""
        return needles

    def short(self, needles: int) -> int:
        """Two lines for each needle, because lines differ in tokens."""
        return 2 * needles

    def text(self, n: int, needles: Sequence[str]) -> str:
        """`n` lines without any key or value of the needles, and the needles."""
        own = (pair for pair in self.units() if not any(part in needle for part in pair for needle in needles))
        return hide([self.needle(*pair) for pair in itertools.islice(own, n)], needles, self.seed)


@dataclass
class ProseHaystack(Haystack):
    """Sentences with needles between them at depths drawn without replacement. Units are words."""

    rng: random.Random
    source: Iterator[str] | None = None
    """Sentences to use; None: generated prose."""

    def __post_init__(self) -> None:
        self.depth_seed = self.rng.getrandbits(64)
        self.stream = self.source or sentences(random.Random(self.rng.getrandbits(64)))
        self.seen: list[str] = []

    def units(self) -> Iterator[str]:
        """The sentences from the start; further ones are drawn on demand."""
        for index in itertools.count():
            if index == len(self.seen):
                self.seen.append(next(self.stream))
            yield self.seen[index]

    def least(self, needles: int) -> int:
        """One word: needles may stand between any number of sentences."""
        del needles
        return 1

    def text(self, n: int, needles: Sequence[str]) -> str:
        """The prose of `n` words with the needles."""
        parts = cut(self.units(), n)
        points = max(DEPTHS, len(needles))
        chosen = random.Random(self.depth_seed).sample(range(points), len(needles))
        places = sorted(int(len(parts) * round(100 * point / (points - 1)) / 100) for point in chosen)
        for place, needle in reversed(list(zip(places, needles, strict=True))):
            parts.insert(place, needle)
        return " ".join(parts)


@cache
def read_sentences(path: str) -> tuple[tuple[str, ...], str]:
    """The sentences of a text file with normalized white space, as in RULER, and the file's hash.

    Sentences end at `.`, `!` or `?` before white space (RULER uses NLTK, which needs a download).

    Raises:
        UserError: the file cannot be read or is too short.
    """
    try:
        data = Path(path).expanduser().read_bytes()
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
