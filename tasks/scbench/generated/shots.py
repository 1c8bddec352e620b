"""Multiple choice after many answered examples, after SCBench's ICL.ManyShot.

SCBench uses questions of BIG-Bench Hard, which a model may answer without the examples. Here invented words belong to
groups with invented names by their endings. Names and endings are drawn for each sample, so that the answer follows
only from the examples. The options have another order in every question, so that letters carry no information.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvbench.task import Example, Scorer, Turn
from kvbench.tasks.scbench.generated.generator import Generated, depths, shuffle
from kvbench.tasks.scoring.scbench import SCORERS

LETTERS = "ABCD"
QUESTION = 'Q: Which group does the word "{word}" belong to?\nOptions:\n{options}\nA:'
ANSWER = " ({letter})"
STARTS = ("b", "br", "d", "f", "fl", "g", "gl", "k", "l", "m", "n", "p", "pr", "s", "t", "tr")
VOWELS = "aeiou"
ENDS = ("", "k", "l", "m", "n", "p", "s", "t")
"""Final consonants of syllables."""


@dataclass(frozen=True)
class Shot:
    """A question: a word, the name of its group, and the names of all groups in the order of the options."""

    word: str
    group: str
    options: tuple[str, ...]

    @property
    def question(self) -> str:
        """The text up to the start of the answer."""
        options = "\n".join(f"({letter}) {name}" for letter, name in zip(LETTERS, self.options, strict=True))
        return QUESTION.format(word=self.word, options=options)

    @property
    def letter(self) -> str:
        """The letter of the right option."""
        return LETTERS[self.options.index(self.group)]

    @property
    def answer(self) -> str:
        """The letter in the format of the examples."""
        return ANSWER.format(letter=self.letter)


def draw_syllable(rng: random.Random) -> str:
    """Draw a syllable."""
    return rng.choice(STARTS) + rng.choice(VOWELS) + rng.choice(ENDS)


def draw_shots(rng: random.Random, n: int) -> list[Shot]:
    """Draw `n` questions about distinct words, with groups in rotation."""
    size = len(LETTERS)
    names: dict[str, None] = {}
    while len(names) < 2 * size:
        names[draw_syllable(rng) + rng.choice(STARTS)[0]] = None
    groups, endings = list(names)[:size], list(names)[size:]
    drawn: dict[str, Shot] = {}
    while len(drawn) < n:
        group = len(drawn) % size
        word = draw_syllable(rng) + draw_syllable(rng) + endings[group]
        drawn.setdefault(word, Shot(word, groups[group], tuple(rng.sample(groups, size))))
    return list(drawn.values())


@dataclass(frozen=True)
class ManyShot(Generated):
    """Multiple choice of the group of an invented word."""

    name: ClassVar[str] = "many-shot"
    summary: ClassVar[str] = "SCBench ICL.ManyShot format: an invented word's group by its letter, after many examples"
    scorers: ClassVar[tuple[Scorer, ...]] = SCORERS["scbench_many_shot"][::-1]
    """The corrected scorer is the default; the official one accepts a letter that occurs in a name."""
    default_length: ClassVar[int] = 4096
    needs: ClassVar[str | None] = "a larger model"
    max_new_tokens: ClassVar[int] = 10
    unit_tokens: ClassVar[int] = 20

    @property
    def prompt_id(self) -> str:
        """The prompt's id, with the kind of rule."""
        return "many-shot/endings@1"

    def least(self, turns: int) -> int:
        """One example of each group."""
        del turns
        return len(LETTERS)

    def compose(self, shots: Sequence[Shot], asked: Sequence[Shot], *, id: str) -> Example:
        """Build the example with all shots answered in this order, and questions about the others.

        The fact `depths` of a turn has the depths of all shots of its group.
        """
        text = "\n\n".join(f"{x.question}{x.answer}" for x in shots)
        alike = [depths(text, [x.question for x in shots if x.group == one.group]) for one in asked]
        turns = tuple(
            Turn(x.question, "", x.answer, (x.letter, x.group), self.max_new_tokens, facts={"depths": found})
            for x, found in zip(asked, alike, strict=True)
        )
        return Example(id, text, turns, {"keys": [x.word for x in asked], "shots": len(shots)})

    def prepare(self, rng: random.Random, *, id: str, turns: int, most: int) -> Callable[[int], Example]:
        """Draw everything but the number of units; a unit is an answered example."""
        drawn, seed = draw_shots(rng, turns + most), rng.getrandbits(64)
        return lambda n: self.compose(shuffle(drawn[turns : turns + n], 0, seed)[0], drawn[:turns], id=id)
