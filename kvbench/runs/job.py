"""A run that can start, and how many tokens its conversations need."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.budget import Budget
from kvbench.errors import UserError
from kvbench.log import count
from kvbench.method import Method
from kvbench.runs.spec import GenerationSpec, RunSpec
from kvbench.task import Encoded, EncodedTurn, Mode, Scorer, Task
from kvbench.text.template import Frame

if TYPE_CHECKING:
    from kvbench.hf import Model


@dataclass(frozen=True)
class Job:
    """A run that can start: its spec, and the objects that the spec names."""

    spec: RunSpec
    method: Method
    task: Task
    scorer: Scorer
    model: Model
    """Without a chat template on its tokenizer if the run uses none."""
    budget: Budget | None
    frame: Frame
    folder: Path
    loaded: Model
    """The model as loaded, for other runs on it."""
    chunks: Path | None = None
    """Folder of chunks that outlive the run; None: each sample computes its own."""
    resolution: dict[str, object] = field(default_factory=dict)
    """The budget in entries or bits, resolved on the first sample."""

    @property
    def compares(self) -> bool:
        """Whether the logits of reference answers are compared with the full cache's."""
        return self.model.masking is None and not (self.model.random or self.method.is_exact)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids of the tokens that end an answer: the model's and the task's."""
        return frozenset(self.spec.task.stop)


def find_capacity(encoded: Encoded, spec: RunSpec, max_new_tokens: list[int], *, compares: bool = False) -> int:
    """The most tokens that a conversation can have, answers included.

    max_new_tokens: of each turn. compares: whether reference answers are forced, to compare their logits.
    """
    turns = list(zip(encoded.turns, max_new_tokens, strict=True))
    after = [max(longest_answer(turn, most), len(turn.answer) if compares else 0) for turn, most in turns]
    if spec.mode is Mode.MULTI_REQUEST:
        return len(encoded.context) + max(len(turn.first) + room for (turn, _), room in zip(turns, after, strict=True))
    position, capacity = len(encoded.context), 0
    for index, (turn, most) in enumerate(turns):
        position += len(turn.later if index else turn.first)
        capacity = max(capacity, position + after[index])
        position += longest_answer(turn, most) if spec.history == "own" else len(turn.answer)
    return capacity


def check_capacity(job: Job, capacity: int) -> None:
    """Refuse a conversation that can have more tokens than the model supports.

    Raises:
        UserError: it can.
    """
    if capacity > job.model.max_length:
        turns = count(job.spec.turns, "turn")
        raise UserError(
            f"length {job.spec.task.length} with {turns} needs up to {capacity} tokens, and model {job.model.id} "
            f"supports {job.model.max_length}. Use a smaller --length, fewer --turns, or leave long records out."
        )


def longest_answer(turn: EncodedTurn, max_new_tokens: int) -> int:
    """The most tokens of an answer: those generated, or those of its longest choice."""
    return max([max_new_tokens, *map(len, turn.choices)])


def cap_new_tokens(asked: int, generation: GenerationSpec) -> int:
    """The most new tokens of an answer: the task's number, or the run's if that is smaller."""
    return asked if generation.max_new_tokens is None else min(asked, generation.max_new_tokens)
