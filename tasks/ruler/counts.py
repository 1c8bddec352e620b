"""RULER's two counting tasks: the ten common words of a list (`cwe`), the three most frequent coded words (`fwe`).

Prompts equal RULER's byte for byte. Intended differences: words are shuffled with a new seed for each sample, while
RULER's fresh `Random(42)` puts the answers into the same slots of every list; the solved example of `cwe` shares no
word with the list; and if the word lists are used up (about 120,000 tokens), further rare words are adjective-noun
keys, while RULER switches to another list for all words.

The answer depends on the whole context, so there is one question and only the mode `single`.

A list is cut to whole words, each with all its repeats. Coded text is enlarged by one word before rounding, which adds
a few words or none. A tokenizer may make fewer tokens of a longer text, so the size found may not be the largest that
fits; it is measured and fits.
"""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import pi
from typing import TYPE_CHECKING, ClassVar

from kvbench.task import Example, Mode, Scorer, Task, Turn, count_prompt
from kvbench.tasks.length import LengthEstimate, largest_fit
from kvbench.tasks.ruler.scoring import STRICT_ALL, STRING_MATCH_ALL
from kvbench.tasks.words import draw_keys, words

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CWE_INTRO = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n"
)
CWE_QUESTION = "Question: What are the 10 most common words in the above list?"
CWE_PREFIX = " Answer: The top 10 words that appear most often in the list are:"
CWE_MAX_NEW_TOKENS = 120
COMMON = 10
FEWEST_LISTED = 2 * COMMON
MIN_ENTRY_TOKENS = 2
"""Lower bound on the tokens of a number and a word, for any tokenizer."""
SHORT = 4096
"""Length below which RULER has fewer repeats and a smaller solved example."""
FWE_INTRO = (
    "Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words. "
)
FWE_QUESTION = (
    "Question: Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text?"
)
FWE_PREFIX = " Answer: According to the coded text above, the three most frequently appeared words are:"
FWE_MAX_NEW_TOKENS = 50
DOTS = "..."
"""RULER's most frequent word, which does not count."""
FREQUENT = 3
LETTERS = 6
TOKENS_PER_WORD = 50
"""RULER's vocabulary has one word for every 50 tokens of text."""
FEWEST_CODED = 74
"""Fewest words for which the third most frequent word is more frequent than the fourth."""


@dataclass(frozen=True)
class Repeats:
    """Repeats of common and rare words, in the list and in the solved example before it."""

    common: int
    rare: int
    shot_words: int
    shot_common: int
    shot_rare: int

    @classmethod
    def of(cls, length: int) -> Repeats:
        """RULER's repeats for a requested length."""
        return cls(30, 3, 40, 10, 3) if length >= SHORT else cls(6, 1, 20, 3, 1)


@cache
def vocabulary() -> tuple[str, ...]:
    """The sorted words of RULER's lists of nouns, adjectives and verbs."""
    return tuple(sorted({*words("noun"), *words("adjective"), *words("verb")}))


def draw_listed(rng: random.Random, shot: int, n: int) -> tuple[list[str], list[str]]:
    """Draw distinct words for the solved example and, `n` or more, for the list; then adjective-noun keys."""
    drawn = rng.sample(vocabulary(), len(vocabulary()))
    return drawn[:shot], drawn[shot:] + draw_keys(rng, max(0, shot + n - len(drawn)))


def number(items: Sequence[str]) -> str:
    """Number items as RULER does, `1. one 2. two`."""
    return " ".join(f"{i}. {item}" for i, item in enumerate(items, 1))


def list_words(items: Sequence[str], common: int, rare: int, rng: random.Random) -> str:
    """The shuffled, numbered list with the first ten words `common` times and the others `rare` times."""
    entries = [*items[:COMMON]] * common + [*items[COMMON:]] * rare
    rng.shuffle(entries)
    return number(entries)


def show_answer(items: Sequence[str]) -> str:
    """Question and answer of the solved list, with a line break before and after."""
    return f"\n{CWE_QUESTION}{CWE_PREFIX} {number(items[:COMMON])}\n"


def count_coded(n: int, k: int) -> int:
    """Count of the word of rank `k` (from 1) among `n`: RULER's zeta distribution with alpha 2, rounded down."""
    return int(n * float(k) ** -2.0 / (pi**2 / 6))


@dataclass(frozen=True)
class Counting(Task):
    """Base class of both tasks, with one question about the whole context."""

    version: ClassVar[str] = "1"
    suite: ClassVar[str] = "ruler"
    modes: ClassVar[tuple[Mode, ...]] = (Mode.SINGLE,)
    scorers: ClassVar[tuple[Scorer, ...]] = (STRING_MATCH_ALL, STRICT_ALL)
    default_length: ClassVar[int] = 4096
    default_turns: ClassVar[int] = 1


