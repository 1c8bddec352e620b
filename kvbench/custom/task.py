"""Tasks that are read from files instead of being written as code (docs/adding_a_task.md)."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from kvbench.custom.files import HINT, RecordFile, TaskRecord, TaskTable, TurnRecord, read_parts
from kvbench.errors import UserError
from kvbench.log import count
from kvbench.task import Example, Mode, Scorer, Split, Task, Turn, count_prompt
from kvbench.text.scorers import SCORERS, name_strict
from kvbench.text.tokens import cut_middle

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase  # noqa: TID251  # its type

FindScorer = Callable[[str, Iterable[str]], tuple[Scorer, type[Task]]]
"""`registry.find_scorer`, passed in because the registry imports this module."""


@dataclass(frozen=True)
class CustomTask(Task):
    """Base class of the tasks that are read from TOML files; `make_task` creates a subclass for each file."""

    table: ClassVar[TaskTable]
    records: ClassVar[RecordFile]
    owner: ClassVar[type[Task] | None]
    """The task that defines the scorer; its code is recorded with a run. None: the scorer is one of SCORERS."""
    fixed_examples: ClassVar[bool] = True

    @property
    def prompt_id(self) -> str:
        """The prompt's id: a hash of all keys of the TOML file that decide prompts and answers."""
        text = self.table.model_dump_json(exclude={"summary", "data", "answer_in_context"}, by_alias=True)
        return f"custom/{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    @property
    def dataset_revision(self) -> str:
        """`sha256:` and the hash of the JSONL file."""
        return f"sha256:{self.records.sha256}"

    def minimum_length(self, turns: int, tokenizer: PreTrainedTokenizerBase) -> int:  # noqa: ARG002
        """Return 1; `examples` refuses records that are too long."""
        return 1

    def check_samples(self, samples: int) -> None:
        """Raise a UserError if there are fewer records than samples."""
        total = len(self.records.valid)
        if samples > total:
            raise UserError(f"{self.name} has {total} records, not {samples}. Use --samples {total} or fewer.")

    def check_turns(self, turns: int) -> None:
        """Raise a UserError if a record has fewer turns: a run asks as many questions about every context."""
        records = self.records.valid.values()
        least, most = (pick(records, key=lambda x: len(x.turns)) for pick in (min, max))
        few, many = len(least.turns), len(most.turns)
        if turns <= few:
            return
        if few == many:
            raise UserError(
                f"records of {self.name} have {count(few, 'turn')} each, not {turns}. Use --turns "
                f"{few}{' or fewer' if few > 1 else ''}."
            )
        raise UserError(
            f"records of {self.name} have unequal numbers of turns: '{least.id}' has {few}, '{most.id}' {many}. "
            f"A run asks {turns} questions about every context: use --turns {few} or fewer, or leave short records out."
        )

    def compose(self, record: TaskRecord, turns: int) -> Example:
        """Build the example of a record, with its first `turns` turns and its whole context."""
        table = self.table
        made = []
        for x in record.turns[:turns]:
            prefix = (table.prefix if x.prefix is None else x.prefix).replace("{question}", x.question)
            most = 0 if x.choices else x.max_new_tokens or table.max_new_tokens
            references = tuple(x.references or [x.answer.strip()])
            question = table.question.replace("{question}", x.question)
            made.append(Turn(question, prefix, x.answer, references, most, tuple(x.choices)))
        return Example(
            str(record.id), record.context, tuple(made), parts=tuple(record.parts),
            earlier=tuple(map(tuple, record.earlier)),
        )

    def count(self, example: Example, tokenizer: PreTrainedTokenizerBase) -> int:
        """Tokens of the first prompt plus its max_new_tokens."""
        return count_prompt(self, example, tokenizer, self.frame(tokenizer)) + example.turns[0].max_new_tokens

    def cut(self, example: Example, length: int, tokenizer: PreTrainedTokenizerBase) -> Example:
        """Cut the middle out of the context if the example is longer than `length`; the fact `cut_tokens` counts it.

        Raises:
            UserError: nothing of the context would be left.
        """
        text, cut = cut_middle(
            tokenizer, example.context, length, lambda x: self.count(replace(example, context=x), tokenizer)
        )
        if cut and example.parts:
            raise UserError(
                f"record '{example.id}' of {self.records.path} is longer than {length} tokens, and parts are not "
                "cut. Use a greater --length."
            )
        if not text:
            raise UserError(
                f"record '{example.id}' of {self.records.path}: its first question and answer leave no room for the "
                f"context in a length of {length}. Use a greater --length."
            )
        return replace(example, context=text, facts={"cut_tokens": cut})

    def examples(
        self, *, seed: int, split: Split, n: int, length: int, turns: int, mode: Mode,  # noqa: ARG002
        tokenizer: PreTrainedTokenizerBase,
    ) -> Iterator[Example]:
        """Build examples from records, in file order for seed 0 and in a random order for any other seed.

        Raises:
            UserError: the split is dev, there are fewer than `n` records, or one of them is too long.
        """
        self.refuse_dev(split)
        self.check_samples(n)
        records = list(self.records.valid.values())
        if seed:
            random.Random(f"{self.name}/{seed}").shuffle(records)
        made = [self.compose(record, turns) for record in records[:n]]
        if self.truncation == "middle":
            return (self.cut(x, length, tokenizer) for x in made)
        sizes = [self.count(x, tokenizer) for x in made]
        if max(sizes) > length:
            worst = made[sizes.index(max(sizes))]
            raise UserError(
                f"record '{worst.id}' of {self.records.path} has {max(sizes)} tokens with its answer, more than "
                f'--length {length}. Use --length {max(sizes)}, or set truncation = "middle" in the task\'s file.'
            )
        return iter(made)


