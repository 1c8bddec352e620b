"""Finished runs: found by folder or id, read with the answers that comparisons need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbench.errors import UserError, unknown
from kvbench.log import say
from kvbench.runs.files import read_answers, read_file
from kvbench.runs.journal import Answer
from kvbench.runs.results import Result

RUNS = Path("runs")


@dataclass(frozen=True)
class FinishedRun:
    """A finished run as its files say."""

    folder: Path
    result: Result
    lines: dict[tuple[str, int], Answer]
    """By sample and turn."""


def find_run(text: str, out: Path = RUNS) -> Path:
    """The folder of a run, by its path or by its id below `out`.

    Raises:
        UserError: there is none.
    """
    for folder in (Path(text), out / text):
        if (folder / "spec.json").is_file():
            return folder
    known = [x.parent.name for x in out.glob("*/spec.json")] if out.is_dir() else []
    raise unknown("run", text, known[-20:], f"Give the folder of a run, or its id below {out}/.")


def find_runs(texts: Sequence[str], out: Path = RUNS) -> list[Path]:
    """Folders of finished runs, each once: runs by path or id, the runs of a suite's folder, all below another folder.

    Raises:
        UserError: a text names none of these, or a folder has no finished run in it.
    """
    found = [folder for text in texts for folder in _expand(text, out)]
    return list({x.resolve(): x for x in found}.values())


def _expand(text: str, out: Path) -> list[Path]:
    from kvbench.sweep.suite import SuiteRecord  # with all that makes runs

    folder = Path(text)
    if (folder / "suite.json").is_file():
        ids = read_file(folder / "suite.json", SuiteRecord).runs
        return [find_run(x, folder.parent.parent) for x in ids]  # it lies in runs/suites/
    if not folder.is_dir() or (folder / "spec.json").is_file():
        return [find_run(text, out)]
    every = sorted(x.parent for x in folder.rglob("spec.json"))
    finished = [x for x in every if (x / "result.json").is_file()]
    if not finished:
        raise UserError(f"no finished run lies below '{text}'. Give the folder of a run, or one with runs in it.")
    if len(finished) < len(every):
        say(f"{text}: {len(every) - len(finished)} unfinished runs are left out.")
    return finished


def load_run(folder: Path) -> FinishedRun:
    """Read a finished run.

    Raises:
        UserError: it is not finished, or damaged.
    """
    if not (folder / "result.json").is_file():
        raise UserError(f"run '{folder}' is not finished: it has no result.json. Run its command again to finish it.")
    lines = read_answers(folder / "samples.jsonl")
    named = {(x.sample, x.turn): x for x in lines}
    for x in lines:
        if (other := named[x.sample, x.turn].index) != x.index:
            raise UserError(
                f"run '{folder}' has two samples called '{x.sample}', numbers {x.index} and {other}: questions are "
                "paired by name. Give every row of the task an id of its own, and run it again."
            )
    return FinishedRun(folder, read_file(folder / "result.json", Result), named)
