"""Runs side by side, and whether a difference is more than noise: paired on the questions that both answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from kvbench.errors import UserError, unknown
from kvbench.files import read_file, read_lines
from kvbench.results import Line, Result
from kvbench.stats import bootstrap_interval

PROTOCOL = (
    "model.sha256", "model.dtype", "task.version", "task.settings", "task.length", "task.prompt_id", "task.scorer",
    "task.chat_template_sha", "task.bos", "mode", "visibility", "history", "spec.recompress", "spec.split", "spec.seed",
    "spec.samples", "spec.turns", "spec.generation", "spec.device", "environment.threads",
    "environment.device_map",
)
"""What must be equal before a difference speaks of the methods."""


@dataclass(frozen=True)
class Run:
    """A finished run as its files say."""

    folder: Path
    result: Result
    lines: dict[tuple[str, int], Line]


@dataclass(frozen=True)
class Difference:
    """A run minus the first, on their common questions."""

    run_id: str
    n: int
    mean: float | None
    ci95: tuple[float, float] | None
    within_noise: bool | None
    """Whether the interval contains 0; None: nothing to compare."""


@dataclass(frozen=True)
class Regression:
    """A question that the full cache answered better."""

    sample: str
    turn: int
    full: float
    score: float


@dataclass(frozen=True)
class Regressions:
    """What became worse in a run than with the full cache, on their common questions."""

    run_id: str
    full: str
    """The run of the full cache."""
    n: int
    count: int
    samples: tuple[Regression, ...]
    """Worst first."""


def find_run(text: str, out: Path = Path("runs")) -> Path:
    """The folder of a run, by its path or by its id below `out`.

    Raises:
        UserError: there is none.
    """
    for folder in (Path(text), out / text):
        if (folder / "spec.json").is_file():
            return folder
    known = [x.parent.name for x in out.glob("*/spec.json")] if out.is_dir() else []
    raise unknown("run", text, known[-20:], f"Give the folder of a run, or its id below {out}/.")


def load_run(text: str, out: Path = Path("runs")) -> Run:
    """Read a finished run.

    Raises:
        UserError: it is not there, not finished, or damaged.
    """
    folder = find_run(text, out)
    if not (folder / "result.json").is_file():
        raise UserError(f"run '{text}' is not finished: it has no result.json. Run its command again to finish it.")
    lines = read_lines(folder / "samples.jsonl")
    return Run(folder, read_file(folder / "result.json", Result), {(x.sample, x.turn): x for x in lines})


def find_conflicts(runs: Sequence[Run]) -> list[str]:
    """Failures and differences of protocol, one line each.

    Raises:
        UserError: the runs are of different tasks.
    """
    tasks = sorted({x.result.task.name for x in runs})
    if len(tasks) > 1:
        raise UserError(f"these runs are of different tasks ({', '.join(tasks)}): their scores cannot be compared.")
    found = [f"{x.result.run_id} failed: {x.result.error}" for x in runs if x.result.status == "failed"]
    for name in PROTOCOL:
        values = [look(x.result.model_dump(mode="json"), name) for x in runs]
        if any(x != values[0] for x in values):
            found.append(f"{name} differs: {', '.join(map(str, values))}")
    return found


def compare_pair(first: Run, other: Run) -> Difference:
    """The paired difference of scores, whole contexts resampled; a failed run has none."""
    if "failed" in (first.result.status, other.result.status):
        return Difference(other.result.run_id, 0, None, None, None)
    clusters: dict[str, list[float]] = {}
    for (sample, _), (a, b) in _pair(first, other).items():
        clusters.setdefault(sample, []).append(b - a)
    values = [x for cluster in clusters.values() for x in cluster]
    if not values:
        return Difference(other.result.run_id, 0, None, None, None)
    low, high = bootstrap_interval(list(clusters.values()))
    return Difference(other.result.run_id, len(values), fmean(values), (low, high), low <= 0 <= high)


def find_regressions(runs: Sequence[Run]) -> list[Regressions]:
    """For each whole run, against the first of the full cache that was asked the same; nothing where there is none."""
    whole = [x for x in runs if x.result.status == "ok"]
    full = [x for x in whole if is_full(x.result)]
    pairs = ([(x, other, _pair(x, other)) for x in full] for other in whole if other not in full)
    return [_regress(*next(x for x in several if x[2])) for several in pairs if any(x[2] for x in several)]


def _regress(full: Run, other: Run, common: dict[tuple[str, int], tuple[float, float]]) -> Regressions:
    sign = 1 if full.result.score.higher_is_better else -1
    worse = [Regression(*key, a, b) for key, (a, b) in common.items() if sign * (b - a) < 0]
    worse.sort(key=lambda x: (sign * (x.score - x.full), other.lines[x.sample, x.turn].index, x.turn))
    return Regressions(other.result.run_id, full.result.run_id, len(common), len(worse), tuple(worse))


def is_full(result: Result) -> bool:
    """Of a method that takes no budget and is declared to lose nothing."""
    return result.budget.kind == "none" and result.certificate is not None and result.certificate.n == 0


def _pair(first: Run, other: Run) -> dict[tuple[str, int], tuple[float, float]]:
    """Scores of the questions that both were asked alike, by sample and turn; in a fixed order, as sets have none."""
    pairs = {}
    for key in sorted(first.lines.keys() & other.lines.keys()):
        a, b = first.lines[key], other.lines[key]
        if a.score is not None and b.score is not None and a.prompt_hash == b.prompt_hash:
            pairs[key] = a.score, b.score
    return pairs


def look(document: object, name: str) -> object:
    """A field of a document by its dotted name; None: not there."""
    for part in name.split("."):
        document = document[part] if isinstance(document, dict) else None
    return document