def read_task(path: Path, find_scorer: FindScorer) -> type[CustomTask]:
    """Read a task from a TOML file and its JSONL file.

    Raises:
        UserError: a file cannot be read, a line of the JSONL file is not a valid record, two records have one id, or
            the scorer does not fit a turn (`find_scoring_fault`).
    """
    table, records = read_parts(path)
    for line, error in records.errors.items():
        raise UserError(f"{records.path}, line {line}: {error}. {HINT}")
    first: dict[str, int] = {}
    for line, record in records.valid.items():
        if (other := first.setdefault(str(record.id), line)) != line:
            raise UserError(
                f"{records.path}, line {line}: its id '{record.id}' is that of line {other}, and questions are paired "
                f"by id. Give every record its own id. {HINT}"
            )
    task = make_task(table, records, find_scorer)
    for line, record in records.valid.items():
        for index, turn in enumerate(record.turns):
            if fault := find_scoring_fault(task, turn):
                raise UserError(f"{records.path}, line {line}, turn {index}: {fault}. {HINT}")
    return task


def find_scoring_fault(task: type[CustomTask], turn: TurnRecord) -> str | None:
    """Describe a fault of the task's scorer on a turn; None: it has none.

    It cannot score the reference answer, as a scorer of numbers an answer without one, gives it nothing, or counts a
    choice that is no reference as much as the answer.
    """
    scorer, references = task.scorers[0], turn.references or [turn.answer.strip()]
    right = {x.strip() for x in (turn.answer, *references)}
    try:
        most = scorer(turn.answer, references, {})
    except (ValueError, IndexError, ZeroDivisionError) as error:
        return f"scorer {scorer.id} cannot score the reference answer {turn.answer!r} ({error})"
    if most is None:
        return f"scorer {scorer.id} cannot score the reference answer {turn.answer!r} (it does not apply to it)"
    if most == 0 and scorer.higher_is_better:
        return (
            f"scorer {scorer.id} gives the reference answer {turn.answer!r} 0 for the references "
            f"{', '.join(map(repr, references))}. Correct one of the two, or use another scorer"
        )
    for choice in turn.choices:
        found = scorer(choice, references, {})
        if choice.strip() not in right and found and found >= most:
            return f"scorer {scorer.id} counts the wrong choice {choice!r} as right. Use the scorer exact@1"
    return None


def make_task(table: TaskTable, records: RecordFile, find_scorer: FindScorer) -> type[CustomTask]:
    """Create the class of a task that was read from files.

    Raises:
        UserError: the scorer is unknown, or needs facts, which records do not have.
    """
    if table.scorer in SCORERS:
        scorer, owner = SCORERS[table.scorer], None
    else:
        scorer, owner = find_scorer(table.scorer, SCORERS)
        if scorer.facts:
            raise UserError(
                f"scorer {scorer.id} needs the facts {', '.join(scorer.facts)}, which records cannot have. Use one of "
                f"{', '.join(SCORERS)}."
            )
    known = SCORERS.values() if owner is None else owner.scorers
    scorers = (scorer, *(x for x in known if x.id == name_strict(scorer.id)))
    # The class name contains the hash, so that two files with the same task name are two tasks.
    return type(f"CustomTask_{table.name}_{records.sha256}", (CustomTask,), {
        "__module__": __name__, "__doc__": CustomTask.__doc__, "table": table, "records": records, "owner": owner,
        "name": table.name, "version": table.version, "suite": table.suite, "summary": table.summary,
        "modes": tuple(Mode(x) for x in table.modes), "scorers": scorers, "truncation": table.truncation,
        "default_length": table.length, "joint": table.joint, "separator": table.separator,
        "default_turns": max((len(x.turns) for x in records.valid.values()), default=1),
    })
