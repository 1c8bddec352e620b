"""Retrieval of a string by its two ends, after SCBench's Retr.Prefix-Suffix.

`prefix-suffix` has strings of 25 random characters of codes 65 to 122 with ends of five, as SCBench's are said to be; a
backslash is left out, because it would be written otherwise in a string than in a list of them. `prefix-suffix-short`
has an adjective, a number of seven digits and a noun. In either only one string has both ends of a question; in the
short one others may have one of them. The wording of SCBench's question could not be looked up: it is our own, and so
is the list, a string to a line.
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
"""Most letters of either word of a short string."""


@dataclass(frozen=True)
class PrefixSuffix(Generated):
    """What the variants share; a variant says what strings and their ends look like."""

    scorers: ClassVar[tuple[Scorer, ...]] = SCORERS["scbench_prefix_suffix"]
    max_new_tokens: ClassVar[int] = 150

    @abstractmethod
    def draw(self, rng: random.Random, n: int) -> list[str]:
        """`n` strings, no two with the same ends."""

    @abstractmethod
    def ends(self, text: str) -> tuple[str, str]:
        """Prefix and suffix of a string that is asked for."""

    def least(self, turns: int) -> int:
        """The strings asked for."""
        return turns

    def compose(self, strings: Sequence[str], asked: Sequence[int], *, id: str) -> Example:
        """The example that lists all strings in this order and asks for some of them in turn."""
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
        """A unit is a string."""
        drawn, seed = self.draw(rng, most), rng.getrandbits(64)
        return lambda n: self.compose(*shuffle(drawn[:n], turns, seed), id=id)


@dataclass(frozen=True)
class PrefixSuffixCharacters(PrefixSuffix):
    """Random characters, as in SCBench."""

    name: ClassVar[str] = "prefix-suffix"
    summary: ClassVar[str] = "SCBench Retr.Prefix-Suffix format: the one random string with a given beginning and end"
    needs: ClassVar[str | None] = "a larger model"
    unit_tokens: ClassVar[int] = 8

    @property
    def prompt_id(self) -> str:
        """Wording and kind of strings."""
        return "prefix-suffix/characters@1"

    def draw(self, rng: random.Random, n: int) -> list[str]:
        """Strings of 25 characters."""
        drawn: dict[tuple[str, str], str] = {}
        while len(drawn) < n:
            text = "".join(rng.choices(CHARACTERS, k=SIZE))
            drawn.setdefault(self.ends(text), text)
        return list(drawn.values())

    def ends(self, text: str) -> tuple[str, str]:
        """Five characters each."""
        return text[:END], text[-END:]


@dataclass(frozen=True)
class PrefixSuffixShort(PrefixSuffix):
    """Short words and numbers."""

    name: ClassVar[str] = "prefix-suffix-short"
    summary: ClassVar[str] = "SCBench Retr.Prefix-Suffix format with two short words around a number of seven digits"
    needs: ClassVar[str | None] = "a larger model"
    unit_tokens: ClassVar[int] = 5

    @property
    def prompt_id(self) -> str:
        """Wording and kind of strings."""
        return "prefix-suffix/short@1"

    def draw(self, rng: random.Random, n: int) -> list[str]:
        """Adjective, number and noun."""
        keys, numbers = draw_keys(rng, n, SHORT), draw_numbers(rng, n)
        return [key.replace("-", f"-{number}-") for key, number in zip(keys, numbers, strict=True)]

    def ends(self, text: str) -> tuple[str, str]:
        """The two words, each with its hyphen, so that no longer word has it as its end."""
        adjective, _, noun = text.split("-")
        return f"{adjective}-", f"-{noun}"
