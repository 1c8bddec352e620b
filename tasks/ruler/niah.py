"""RULER's needle-in-a-haystack tasks with one queried key and value: single_1, single_2 and multikey_1.

With one turn the prompt is RULER's, byte for byte: template, answer prefix, and the singular rewriting that RULER
applies when one value of one key is asked for. Two things differ on purpose. Shuffles and places are reseeded for each
sample, where RULER's fresh `Random(42)` puts the answer at the same rank in all of them. And the essays are not
shipped: the haystack is generated prose, or a local text file (`--task-set haystack=PATH`), as the prompt_id says.

RULER asks one question per context. In the shared-context modes (more turns than one) the context holds a queried
needle for each turn (so at least as many keys as turns), its introduction has RULER's plural form, and each turn asks
for another key in the singular form.

The length is RULER's: tokens of the first prompt plus the generation limit (128) never exceed it. The haystack is cut
to whole words, so that they come within a word of it.
"""

from __future__ import annotations

import itertools
import random
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, ClassVar

from kvbench.task import Example, Frame, Scorer, Task, Turn, count_prompt, encode, prompt_tokens
from kvbench.tasks.length import Line, largest_fit
from kvbench.tasks.ruler.haystack import NoiseHaystack, ProseHaystack, read_sentences
from kvbench.tasks.ruler.scoring import STRING_MATCH_ALL
from kvbench.tasks.words import draw_keys, draw_numbers, words

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INTRO_ONE = (
    "A special magic number is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the number afterwards.\n"
)
INTRO_MANY = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the numbers afterwards.\n"
)
NEEDLE = "One of the special magic numbers for {key} is: {value}."
QUESTION = "What is the special magic number for {key} mentioned in the provided text?"
PREFIX = " The special magic number for {key} mentioned in the provided text is"
LIMIT = 128


@dataclass(frozen=True)
class Niah(Task):
    """What the variants share; a variant says how many keys and which haystack."""

    version: ClassVar[str] = "1"
    suite: ClassVar[str] = "ruler"
    scorers: ClassVar[tuple[Scorer, ...]] = (STRING_MATCH_ALL,)
    keys: ClassVar[int]

    @abstractmethod
    def haystack_for(self, rng: random.Random) -> NoiseHaystack | ProseHaystack:
        """A fresh haystack of one sample."""

    def compose(
        self,
        haystack: NoiseHaystack | ProseHaystack,
        pairs: Sequence[tuple[str, str]],
        asked: Sequence[int],
        n: int,
        *,
        id: str,
    ) -> Example:
        """The example with `n` words of haystack, all pairs hidden in this order, and the pairs `asked` for in turn."""
        needles = [NEEDLE.format(key=key, value=value) for key, value in pairs]
        text = haystack.text(n, needles)
        turns = tuple(
            Turn(QUESTION.format(key=key), PREFIX.format(key=key), f" {value}.", (value,), LIMIT)
            for key, value in (pairs[i] for i in asked)
        )
        facts = {
            "keys": [pairs[i][0] for i in asked],
            "depths": [round(text.index(needles[i]) / len(text), 4) for i in asked],
        }
        return Example(id, (INTRO_ONE if len(asked) == 1 else INTRO_MANY) + text, turns, facts)

    def example(
        self, rng: random.Random, *, id: str, length: int, turns: int, tokenizer: PreTrainedTokenizerBase
    ) -> Example:
        """One example whose first prompt and 128 generated tokens fill `length`; UserError where it is too short."""
        n_keys = max(self.keys, turns)
        pairs = list(zip(draw_keys(rng, n_keys), draw_numbers(rng, n_keys), strict=True))
        asked = rng.sample(range(n_keys), turns)
        haystack = self.haystack_for(rng)
        frame = Frame.of(tokenizer)

        def count(n: int) -> int:
            return count_prompt(self, self.compose(haystack, pairs, asked, n, id=id), tokenizer, frame)

        what = f"{self.name} with {turns} turn{'s' if turns > 1 else ''}"
        line = measure(self, n_keys, tokenizer)
        n = largest_fit(count, length - LIMIT, least=haystack.least(n_keys), line=line, what=what)
        return self.compose(haystack, pairs, asked, n, id=id)

    def minimum_length(self, turns: int, tokenizer: PreTrainedTokenizerBase) -> int:
        """Tokens of an example with the longest keys and hardly any haystack, generation included."""

        def longest(kind: str) -> str:
            choices = list(words(kind))
            sizes = [len(ids) for ids in tokenizer(choices, add_special_tokens=False).input_ids]
            return choices[sizes.index(max(sizes))]

        key = f"{longest('adjective')}-{longest('noun')}"
        n_keys = max(self.keys, turns)
        haystack = self.haystack_for(random.Random(0))
        n = max(20, haystack.least(n_keys))
        example = self.compose(haystack, [(key, "7777777")] * n_keys, range(turns), n, id="minimum")
        return prompt_tokens(encode(self, example, tokenizer)) + LIMIT


@cache
def measure(task: Niah, n_keys: int, tokenizer: PreTrainedTokenizerBase) -> Line:
    """Tokens of the task's prompts by words of haystack."""
    rng = random.Random(0)
    pairs = list(zip(draw_keys(rng, n_keys), draw_numbers(rng, n_keys), strict=True))
    haystack, frame = task.haystack_for(rng), Frame.of(tokenizer)
    least = haystack.least(n_keys)

    def count(n: int) -> int:
        return count_prompt(task, task.compose(haystack, pairs, [0], n, id=""), tokenizer, frame)

    return Line.through(count, least, least + 1000)


@dataclass(frozen=True)
class NiahSingle1(Niah):
    """One needle among noise lines."""

    name: ClassVar[str] = "niah_single_1"
    summary: ClassVar[str] = "RULER: the number of one key hidden among lines of noise"
    keys: ClassVar[int] = 1

    @property
    def prompt_id(self) -> str:
        """Wording and haystack."""
        return "ruler-niah/noise@1"

    def haystack_for(self, rng: random.Random) -> NoiseHaystack:
        """Noise lines."""
        return NoiseHaystack(rng)


@dataclass(frozen=True)
class EssayNiah(Niah):
    """Needles between sentences. haystack: `prose` (generated), or the path of a text file."""

    haystack: str = "prose"

    @property
    def prompt_id(self) -> str:
        """Wording and haystack; a file is named by its hash."""
        if self.haystack == "prose":
            return "ruler-niah/prose@1"
        return f"ruler-niah/file:{read_sentences(self.haystack)[1][:12]}@1"

    def haystack_for(self, rng: random.Random) -> ProseHaystack:
        """Generated sentences, or those of the file from its start, repeated where it ends (as RULER does)."""
        if self.haystack == "prose":
            return ProseHaystack(rng)
        return ProseHaystack(rng, itertools.cycle(read_sentences(self.haystack)[0]))


@dataclass(frozen=True)
class NiahSingle2(EssayNiah):
    """One needle in prose."""

    name: ClassVar[str] = "niah_single_2"
    summary: ClassVar[str] = "RULER: the number of one key hidden in prose"
    keys: ClassVar[int] = 1


@dataclass(frozen=True)
class NiahMultikey1(EssayNiah):
    """Four needles in prose; `niah` by its short name, as the variant whose distractors separate methods best."""

    name: ClassVar[str] = "niah_multikey_1"
    aliases: ClassVar[tuple[str, ...]] = ("niah",)
    summary: ClassVar[str] = "RULER: the number of one key among four keys hidden in prose"
    keys: ClassVar[int] = 4
