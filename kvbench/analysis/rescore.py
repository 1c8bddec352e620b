"""Scores a finished or unfinished run again from its journal: no model, and nothing of the run is changed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from kvbench.errors import UserError
from kvbench.log import say
from kvbench.registry import find_task
from kvbench.runs.files import finished_samples, read_file, read_lines, saving, write_record
from kvbench.runs.journal import Line
from kvbench.runs.request import find_scorer
from kvbench.runs.results import Score
from kvbench.runs.schema import SCHEMA_VERSION
from kvbench.runs.spec import Record, RunSpec
from kvbench.runs.summary import score_lines


class Rescored(Record):
    """scores/<scorer>.json"""

    schema_version: Literal[2] = SCHEMA_VERSION
    run_id: str
    task: str
    task_version: str
    """Of the installed task: its scorer did the work."""
    scorer: str
    n_samples: int
    n_scored: int
    score: Score


def rescore(folder: Path, scorer_id: str | None = None, task_name: str | None = None) -> tuple[Rescored, Path]:
    """Score every prediction of the journal again; None: with the run's own scorer, from its own task.

    Raises:
        UserError: no such run, task or scorer, no predictions, or none of the facts that the scorer needs.
    """
    spec = read_file(folder / "spec.json", RunSpec)
    if spec.model.id.startswith("random:"):
        raise UserError(f"run {folder} is of random weights: its answers have no score.")
    task = find_task(task_name or spec.task.name)
    if task.name != spec.task.name:
        raise UserError(f"run {folder} is of task {spec.task.name}, not of {task.name}. Give the file of its own task.")
    if task.version != spec.task.version:
        say(f"the run is of {task.name} version {spec.task.version}, scored with that of version {task.version}.")
    scorer = find_scorer(task, scorer_id or spec.task.scorer)
    lines = read_lines(folder / "samples.jsonl")
    finished = finished_samples(lines)
    lines = [x for x in lines if x.index in finished]
    if not lines:
        raise UserError(f"run {folder} has no samples yet. Run its command again to go on.")
    of_example = {x.index: x.facts for x in lines if x.turn == 0}

    def judge(line: Line) -> float | None:
        if line.prediction is None:
            return None
        facts = {**of_example[line.index], **line.facts}
        if missing := [x for x in scorer.facts if x not in facts]:
            raise UserError(
                f"run {folder} has no {', '.join(missing)} in its journal, which scorer {scorer.id} needs: it is of "
                "another version of the task. Run it again."
            )
        return scorer(line.prediction, line.references, facts)

    score = score_lines(scorer, lines, judge)
    failed = {x.index for x in lines if x.error is not None}
    path = folder / "scores" / f"{re.sub(r'[^A-Za-z0-9_.@+-]+', '-', scorer.id)}.json"
    record = Rescored(
        run_id=spec.run_id, task=task.name, task_version=task.version, scorer=scorer.id, n_samples=spec.samples,
        n_scored=len({x.index for x in lines} - failed), score=score,
    )
    with saving(path):
        path.parent.mkdir(exist_ok=True)
    write_record(path, record)
    return record, path
