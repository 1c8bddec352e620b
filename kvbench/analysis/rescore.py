"""Scores the answers of a run again from its journal, without a model and without changing the run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from kvbench.errors import UserError
from kvbench.log import say
from kvbench.registry import find_task, refuse_unregistered
from kvbench.runs.files import finished_samples, read_file, read_lines, saving, write_record
from kvbench.runs.journal import Line
from kvbench.runs.request import choose_scorer
from kvbench.runs.results import Score
from kvbench.runs.schema import SCHEMA_VERSION
from kvbench.runs.spec import Record, RunSpec, TaskSpec
from kvbench.runs.summary import score_lines
from kvbench.task import Scorer, Task


class Rescored(Record):
    """scores/<scorer>.json"""

    schema_version: Literal[2] = SCHEMA_VERSION
    run_id: str
    task: str
    task_version: str
    """Version of the installed task, whose scorer was used."""
    scorer: str
    n_samples: int
    n_scored: int
    score: Score


def rescore(folder: Path, scorer_id: str | None = None, task_name: str | None = None) -> tuple[Rescored, Path]:
    """Score every prediction in the journal again.

    Args:
        folder: of a run, finished or not.
        scorer_id: None: the run's own scorer.
        task_name: a name, or path/to/file.py:Class; None: the run's own task, which must be registered.

    Returns:
        The record and the path it was written to, `scores/<scorer>.json`.

    Raises:
        UserError: no such run, task or scorer; no predictions, or none that the scorer applies to; or facts that the
            scorer needs are missing.
    """
    spec = read_file(folder / "spec.json", RunSpec)
    if spec.model.random:
        raise UserError(f"run {folder} used random weights, so its answers have no score.")
    task = _find_task(folder, spec.task, task_name)
    scorer = choose_scorer(task, scorer_id or spec.task.scorer)
    lines = read_lines(folder / "samples.jsonl")
    finished = finished_samples(lines)
    lines = [x for x in lines if x.index in finished]
    if not lines:
        raise UserError(f"run {folder} has no samples yet. Run its command again to continue it.")
    values = _score_answers(folder, scorer, lines)
    scored = {index for (index, _), value in values.items() if value is not None}
    if values and not scored:
        raise UserError(
            f"scorer {scorer.id} applies to no answer of run {folder}. Give another --scorer; `kvbench show "
            f"{task.name}` lists them."
        )
    score = score_lines(scorer, lines, lambda x: values[x.index, x.turn])
    path = folder / "scores" / f"{re.sub(r'[^A-Za-z0-9_.@+-]+', '-', scorer.id)}.json"
    record = Rescored(
        run_id=spec.run_id, task=task.name, task_version=task.version, scorer=scorer.id, n_samples=spec.samples,
        n_scored=len(scored), score=score,
    )
    with saving(path):
        path.parent.mkdir(exist_ok=True)
    write_record(path, record)
    return record, path


def _find_task(folder: Path, stated: TaskSpec, name: str | None) -> type[Task]:
    if name is None:
        hint = "If you trust its file, give --task path/to/file.py:Class or path/to/task.toml."
        refuse_unregistered("task", stated.name, hint)
    task = find_task(name or stated.name)
    if task.name != stated.name:
        raise UserError(
            f"run {folder} belongs to task {stated.name}, not to {task.name}. Give the file of its own task."
        )
    if task.version != stated.version:
        say(f"warning: the run used {task.name} version {stated.version}; it is scored with version {task.version}.")
    return task


def _score_answers(folder: Path, scorer: Scorer, lines: Sequence[Line]) -> dict[tuple[int, int], float | None]:
    """The scores of answers by sample and turn; samples that failed have none."""
    failed = {x.index for x in lines if x.error is not None}
    of_example = {x.index: x.facts for x in lines if x.turn == 0}
    values: dict[tuple[int, int], float | None] = {}
    for line in lines:
        if line.index in failed:
            continue
        values[line.index, line.turn] = None
        if line.prediction is None:
            continue
        facts = {**of_example[line.index], **line.facts}
        if missing := [x for x in scorer.facts if x not in facts]:
            raise UserError(
                f"run {folder} has no {', '.join(missing)} in its journal, which scorer {scorer.id} needs; it was made "
                "with another version of the task. Run it again."
            )
        values[line.index, line.turn] = scorer(line.prediction, line.references, facts)
    return values
