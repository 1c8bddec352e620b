"""A task for the tests that asks twice about one context: for one of several choices, and for words of its own."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvbench.task import Example, Scorer, Task, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LIMIT = 6


def right(prediction: str, references: Sequence[str], *, kind: str) -> float | None:
    """Of choices only."""
    return float(prediction == references[0]) if kind == "choice" else None


def letters(prediction: str, references: Sequence[str], *, kind: str, letters: int) -> float | None:
    """Of words only: a fact of the example comes back, less the answer's length."""
    del references
    return letters - len(prediction) if kind == "words" else None


def weight(prediction: str, references: Sequence[str], *, logprobs: Sequence[Sequence[float]]) -> float:
    """Of the first choice."""
    del prediction, references
    return sum(logprobs[0])


@dataclass(frozen=True)
class Mixed(Task):
    """Turns of two kinds by turns, a choice first."""

    name: ClassVar[str] = "mixed"
    version: ClassVar[str] = "1"
    suite: ClassVar[str] = "toys"
    summary: ClassVar[str] = "choices and words"
    scorers: ClassVar[tuple[Scorer, ...]] = (
        Scorer("right@1", "right", right, facts=("kind",)),
        Scorer("letters@1", "letters", letters, higher_is_better=False, facts=("kind", "letters")),
    )
    default_length: ClassVar[int] = 60
    default_turns: ClassVar[int] = 3

    choices: tuple[str, ...] = (" sky", " a sea of grass", " x")
    stop: int | None = None

    @property
    def prompt_id(self) -> str:
        """One wording."""
        return "mixed@1"

    def stop_ids(self, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
        """The one that the settings name, if any."""
        del tokenizer
        return frozenset(() if self.stop is None else (self.stop,))

    def minimum_length(self, turns: int, tokenizer: PreTrainedTokenizerBase) -> int:
        """Some."""
        del turns, tokenizer
        return 40

    def example(
        self, rng: random.Random, *, id: str, length: int, turns: int, tokenizer: PreTrainedTokenizerBase
    ) -> Example:
        """Letters, one token each; every other prompt says that it was cut."""
        del tokenizer
        text = "".join(rng.choice("abcdefgh ") for _ in range(length - 20))
        one = Turn("which?", "=", self.choices[0], self.choices[:1], 0, self.choices, {"kind": "choice"})
        two = Turn("say?", "=", " sky", (" sky",), LIMIT, facts={"kind": "words"})
        cut = {"cut_tokens": 7} if rng.random() < 0.5 else {}
        return Example(id, text, tuple(two if i % 2 else one for i in range(turns)), {"letters": len(text), **cut})


@dataclass(frozen=True)
class Nonempty(Mixed):
    """Its words may not begin with a stop token."""

    name: ClassVar[str] = "nonempty"
    nonempty: ClassVar[bool] = True


@dataclass(frozen=True)
class Weighed(Mixed):
    """One choice a turn, scored by its log-probability."""

    name: ClassVar[str] = "weighed"
    scorers: ClassVar[tuple[Scorer, ...]] = (Scorer("weight@1", "weight", weight, facts=("logprobs",)),)
    choices: tuple[str, ...] = (" sky",)

    def example(
        self, rng: random.Random, *, id: str, length: int, turns: int, tokenizer: PreTrainedTokenizerBase
    ) -> Example:
        """The first turn of `Mixed`, again and again."""
        example = super().example(rng, id=id, length=length, turns=1, tokenizer=tokenizer)
        return Example(example.id, example.context, example.turns * turns, example.facts)
