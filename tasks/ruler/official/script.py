"""Base class of RULER's five scripts: two random generators, a search for a size, and samples in sequence.

All samples of a run come from the same two random generators, Python's and NumPy's, which the search for a size uses
first. A sample therefore depends on the seed, the length, the tokenizer and the samples before it; `seed` is the
scripts' `random_seed` (42 in RULER's runs). The scripts shuffle with a new generator of the same seed every time, so
the answer is in the same slot of all prompts of one size; kvbench's other RULER tasks avoid this.

A prompt is RULER's text with the template `base` inside the model's own chat template, whose tokens are reserved as
with `--prepare_for_ns`, but without those of RULER's placeholder `{task_template}`, about four, so that a prompt with a
chat template may have one more unit of haystack. As in RULER, special tokens that the tokenizer adds are not counted.
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
from kvbench.tasks.ruler.scoring import STRICT_ALL, STRING_MATCH_ALL

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COMMIT = "c3f5e3b4"
SHORT = 4096
"""Length below which the scripts use other steps and repeats."""
REDRAWS = 100
"""Most attempts to draw a sample that fits; RULER's scripts would repeat forever."""


class ScriptError(ValueError):
    """RULER's script would stop with an error or never end here; inside a draw, the draw is repeated."""


@dataclass(frozen=True)
class Sample:
    """One prompt in parts, with its references and the reference answer."""

    context: str
    question: str
    prefix: str
    references: tuple[str, ...]
    answer: str


@dataclass(frozen=True)
class Run:
    """One run of a script: its two random generators and its token counts."""

    seed: int
    length: int
    """Requested tokens."""
    template: int
    """Tokens of the chat template, which are part of `length`."""
    tokenizer: PreTrainedTokenizerBase
    joint: str
    """Text between context and question."""
    rng: random.Random = field(init=False)
    numbers: np.random.RandomState = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rng", random.Random(self.seed))
        object.__setattr__(self, "numbers", np.random.RandomState(self.seed))

    @property
    def room(self) -> int:
        """Tokens available for a prompt and its generation."""
        return self.length - self.template

    def shuffle(self, items: list[str]) -> None:
        """Shuffle in place with a new generator: the same permutation for all lists of one length."""
        random.Random(self.seed).shuffle(items)

    def text(self, sample: Sample) -> str:
        """The whole prompt."""
        return f"{sample.context}{self.joint}{sample.question}{sample.prefix}"

    def count(self, text: str) -> int:
        """Tokens of a text."""
        return len(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)  # cwe probes long lists

    def measure(self, sample: Sample) -> int:
        """Tokens of a prompt."""
        return self.count(self.text(sample))


def find_size(count: Callable[[int], int], room: int, low: int, high: int) -> int:
    """Binary search for the largest size that fits, with a new draw for every probe; `low` if none fits."""
    found = low
    while low <= high:
        middle = (low + high) // 2
        if count(middle) <= room:
            found, low = middle, middle + 1
        else:
            high = middle - 1
    return found


def guess_high(tokens: int, step: int, room: int) -> int:
    """Upper end of the search in three of the scripts: three times the estimate from a probe of `step` units."""
    return max(int(room / (tokens / step) * 3), step * 2)


def draw_until(draw: Callable[[int], Sample], fits: Callable[[Sample], bool], size: int, step: int) -> Sample:
    """Draw until a sample fits, one step smaller after each failure; ScriptError after REDRAWS attempts."""
    for _ in range(REDRAWS):
        with contextlib.suppress(ValueError):  # the size is too small for the needles
            if fits(sample := draw(size)):
                return sample
        if size > step:
            size -= step
    raise ScriptError(
        "a sample does not fit at the smallest size, and RULER's script would repeat forever. Use a greater --length."
    )


@dataclass(frozen=True)
class OfficialTask(Task):
    """Base class of the five tasks: one question, samples in sequence, and only a test split."""

    version: ClassVar[str] = "1"
    suite: ClassVar[str] = "ruler"
    modes: ClassVar[tuple[Mode, ...]] = (Mode.SINGLE,)
    scorers: ClassVar[tuple[Scorer, ...]] = (STRING_MATCH_ALL, STRICT_ALL)
    default_length: ClassVar[int] = 4096
    default_turns: ClassVar[int] = 1
    max_new_tokens: ClassVar[int]
    """RULER's tokens_to_generate."""

    @property
    def prompt_id(self) -> str:
        """The prompt's id."""
        return f"ruler-official/{self.name.removeprefix('ruler-official-')}@{COMMIT}"

    @abstractmethod
    def draw_samples(self, run: Run) -> Iterator[Sample]:
        """An endless stream of samples of a run; ScriptError if RULER's script would fail."""

    def examples(
        self, *, seed: int, split: Split, n: int, length: int, turns: int, mode: Mode,  # noqa: ARG002  # one question
        tokenizer: PreTrainedTokenizerBase,
    ) -> Iterator[Example]:
        """Yield the first samples of the script's run with this seed.

        Raises:
            UserError: the split is dev, or RULER's script would fail or never end.
        """
        self.refuse_dev(split)
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
        """One token more than max_new_tokens; the actual need is known only after drawing."""
        return self.max_new_tokens + 1


def name_words() -> str:
    """The version of the word lists; wonderwords 2.2.0 has four nouns more than 3.0.1."""
    return f"wonderwords=={find_version('wonderwords')}"