@dataclass(frozen=True)
class CommonWords(Counting):
    """Find the ten words of a list that occur ten times (below 4,096 tokens, six times) as often as the others."""

    name: ClassVar[str] = "cwe"
    summary: ClassVar[str] = "RULER: the ten words that come most often in a numbered list"
    needs: ClassVar[str | None] = "a larger model"

    @property
    def prompt_id(self) -> str:
        """The prompt's id."""
        return "ruler-cwe@1"

    def compose(self, shot: Sequence[str], items: Sequence[str], repeats: Repeats, *, seed: int, id: str) -> Example:
        """Build the example: a solved list of `shot`, and the list of `items`, of which the first ten are common."""
        rng = random.Random(seed)
        solved = CWE_INTRO + list_words(shot, repeats.shot_common, repeats.shot_rare, rng) + show_answer(shot)
        common = tuple(items[:COMMON])
        turn = Turn(CWE_QUESTION, CWE_PREFIX, f" {number(common)}", common, CWE_MAX_NEW_TOKENS)
        text = list_words(items, repeats.common, repeats.rare, rng)
        return Example(id, solved + CWE_INTRO + text, (turn,), {"words": len(items)})

    def example(
        self, rng: random.Random, *, id: str, length: int, turns: int, tokenizer: PreTrainedTokenizerBase
    ) -> Example:
        """Generate an example whose prompt and answer fill `length`; UserError if it is too short."""
        del turns
        repeats = Repeats.of(length)
        shot, items = draw_listed(rng, repeats.shot_words, length // (MIN_ENTRY_TOKENS * repeats.rare))
        seed, frame = rng.getrandbits(64), self.frame(tokenizer)

        def count(n: int) -> int:
            return count_prompt(self, self.compose(shot, items[:n], repeats, seed=seed, id=id), tokenizer, frame)

        line = measure_list(self, repeats, tokenizer)
        n = largest_fit(count, length - CWE_MAX_NEW_TOKENS, least=FEWEST_LISTED, line=line, what=self.name)
        return self.compose(shot, items[:n], repeats, seed=seed, id=id)

    def minimum_length(self, turns: int, tokenizer: PreTrainedTokenizerBase) -> int:
        """Tokens of a list of ten common and ten rare words, all the longest, generation included."""
        del turns
        word = longest(tokenizer)
        repeats = Repeats.of(0)
        example = self.compose([word] * repeats.shot_words, [word] * FEWEST_LISTED, repeats, seed=0, id="minimum")
        return count_prompt(self, example, tokenizer, self.frame(tokenizer)) + CWE_MAX_NEW_TOKENS


@cache
def measure_list(task: CommonWords, repeats: Repeats, tokenizer: PreTrainedTokenizerBase) -> LengthEstimate:
    """Estimate the tokens of prompts as a line over the number of words."""
    items, frame = vocabulary()[::17], task.frame(tokenizer)

    def count(n: int) -> int:
        example = task.compose(items[: repeats.shot_words], items[:n], repeats, seed=0, id="")
        return count_prompt(task, example, tokenizer, frame)

    return LengthEstimate.through(count, FEWEST_LISTED, 10 * FEWEST_LISTED)


@cache
def longest(tokenizer: PreTrainedTokenizerBase) -> str:
    """The word with the most tokens in a list."""
    sizes = [len(ids) for ids in tokenizer([f" {x}" for x in vocabulary()], add_special_tokens=False).input_ids]
    return vocabulary()[sizes.index(max(sizes))]


@dataclass(frozen=True)
class FrequentWords(Counting):
    """Find the three most frequent coded words in a zeta distribution, whose most frequent word is dots."""

    name: ClassVar[str] = "fwe"
    summary: ClassVar[str] = "RULER: the three coded words that come most often, dots apart"
    needs: ClassVar[str | None] = "a larger model"

    @property
    def prompt_id(self) -> str:
        """The prompt's id."""
        return "ruler-fwe@1"

    def compose(self, coded: Sequence[str], n: int, *, seed: int, id: str) -> Example:
        """Build the example of `n` words (before rounding), with words in `coded` in order of falling frequency."""
        counts = [count_coded(n, k) for k in range(1, len(coded) + 1)]
        text = [word for word, count in zip(coded, counts, strict=True) for _ in range(count)]
        random.Random(seed).shuffle(text)
        frequent = tuple(coded[1 : 1 + FREQUENT])
        turn = Turn(FWE_QUESTION, FWE_PREFIX, f" {', '.join(frequent)}.", frequent, FWE_MAX_NEW_TOKENS)
        return Example(id, FWE_INTRO + " ".join(text), (turn,), {"words": len(text)})

    def example(
        self, rng: random.Random, *, id: str, length: int, turns: int, tokenizer: PreTrainedTokenizerBase
    ) -> Example:
        """Generate an example whose prompt and answer fill `length`; UserError if it is too short."""
        del turns
        coded, seed, frame = draw_coded(rng, length), rng.getrandbits(64), self.frame(tokenizer)

        def count(n: int) -> int:
            return count_prompt(self, self.compose(coded, n, seed=seed, id=id), tokenizer, frame)

        line = LengthEstimate.through(count, FEWEST_CODED, 10 * FEWEST_CODED)
        n = largest_fit(count, length - FWE_MAX_NEW_TOKENS, least=FEWEST_CODED, line=line, what=self.name)
        return self.compose(coded, n, seed=seed, id=id)

    def minimum_length(self, turns: int, tokenizer: PreTrainedTokenizerBase) -> int:
        """Tokens of the shortest text with an answer, with the longest of a thousand words, generation included."""
        del turns
        drawn = draw_coded(random.Random(0), 1000 * TOKENS_PER_WORD)[1:]
        sizes = [len(ids) for ids in tokenizer([f" {x}" for x in drawn], add_special_tokens=False).input_ids]
        coded = [DOTS, *[drawn[sizes.index(max(sizes))]] * FEWEST_CODED]
        example = self.compose(coded, FEWEST_CODED, seed=0, id="minimum")
        return count_prompt(self, example, tokenizer, self.frame(tokenizer)) + FWE_MAX_NEW_TOKENS


def draw_coded(rng: random.Random, length: int) -> list[str]:
    """The dots and as many distinct coded words as RULER has for this length."""
    drawn: dict[str, None] = {DOTS: None}
    while len(drawn) < max((length - FWE_MAX_NEW_TOKENS) // TOKENS_PER_WORD, 2 + FREQUENT):
        drawn["".join(rng.choices(string.ascii_lowercase, k=LETTERS))] = None
    return list(drawn)
