"""Audits of a task's examples without a model: lengths, ids, questions, and where the answers are."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbench.custom.files import RecordFile, TaskTable
from kvbench.custom.task import find_scoring_fault, make_task
from kvbench.errors import UserError
from kvbench.registry import find_scorer
from kvbench.task import Example, Mode, Split, Task, Turn, count_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase  # noqa: TID251  # its type


@dataclass(frozen=True)
class ExampleFault:
    """One problem of one example."""

    row: str
    """The id of the example; empty where the line is not a record."""
    line: int | None
    """Line of the JSONL file, counted from 1; None: the examples are not from a file."""
    turn: int | None
    """Counted from 0; None: the whole example."""
    what: str


@dataclass(frozen=True)
class Audit:
    """The examined examples and their problems."""

    examples: int
    turns: int
    tokens: tuple[int, int] | None
    """Tokens of the shortest and of the longest first prompt with its answer; None: there is no example."""
    cut: int
    """Examples whose middle is cut."""
    findings: list[ExampleFault]


def audit_rows(table: TaskTable, rows: RecordFile, tokenizer: PreTrainedTokenizerBase) -> Audit:
    """Audit every line of a custom task."""
    task = make_task(table, rows, find_scorer)()
    findings = [ExampleFault("", line, None, what) for line, what in rows.errors.items()]
    examples, sizes = [], []
    for line, row in rows.valid.items():
        example = task.compose(row, len(row.turns))
        sizes.append(task.count(example, tokenizer))
        if sizes[-1] > table.length and table.truncation == "none":
            findings.append(ExampleFault(example.id, line, None, _too_long(sizes[-1], table.length)))
        elif sizes[-1] > table.length:
            try:
                example = task.cut(example, table.length, tokenizer)
            except UserError as error:
                findings.append(ExampleFault(example.id, line, None, str(error)))
        examples.append(example)
        where = "the context after the cut" if "cut_tokens" in example.facts else "the context"
        for index, (asked, turn) in enumerate(zip(row.turns, example.turns, strict=True)):
            claimed = table.answer_in_context if asked.answer_in_context is None else asked.answer_in_context
            if claimed and not any(x in example.context for x in turn.references):
                findings.append(ExampleFault(example.id, line, index, f"the answer is not in {where}"))
            if fault := find_scoring_fault(type(task), asked) or _find_cut(task, turn, tokenizer):
                findings.append(ExampleFault(example.id, line, index, fault))
    findings += _compare(examples, list(rows.valid))
    return _sum_up(examples, sizes, sorted(findings, key=lambda x: (x.line or 0, x.turn or 0)))


def _find_cut(task: Task, turn: Turn, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Describe a reference answer that is longer than `max_new_tokens` and scores nothing once it is cut there."""
    ids = tokenizer.encode(turn.answer, add_special_tokens=False)
    scorer, most = task.scorers[0], turn.max_new_tokens
    if turn.choices or len(ids) <= most or not scorer.higher_is_better:
        return None
    try:
        score = scorer(str(tokenizer.decode(ids[:most])), list(turn.references), {})
    except (ValueError, IndexError, ZeroDivisionError):
        score = None
    return None if score else (
        f"the reference answer {turn.answer!r} has {len(ids)} tokens, and scores nothing when it is cut at "
        f"max_new_tokens = {most}. Use a greater max_new_tokens"
    )


def audit_task(task: Task, tokenizer: PreTrainedTokenizerBase, samples: int) -> Audit:
    """Audit the first examples of a task at its default length, in its first mode with several turns.

    Raises:
        UserError: the task cannot make them.
    """
    mode = next((x for x in task.modes if x is not Mode.SINGLE), Mode.SINGLE)
    turns = 1 if mode is Mode.SINGLE else task.default_turns
    length = task.default_length
    examples = list(task.examples(
        seed=0, split=Split.TEST, n=samples, length=length, turns=turns, mode=mode, tokenizer=tokenizer
    ))
    frame = task.frame(tokenizer)
    sizes = [count_prompt(task, x, tokenizer, frame) + x.turns[0].max_new_tokens for x in examples]
    findings = [
        ExampleFault(x.id, None, None, _too_long(size, length))
        for x, size in zip(examples, sizes, strict=True) if size > length
    ]
    findings += [ExampleFault(x.id, None, None, "the context is empty") for x in examples if not x.context.strip()]
    findings += _compare(examples, [None] * len(examples))
    return _sum_up(examples, sizes, findings)


def _sum_up(examples: Sequence[Example], sizes: Sequence[int], findings: list[ExampleFault]) -> Audit:
    return Audit(
        len(examples), sum(len(x.turns) for x in examples), (min(sizes), max(sizes)) if sizes else None,
        sum(bool(x.facts.get("cut_tokens")) for x in examples), findings,
    )


def _too_long(size: int, length: int) -> str:
    return f"{size} tokens with its answer, more than the length of {length}"


def _compare(examples: Sequence[Example], lines: Sequence[int | None]) -> Iterator[ExampleFault]:
    """Find ids and questions that occur twice, and questions that contain their answer."""
    ids: dict[str, int] = {}
    for number, (example, line) in enumerate(zip(examples, lines, strict=True)):
        first = ids.setdefault(example.id, number)
        if first != number:
            where = f"line {lines[first]}" if line is not None else f"example {first}"
            yield ExampleFault(example.id, line, None, f"{where} has the same id")
        asked: dict[str, int] = {}
        for index, turn in enumerate(example.turns):
            before = asked.setdefault(turn.question.strip(), index)
            if before != index:
                yield ExampleFault(example.id, line, index, f"turn {before} asks the same question")
            if leak := _find_leak(turn):
                yield ExampleFault(example.id, line, index, f"the question contains the answer {leak!r}")


def _find_leak(turn: Turn) -> str | None:
    """A reference answer that the question or the answer's prefix contains; choices and single letters may occur."""
    if turn.choices:
        return None
    text = f"{turn.question}\n{turn.prefix}".casefold()
    for reference in turn.references:
        word = reference.strip().casefold()
        pattern = rf"(?<!\w){re.escape(word)}(?!\w)" if word.isascii() else re.escape(word)
        if len(word) > 1 and re.search(pattern, text):
            return reference
    return None
