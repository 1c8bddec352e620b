"""Retrieval of a string by its two ends, after SCBench's Retr.Prefix-Suffix.

`prefix-suffix` has strings of 25 random characters with codes 65 to 122 and ends of five characters, as SCBench
describes its own; backslashes are left out, because lists would escape them. `prefix-suffix-short` has an adjective, a
number of seven digits and a noun. In both, only one string has both ends of a question; in the short variant, others
may have one of them. SCBench's wording could not be looked up, so the wording and the list format are kvbench's own.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvbench.task import Example, Scorer, Turn
from kvbench.tasks.scbench.generated.generator import Generated, depths, shuffle
from kvbench.tasks.scoring.scbench import SCORERS
from kvbench.tasks.words import draw_keys, draw_numbers

INTRO = "Find the string with the given prefix and suffix in the list of strings below.\n\n"
QUESTION = 'Prefix: "{prefix}"\nSuffix: "{suffix}"\nThe string with this prefix and this suffix is: '
CHARACTERS = "".join(chr(code) for code in range(65, 123)).replace("\\", "")
SIZE = 25
END = 5
SHORT = 6
"""Most letters in each word of a short string."""


@dataclass(frozen=True)
class PrefixSuffix(Generated):
    """Base class of the variants, which differ in their strings and ends."""

    scorers: ClassVar[tuple[Scorer, ...]] = SCORERS["scbench_prefix_suffix"]
    max_new_tokens: ClassVar[int] = 150

    @abstractmethod
    def draw(self, rng: random.Random, n: int) -> list[str]:
        """Draw `n` strings, no two with the same ends."""

    @abstractmethod
    def ends(self, text: str) -> tuple[str, str]:
        """The prefix and the suffix of a string."""

    def least(self, turns: int) -> int:
        """Only the strings asked for."""
        return turns

    def compose(self, strings: Sequence[str], asked: Sequence[int], *, id: str) -> Example:
        """Build the example that lists all strings in this order and asks for those with the indices `asked`."""
        reference = [strings[i] for i in asked]
        ends = [self.ends(text) for text in reference]
        turns = tuple(
            Turn(QUESTION.format(prefix=prefix, suffix=suffix), "", text, (text,), self.max_new_tokens)
            for text, (prefix, suffix) in zip(reference, ends, strict=True)
        )
        text = "\n".join(strings)
        facts = {
            "keys": ["...".join(pair) for pair in ends], "depths": depths(text, reference), "strings": len(strings),
        }
        return Example(id, INTRO + text, turns, facts)

    def prepare(self, rng: random.Random, *, id: str, turns: int, most: int) -> Callable[[int], Example]:
        """Draw everything but the number of units; a unit is a string."""
        drawn, seed = self.draw(rng, most), rng.getrandbits(64)
        return lambda n: self.compose(*shuffle(drawn[:n], turns, seed), id=id)


@dataclass(frozen=True)
class PrefixSuffixCharacters(PrefixSuffix):
    """Strings of random characters, as in SCBench."""

    name: ClassVar[str] = "prefix-suffix"
    summary: ClassVar[str] = "SCBench Retr.Prefix-Suffix format: the one random string with a given beginning and end"
    needs: ClassVar[str | None] = "a larger model"
    unit_tokens: ClassVar[int] = 8

    @property
    def prompt_id(self) -> str:
        """The prompt's id, with the kind of strings."""
        return "prefix-suffix/characters@1"

    def draw(self, rng: random.Random, n: int) -> list[str]:
        """Draw strings of 25 characters."""
        drawn: dict[tuple[str, str], str] = {}
        while len(drawn) < n:
            text = "".join(rng.choices(CHARACTERS, k=SIZE))
            drawn.setdefault(self.ends(text), text)
        return list(drawn.values())

    def ends(self, text: str) -> tuple[str, str]:
        """The first and the last five characters."""
        return text[:END], text[-END:]


@dataclass(frozen=True)
class PrefixSuffixShort(PrefixSuffix):
    """Strings of two short words and a number."""

    name: ClassVar[str] = "prefix-suffix-short"
    summary: ClassVar[str] = "SCBench Retr.Prefix-Suffix format with two short words around a number of seven digits"
    needs: ClassVar[str | None] = "a larger model"
    unit_tokens: ClassVar[int] = 5

    @property
    def prompt_id(self) -> str:
        """The prompt's id, with the kind of strings."""
        return "prefix-suffix/short@1"

    def draw(self, rng: random.Random, n: int) -> list[str]:
        """Draw strings of adjective, number and noun."""
        keys, numbers = draw_keys(rng, n, SHORT), draw_numbers(rng, n)
        return [key.replace("-", f"-{number}-") for key, number in zip(keys, numbers, strict=True)]

    def ends(self, text: str) -> tuple[str, str]:
        """The two words with their hyphens, so that they do not match a part of a longer word."""
        adjective, _, noun = text.split("-")
        return f"{adjective}-", f"-{noun}"
