"""A task and policies for the tests: files that `--task` and `--method` take, as a user's would be."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from kvbench.diffusion.policy import Denoising, PassPlan, Policy
from kvbench.method import BudgetKind, Card
from kvbench.task import Example, Scorer, Task, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Letters(Task):
    """Random letters and questions; eight tokens for each answer."""

    name: ClassVar[str] = "letters"
    version: ClassVar[str] = "1"
    suite: ClassVar[str] = "toys"
    summary: ClassVar[str] = "a task for tests"
    scorers: ClassVar[tuple[Scorer, ...]] = (
        Scorer("even@1", "even", lambda p, _: sum(ord(x) % 2 == 0 for x in p) / max(1, len(p))),
        Scorer("length@1", "length", lambda p, _: len(p) / 8),
    )
    default_length: ClassVar[int] = 60
    default_turns: ClassVar[int] = 3

    @property
    def prompt_id(self) -> str:
        """One wording."""
        return "letters@1"

    def minimum_length(self, turns: int, tokenizer: PreTrainedTokenizerBase) -> int:
        """Some."""
        del turns, tokenizer
        return 30

    def example(
        self, rng: random.Random, *, id: str, length: int, turns: int, tokenizer: PreTrainedTokenizerBase
    ) -> Example:
        """Letters, one token each, as many as a question of five and an answer of eight leave room for."""
        del tokenizer
        text = "".join(rng.choice("abcdefgh ") for _ in range(length - 13))
        asked = tuple(Turn(f"q{i}?", "=", f" sky{i}", (f"sky{i}",), 8) for i in range(turns))
        return Example(id, text, asked, {"letters": len(text)})


@dataclass(frozen=True)
class Wordy(Letters):
    """The same, and no answer may be empty."""

    name: ClassVar[str] = "wordy"
    nonempty: ClassVar[bool] = True


@dataclass(frozen=True)
class Uneven(Letters):
    """The third answer is twice as long as the others."""

    name: ClassVar[str] = "uneven"

    def example(
        self, rng: random.Random, *, id: str, length: int, turns: int, tokenizer: PreTrainedTokenizerBase
    ) -> Example:
        """The third example has another max_new_tokens than the others."""
        made = super().example(rng, id=id, length=length, turns=turns, tokenizer=tokenizer)
        longer = replace(made, turns=tuple(replace(x, max_new_tokens=16) for x in made.turns))
        return longer if id.endswith("-2") else made


CARD = Card(
    name="thoughtless", title="Computes all and says otherwise", models="diffusion", idea="None. None.", arxiv=None,
    year=None, family="test", stages=(), budget=BudgetKind.NONE, heads="independent", upstream=None,
)


@dataclass(frozen=True)
class Thoughtless(Policy):
    """Declared as a cache, does nothing."""

    card: ClassVar[Card] = CARD

    def plan(self, d: Denoising) -> PassPlan:
        """Everything."""
        del d
        return PassPlan()


@dataclass(frozen=True)
class Moody(Thoughtless):
    """Leaves the first row out of every pass but the first, where that is an even token."""

    card: ClassVar[Card] = CARD.model_copy(update={"name": "moody"})

    def plan(self, d: Denoising) -> PassPlan:
        """All, then all but one or still all."""
        acts = d.nfe > 0 and int(d.ids[0, 0]) % 2 == 0
        return PassPlan(compute=(d.positions > 0).expand_as(d.ids)) if acts else PassPlan()


@dataclass(frozen=True)
class Breaking(Thoughtless):
    """Leaves the first row out of every pass but the first; raises on the second answer that it makes."""

    answers: ClassVar[list[int]] = []
    card: ClassVar[Card] = CARD.model_copy(update={"name": "breaking"})

    def begin(self, d: Denoising) -> None:
        """A block of an answer."""
        self.answers.append(d.prompt)
        if len(self.answers) == 2:
            raise ValueError("a bug\nsecond line")

    def plan(self, d: Denoising) -> PassPlan:
        """All, then all but one."""
        return PassPlan() if d.nfe == 0 else PassPlan(compute=(d.positions > 0).expand_as(d.ids))
