"""Groups runs of one task and protocol, with labels, ranks and differences to the full cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvbench.analysis.compare import (
    Difference,
    compare_runs,
    find_baseline,
    is_called,
    is_full,
    name_protocol,
    rank_runs,
)
from kvbench.analysis.load import FinishedRun
from kvbench.analysis.shares import fill_full_reads, read_share, stored_share
from kvbench.log import count
from kvbench.method import name_preparation
from kvbench.registry import list_entries
from kvbench.runs.results import Result
from kvbench.runs.spec import shorten

VISIBILITIES = {
    "visible": "question visible", "hidden": "question hidden", "first-turn": "first question visible",
}
EDGES = (0.15, 0.3, 0.6, 1.0)
"""Limits of the bands of similar size as shares of the full cache, chosen so that usual budgets lie inside a band."""


@dataclass(frozen=True)
class GroupedRun:
    """A run within its group; one row of a table."""

    result: Result
    label: str
    """Method, budget, and the settings that differ between runs of the method."""
    rank: int | None = None
    """None: it failed, or has no score."""
    difference: Difference | None = None
    """To the baseline; None: it is the baseline, or there is none."""
    baseline: str | None = None
    """Method of the run that the difference is taken to; by default the full cache."""
    full: bool = False
    """Whether it is a run of the full cache."""

    @property
    def measured(self) -> bool:
        """Whether it has a score and may appear in a chart."""
        return self.result.status == "ok" and self.result.score.mean is not None


def find_band(size: float) -> int:
    """The number of the band of a size, from 0."""
    return sum(size > edge for edge in EDGES)


def group_runs(runs: Sequence[FinishedRun], baseline: str | None = None) -> list[list[GroupedRun]]:
    """Group runs by task and protocol, sorted by task and length; best runs first, failed ones last.

    baseline: method or id of the run that others are compared with; None: the full cache. A group without it has no
        differences.

    Raises:
        UserError: no group has the baseline, or a group has several.
    """
    groups: dict[str, list[FinishedRun]] = {}
    for run in fill_full_reads(runs, runs):
        groups.setdefault(name_protocol(run.result), []).append(run)
    if baseline is not None and not any(is_called(x.result, baseline) for x in runs):
        find_baseline(runs, baseline)  # raises
    return sorted((_enter(x, baseline) for x in groups.values()), key=lambda x: _place(x[0].result))


def _place(result: Result) -> tuple[str, int, str, str, str]:
    return result.task.name, result.task.length, result.mode, result.visibility, result.model.id


def _find_base(runs: Sequence[FinishedRun], asked: str | None) -> FinishedRun | None:
    if asked is None:
        return next((x for x in runs if is_full(x.result) and x.result.status == "ok"), None)
    return runs[find_baseline(runs, asked)] if any(is_called(x.result, asked) for x in runs) else None


def _enter(runs: Sequence[FinishedRun], baseline: str | None) -> list[GroupedRun]:
    results = [x.result for x in runs]
    base = _find_base(runs, baseline)
    others = [x for x in runs if x is not base]
    differences = {} if base is None else dict(zip(map(id, others), compare_runs(base, others), strict=True))
    entries = [
        GroupedRun(
            run.result, label, rank, differences.get(id(run)), full=is_full(run.result),
            baseline=None if base is None else base.result.method.name,
        )
        for run, label, rank in zip(runs, label_results(results), rank_runs(runs), strict=True)
    ]
    sign = -1 if results[0].score.higher_is_better else 1
    return sorted(entries, key=lambda x: (
        x.rank is None, x.rank or 0, not x.measured, sign * (x.result.score.mean or 0.0),
        stored_share(x.result) or 0.0, x.label,
    ))


def label_results(results: Sequence[Result]) -> list[str]:
    """Label each of several results; labels are unique unless the runs are identical."""
    labels = []
    for result in results:
        same = [x.method.settings for x in results if x.method.name == result.method.name]
        own = [
            f"{key}={value}" for key, value in result.method.settings.items()
            if any(x.get(key) != value for x in same)
        ]
        labels.append(" ".join([result.method.name, *([result.budget.asked] if result.budget.asked else []), *own]))
    often = Counter(labels)
    return [
        f"{label} ({shorten(result.run_id)})" if often[label] > 1 else label
        for label, result in zip(labels, results, strict=True)
    ]


def name_training(result: Result) -> str:
    """Calibration, training on the tasks, or training on another text before the run; empty without any.

    Only training on the tasks excludes a run from ranks. The cards in older results lack calibration, so the
    registered ones count.
    """
    if result.budget.trained:
        return "trained on the tasks"
    card, parts = result.method.card, () if result.method.code else result.method.name.split("+")
    known = [x.facts.get("calibration") for x in list_entries("method") if x.name in parts]
    stated = [card["calibration"]] if "calibration" in card else known
    found = {name_preparation(None if x is None else str(x)) for x in stated}  # a card of a file may have any value
    return "trained on another text" if "trained" in found else "calibrated" if "calibrated" in found else ""


def name_question(result: Result) -> str:
    """Task, length, visibility, number of contexts, and the generation settings that were chosen."""
    generation = result.spec.generation
    chosen = {} if generation.max_new_tokens is None else {"max_new_tokens": generation.max_new_tokens}
    if generation.denoising is not None:
        chosen |= generation.denoising.model_dump(exclude_defaults=True)
    contexts = count(result.spec.samples, "context")
    asked = f"{result.task.name}, {result.task.length:,} tokens, {VISIBILITIES[result.visibility]}, {contexts}"
    return ", ".join([asked, *(f"{name} {value}" for name, value in chosen.items())])


class Axis(StrEnum):
    """The quantity that a method's budget limits. Runs of different axes are never ranked together."""

    STORED = "stored"
    READ = "read"
    COMPUTED = "computed"

    @classmethod
    def of(cls, result: Result) -> Axis:
        """Axis of a run: computed positions for diffusion policies, bytes read for read budgets, else stored bytes."""
        if result.model.kind == "diffusion":
            return cls.COMPUTED
        return cls.READ if result.budget.kind == "read" else cls.STORED

    def measure(self, result: Result) -> float | None:
        """The measured share of the full cache's bytes, or of all positions; None if nothing was measured."""
        if self is Axis.COMPUTED:
            return None if result.diffusion is None else result.diffusion.computed_share
        return stored_share(result) if self is Axis.STORED else read_share(result)


def find_frontier(points: Sequence[tuple[float, float]], *, higher_is_better: bool) -> list[int]:
    """Indices of the Pareto frontier of (cost, score) points, cheapest first."""
    sign = 1 if higher_is_better else -1
    order = sorted(range(len(points)), key=lambda i: (points[i][0], -sign * points[i][1]))
    best: list[int] = []
    for i in order:
        if not best or sign * points[i][1] > sign * points[best[-1]][1]:
            best.append(i)
    return best
