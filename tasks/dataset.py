"""Base class of tasks whose examples are records of a data set; contexts that are too long are cut in the middle."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from kvbench.errors import UserError, first_line
from kvbench.task import Example, Mode, Split, Task, count_prompt
from kvbench.tasks.records import Columns, Record, Source, check_columns, open_copy, open_hub
from kvbench.text.template import Frame
from kvbench.text.tokens import cut_middle

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class DatasetTask(Task):
    """A task over the records of a data set: in file order for seed 0, in a random order for any other seed.

    data: path of a local copy; empty: the hub.
    """

    data: str = ""

    hub: ClassVar[str]
    """Repository of the data set on the hub."""
    revision: ClassVar[str]
    """Commit of that repository."""
    config: ClassVar[str | None] = None
    """Part of the data set; None if it has only one."""
    split: ClassVar[str] = "test"
    columns: ClassVar[Columns]
    """Columns that a record must have, with their types."""
    body: ClassVar[str] = "context"
    """Column that holds the context; must not be empty."""
    truncation: ClassVar[Literal["none", "middle"]] = "middle"
    fixed_examples: ClassVar[bool] = True

    @abstractmethod
    def compose(self, record: Record, *, mode: Mode, turns: int, frame: Frame) -> Example:
        """Build the example of a record with at most `turns` turns and its whole context; `examples` sets the id."""

    def reserve(
        self, example: Example, *, turns: int, mode: Mode, tokenizer: PreTrainedTokenizerBase  # noqa: ARG002
    ) -> int:
        """Tokens of `length` that the first prompt must leave free for generation."""
        return example.turns[0].max_new_tokens

    @property
    def dataset_revision(self) -> str:
        """The pinned commit, or `sha256:` and the hash of a local copy's files."""
        return self.source.revision

    @property
    def source(self) -> Source:
        """The records, opened once per process."""
        if self.data:
            return open_copy(self.data, self.hub, self.revision, self.config, self.split)
        return open_hub(self.hub, self.revision, self.config, self.split)

    @property
    def hint(self) -> str:
        """Next step for error messages about wrong data."""
        return f"Give {self.name} the data of {self.hub}, --task-set data=PATH, or leave data out for the hub."

    def record(self, index: int) -> Record:
        """Read and check one record.

        Raises:
            UserError: a column is missing or of another type, or the context is empty.
        """
        where = f"record {index} of {self.source.name}"
        try:
            record = self.source.records[index]
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where} cannot be read: {first_line(error)}. {self.hint}") from error
        check_columns(record, self.columns, where, self.hint)
        body = record[self.body]
        if not (body.strip() if isinstance(body, str) else body):
            raise UserError(f"{where}: column {self.body} is empty. {self.hint}")
        return record

    def choose(self, n: int, seed: int) -> list[int]:
        """Indices of the records of the first `n` examples.

        Raises:
            UserError: the data set has fewer than `n` records.
        """
        total = len(self.source.records)
        if n > total:
            raise UserError(f"{self.name} has {total} records: use --samples {total} or fewer.")
        return list(range(n)) if seed == 0 else random.Random(f"{self.name}/{seed}").sample(range(total), total)[:n]

    def examples(
        self, *, seed: int, split: Split, n: int, length: int, turns: int, mode: Mode,
        tokenizer: PreTrainedTokenizerBase,
    ) -> Iterator[Example]:
        """Build examples from records; each context is cut in the middle until prompt and reserve fit `length`.

        Raises:
            UserError: the split is dev, the data set has too few records or a wrong one, or a question does not fit.
        """
        self.refuse_dev(split)
        frame = self.frame(tokenizer)
        for index in self.choose(n, seed):
            example = self.compose(self.record(index), mode=mode, turns=turns, frame=frame)
            reserve = self.reserve(example, turns=turns, mode=mode, tokenizer=tokenizer)
            text, cut = cut_middle(tokenizer, example.context, length - reserve, self._counter(example, tokenizer))
            if not text:
                raise UserError(
                    f"record {index} of {self.name}: the first question and {reserve} tokens of generation leave no "
                    f"room for the context in a length of {length}. Use a greater --length or fewer --turns."
                )
            yield replace(example, id=f"row-{index}", context=text, facts={**example.facts, "cut_tokens": cut})

    def minimum_length(self, turns: int, tokenizer: PreTrainedTokenizerBase) -> int:
        """Tokens that the first record needs with one token of context and its generation; others may need more."""
        mode = Mode.MULTI_TURN if turns > 1 else Mode.SINGLE
        example = self.compose(self.record(0), mode=mode, turns=turns, frame=self.frame(tokenizer))
        reserve = self.reserve(example, turns=turns, mode=mode, tokenizer=tokenizer)
        return self._counter(example, tokenizer)("") + 1 + reserve

    def outlines(
        self, *, seed: int, n: int, turns: int, mode: Mode, tokenizer: PreTrainedTokenizerBase
    ) -> Iterator[Example]:
        """Yield the first `n` examples without their contexts."""
        for index in self.choose(n, seed):
            example = self.compose(self.record(index), mode=mode, turns=turns, frame=self.frame(tokenizer))
            yield replace(example, context="")

    def _counter(self, example: Example, tokenizer: PreTrainedTokenizerBase) -> Callable[[str], int]:
        """A function that counts the tokens of the example's first prompt with a given context."""
        frame = self.frame(tokenizer)
        return lambda text: count_prompt(self, replace(example, context=text), tokenizer, frame)
