"""A task and methods for the tests: files that `--task` and `--method` take, as a user's would be."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from kvbench.errors import UserError
from kvbench.method import BudgetKind, Card, Method, Step
from kvbench.store import LayerKV
from kvbench.task import Example, Scorer, Task, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LIMIT = 3


def odd_share(prediction: str, references: Sequence[str]) -> float:
    """A score that differs between a random model's answers."""
    del references
    return sum(ord(x) % 2 for x in prediction) / max(1, len(prediction))


@dataclass(frozen=True)
class Toy(Task):
    """Random words and a question."""

    name: ClassVar[str] = "toy"
    version: ClassVar[str] = "1"
    suite: ClassVar[str] = "toys"
    summary: ClassVar[str] = "a task for tests"
    scorers: ClassVar[tuple[Scorer, ...]] = (
        Scorer("toy-odd@1", "odd", odd_share), Scorer("toy-length@1", "length", lambda p, _: len(p) / 100),
    )
    default_length: ClassVar[int] = 60
    default_turns: ClassVar[int] = 3

    word: str = "sky"

    @property
    def prompt_id(self) -> str:
        """One wording."""
        return "toy@1"

    def minimum_length(self, turns: int, tokenizer: PreTrainedTokenizerBase) -> int:
        """Some."""
        del turns, tokenizer
        return 40

    def example(
        self, rng: random.Random, *, id: str, length: int, turns: int, tokenizer: PreTrainedTokenizerBase
    ) -> Example:
        """Letters, one token each."""
        del tokenizer
        time.sleep(float(os.environ.get("TOY_SLEEP", "0")))
        text = "".join(rng.choice("abcdefgh ") for _ in range(length - 20))
        asked = tuple(Turn(f"q{i}?", "=", f" {self.word}", (self.word,), LIMIT) for i in range(turns))
        return Example(id, text, asked, {"letters": len(text)})


CARD = Card(
    name="inert", title="Keeps everything and says otherwise", idea="None. None.", arxiv=None, year=None, family="test",
    stages=(), budget=BudgetKind.STORED, heads="independent", upstream=None,
)


@dataclass(frozen=True)
class Inert(Method):
    """Declared as eviction, does nothing."""

    card: ClassVar[Card] = CARD


@dataclass(frozen=True)
class Last(Method):
    """Keeps the last rows; raises where it is told to."""

    fails_at: int = -1
    kind: str = "memory"
    runs: ClassVar[list[int]] = []
    card: ClassVar[Card] = CARD.model_copy(update={"name": "last"})

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        if self.kind not in ("memory", "bug"):
            raise UserError(f"last: kind must be memory or bug, got '{self.kind}'.")

    def evict(self, kv: LayerKV, step: Step) -> None:
        """The last rows."""
        if not step.moment.compresses:
            return
        if step.layer == 0:
            self.runs.append(step.seen)
            if len(self.runs) - 1 == self.fails_at:
                raise MemoryError("out of memory\nsecond line") if self.kind == "memory" else ValueError("a bug")
        if self.rows is not None and self.rows < kv.n:
            index = torch.arange(kv.n - self.rows, kv.n, device=kv.keys.device)
            kv.keep(index.expand(*kv.keys.shape[:2], -1))
