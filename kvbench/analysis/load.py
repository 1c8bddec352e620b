"""Finds and loads finished runs, by folder or id."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbench.errors import UserError, unknown
from kvbench.log import count, say
from kvbench.registry import list_models
from kvbench.runs.files import read_answers, read_file
from kvbench.runs.journal import Answer, Line
from kvbench.runs.results import Result, SuiteRecord
from kvbench.runs.spec import shorten
from kvbench.runs.stats import INTERVAL, find_interval

RUNS = Path("runs")
Seen = dict[str, list[tuple[Path, Result]]]
"""Folders and results of runs, by run id."""


@dataclass(frozen=True)
class FinishedRun:
    """A finished run, read from its files."""

    folder: Path
    result: Result
    lines: dict[tuple[str, int], Answer]
    """Answers by sample and turn."""


def locate_run(text: str, out: Path = RUNS) -> Path | None:
    """The folder of a run, from its path, or its id in `out` or the hash at the end of the id; None: no such run.

    Raises:
        UserError: a folder of several runs.
    """
    for folder in (Path(text), out / text):
        if (folder / "spec.json").is_file():
            return folder
    if text and (inner := next(iter(sorted(Path(text).glob("*/spec.json"))), None)) is not None:
        raise UserError(
            f"'{text}' is a folder of runs, not a run. Give one of them, such as {inner.parent}; "
            f"`kvbench report {text} -o report.html` shows all."
        )
    found = [x.parent for x in out.glob("*/spec.json") if text and x.parent.name.endswith(f"-{text}")]
    return found[0] if len(found) == 1 else None


def find_run(text: str, out: Path = RUNS) -> Path:
    """As `locate_run`.

    Raises:
        UserError: no such run.
    """
    folder = locate_run(text, out)
    if folder is not None:
        return folder
    if (Path(text) / "config.json").is_file() or text in list_models():
        raise UserError(f"'{text}' is a model, not a run. Give the folder of a run, or the id of a run in {out}/.")
    known = [x.parent.name for x in out.glob("*/spec.json")]
    raise unknown("run", text, known[-20:], f"Give the folder of a run, or the id of a run in {out}/.")


def refer_to(folder: Path) -> str:
    """A run for a command line: the hash at the end of its id, or its folder where commands do not look for ids."""
    return shorten(folder.name) if folder.parent.resolve() == RUNS.resolve() else shlex.quote(str(folder))


def find_runs(texts: Sequence[str], out: Path = RUNS) -> list[Path]:
    """Folders of finished runs, without duplicates. Runs of a folder whose result cannot be read are left out.

    Args:
        texts: each the path or id of a run, the folder of a suite, or a folder with runs at any depth.
        out: where ids are looked up.

    Raises:
        UserError: a text names none of these, or a folder contains no finished run.
    """
    found = [folder for text in texts for folder in _expand(text, out)]
    return list({x.resolve(): x for x in found}.values())


def _expand(text: str, out: Path) -> list[Path]:
    folder = Path(text)
    if (folder / "suite.json").is_file():
        ids = read_file(folder / "suite.json", SuiteRecord).runs
        return [find_run(x, folder.parent.parent) for x in ids]  # suite.json is in <out>/suites/<name>/
    if not folder.is_dir() or (folder / "spec.json").is_file():
        return [find_run(text, out)]
    every = sorted(x.parent for x in folder.rglob("spec.json"))
    finished = [x for x in every if (x / "result.json").is_file()]
    if len(finished) < len(every):
        say(f"{text}: skipped {count(len(every) - len(finished), 'unfinished run')}.")
    found, errors = [], []
    for x in finished:
        try:
            read_file(x / "result.json", Result)
        except UserError as error:
            errors.append(error)
        else:
            found.append(x)
    if errors:
        say(f"warning: {text}: skipped {len(errors)} unreadable run{'s, first' if errors[1:] else ''}: {errors[0]}")
    if not found:
        raise UserError(f"there is no finished run in '{text}'. Give the folder of a run, or a folder with runs.")
    return found


def load_runs(texts: Sequence[str], out: Path = RUNS) -> list[FinishedRun]:
    """The runs of `find_runs`, as `load_found`."""
    return load_found(find_runs(texts, out), texts)


def load_found(folders: Iterable[Path], texts: Sequence[str]) -> list[FinishedRun]:
    """Runs that `find_runs` found for texts. A damaged one is left out with a warning if a folder around it was given.

    Of copies of one run in several folders, the first is loaded: a table would count the others as further runs.

    Raises:
        UserError: a run is damaged that was given itself, or all are.
    """
    found: list[FinishedRun] = []
    seen: Seen = {}
    for folder in folders:
        try:
            run = load_run(folder)
        except UserError as error:
            if not any(Path(x) in folder.parents for x in texts):
                raise
            say(f"warning: skipped: {error}")
            continue
        if not is_copy(folder, run.result, seen):
            found.append(run)
    if not found:
        raise UserError(f"no run of {', '.join(texts)} can be read.")
    return found


def is_copy(folder: Path, result: Result, seen: Seen) -> bool:
    """Whether a run was seen in another folder, which is said; one that was not is added to `seen`."""
    same = seen.setdefault(result.run_id, [])
    original = next((place for place, x in same if x == result), None)
    if original is None:
        same.append((folder, result))
    else:
        say(f"{folder}: skipped, a copy of {original}.")
    return original is not None


def load_run(folder: Path) -> FinishedRun:
    """Read a finished run.

    Raises:
        UserError: the run is not finished, or its files are damaged, or its journal lacks answers.
    """
    if not (folder / "result.json").is_file():
        raise UserError(f"run '{folder}' is not finished: it has no result.json. Run its command again to finish it.")
    lines = read_answers(folder / "samples.jsonl")
    named = {(x.sample, x.turn): x for x in lines}
    for x in lines:
        if (other := named[x.sample, x.turn].index) != x.index:
            raise UserError(
                f"run '{folder}' has two samples with the id '{x.sample}', numbers {x.index} and {other}; questions "
                "are paired by id. Give every record of the task its own id, and run it again."
            )
    result = read_file(folder / "result.json", Result)
    check_complete(folder, result, lines)
    return FinishedRun(folder, renew_interval(result, lines), named)


def check_complete(folder: Path, result: Result, lines: Sequence[Answer | Line]) -> None:
    """Check that a journal has all answers that the result states.

    Raises:
        UserError: it has not; comparisons would leave the others out.
    """
    stated, there = result.n_questions or result.n_samples, {x.index for x in lines}
    if len(lines) < stated or len(there) < result.n_samples:
        raise UserError(
            f"run '{folder}' has {len(lines)} answers about {len(there)} samples in its journal, and its result states "
            f"{stated} about {result.n_samples}; comparisons would leave the others out. Restore samples.jsonl, or "
            "delete result.json and run its command again."
        )


def renew_interval(result: Result, answers: Iterable[Answer]) -> Result:
    """The result with today's interval of its score, which results of earlier versions do not have.

    None if no answer has a score, as in a damaged journal.
    """
    score = result.score
    if score.mean is None or score.interval == INTERVAL:
        return result
    clusters: dict[int, list[float]] = {}
    for x in answers:
        if x.score is not None:
            clusters.setdefault(x.index, []).append(x.score)
    found = find_interval(list(clusters.values())) if clusters else None
    return result.model_copy(update={"score": score.model_copy(update={"ci95": found, "interval": INTERVAL})})
