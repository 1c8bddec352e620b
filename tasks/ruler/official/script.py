"""What RULER's five scripts have in common: two seeded streams, a search for a size, samples one after another.

All samples of a run come from the same two streams, Python's and NumPy's, which the search for a size has used before
them. So a sample is what it is because of the seed, the length, the tokenizer and the samples before it, and `seed` is
the scripts' `random_seed` (42 in RULER's runs). What the scripts shuffle they shuffle with a fresh stream of the same
seed every time: the answer stands in the same slot of all prompts of one size, which is why `ruler`'s own tasks differ.

A prompt is RULER's text with the template `base`; the model's own chat template goes around it, and its tokens are
left free, as `--prepare_for_ns` does. As in RULER, special tokens (a first one, where a tokenizer adds it) are not
counted.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from kvbench.errors import UserError
from kvbench.machine import find_version
from kvbench.task import Example, Mode, Scorer, Split, Task, Turn
from kvbench.tasks.ruler.scoring import STRING_MATCH_ALL

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COMMIT = "c3f5e3b4"
SHORT = 4096
"""Below it the scripts take other steps and repeats."""
REDRAWS = 100
"""The scripts draw again until a sample fits, without end; here they give up after so many."""


class ScriptError(ValueError):
    """Where a script stops with an error or never ends; while it draws samples it draws again."""


@dataclass(frozen=True)
class Sample:
    """One prompt in parts, what is expected, and the answer as it would go on."""

    context: str
    question: str
    prefix: str
    references: tuple[str, ...]
    answer: str


@dataclass(frozen=True)
class Run:
    """One run of a script: its two streams, and how it counts."""

    seed: int
    length: int
    """Tokens that were asked for."""
    template: int
    """Tokens of them that the chat template takes."""
    tokenizer: PreTrainedTokenizerBase
    joint: str
    """Between context and question."""
    rng: random.Random = field(init=False)
    numbers: np.random.RandomState = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rng", random.Random(self.seed))
        object.__setattr__(self, "numbers", np.random.RandomState(self.seed))

    @property
    def room(self) -> int:
        """Tokens for a prompt and its generation."""
        return self.length - self.template

    def shuffle(self, items: list[str]) -> None:
        """In place, with a fresh stream: the same permutation for all lists of one length."""
        random.Random(self.seed).shuffle(items)

    def text(self, sample: Sample) -> str:
        """The prompt whole."""
        return f"{sample.context}{self.joint}{sample.question}{sample.prefix}"

    def count(self, text: str) -> int:
        """Tokens of a text."""
        return len(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)  # cwe probes long lists

    def measure(self, sample: Sample) -> int:
        """Tokens of a prompt."""
        return self.count(self.text(sample))


def find_size(count: Callable[[int], int], room: int, low: int, high: int) -> int:
    """The size that a binary search ends at, where every probe is a fresh draw; `low` where none fits."""
    found = low
    while low <= high:
        middle = (low + high) // 2
        if count(middle) <= room:
            found, low = middle, middle + 1
        else:
            high = middle - 1
    return found


def guess_high(tokens: int, step: int, room: int) -> int:
    """Where the search of three of the scripts begins from above: three times what a probe of `step` units says."""
    return max(int(room / (tokens / step) * 3), step * 2)


def draw_until(draw: Callable[[int], Sample], fits: Callable[[Sample], bool], size: int, step: int) -> Sample:
    """The first draw that fits, a step smaller after each that does not. Raises ScriptError."""
    for _ in range(REDRAWS):
        with contextlib.suppress(ValueError):  # too small for what it must hold
            if fits(sample := draw(size)):
                return sample
        if size > step:
            size -= step
    raise ScriptError(
        "a sample does not fit at the smallest size, and RULER's script would draw again without end. Ask for a "
        "greater --length."
    )


@dataclass(frozen=True)
class OfficialTask(Task):
    """What the five share: one question, one stream, a test split only."""

    version: ClassVar[str] = "1"
    suite: ClassVar[str] = "ruler"
    modes: ClassVar[tuple[Mode, ...]] = (Mode.SINGLE,)
    scorers: ClassVar[tuple[Scorer, ...]] = (STRING_MATCH_ALL,)
    default_length: ClassVar[int] = 4096
    default_turns: ClassVar[int] = 1
    max_new_tokens: ClassVar[int]
    """RULER's tokens_to_generate."""

    @property
    def prompt_id(self) -> str:
        """The script."""
        return f"ruler-official/{self.name.removeprefix('ruler-official-')}@{COMMIT}"

    @abstractmethod
    def draw_samples(self, run: Run) -> Iterator[Sample]:
        """The samples of a run in order, without end. Raises ScriptError."""

    def examples(
        self, *, seed: int, split: Split, n: int, length: int, turns: int, mode: Mode,  # noqa: ARG002  # one question
        tokenizer: PreTrainedTokenizerBase,
    ) -> Iterator[Example]:
        """The first samples of the script's run with this seed.

        Raises:
            UserError: the split is dev, or the script fails or does not end.
        """
        if split is Split.DEV:
            raise UserError(
                f"{self.name} has only a test split, RULER's own. Choose settings on a generated task (`kvbench list "
                "tasks`), or leave --split out."
            )
        frame = self.frame(tokenizer)
        template = sum(len(tokenizer(x, add_special_tokens=False).input_ids) for x in (frame.head, frame.tail))
        run = Run(seed, length, template, tokenizer, self.joint)
        try:
            for index, sample in enumerate(itertools.islice(self.draw_samples(run), n)):
                turn = Turn(sample.question, sample.prefix, sample.answer, sample.references, self.max_new_tokens)
                yield Example(f"{split}-{seed}-{index}", sample.context, (turn,))
        except ScriptError as error:
            raise UserError(f"{self.name} at seed {seed} and length {length}: {error}") from error

    def minimum_length(self, turns: int, tokenizer: PreTrainedTokenizerBase) -> int:  # noqa: ARG002  # one question
        """A token of prompt: what the draws take is known when they are made."""
        return self.max_new_tokens + 1


def name_words() -> str:
    """The lists that words are drawn from; those of 2.2.0 have four nouns more than those of 3.0.1."""
    return f"wonderwords=={find_version('wonderwords')}"
