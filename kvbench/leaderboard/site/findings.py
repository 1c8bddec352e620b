"""Pages of findings: published statements with the paper's numbers next to ours, tested on texts or on runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbench.errors import UserError
from kvbench.leaderboard.site.charts import HEIGHT, LEFT, RIGHT, TOP, Curve, Point, make_curves
from kvbench.leaderboard.site.pages import name_pages
from kvbench.reproduce.findings.records import FindingResult, FindingsRecord
from kvbench.reproduce.findings.statements import Figure, Statement, find_findings
from kvbench.reproduce.recorded import read_findings, read_measured
from kvbench.reproduce.shape import FindingRecord, ShapeRecord


@dataclass(frozen=True)
class LayerChart:
    """Lines by layer, or along another axis, and where they and their labels lie."""

    title: str
    axis: str
    curves: tuple[Curve, ...]
    ticks: tuple[tuple[float, str], ...]
    levels: tuple[tuple[float, str], ...]
    height: float = HEIGHT


@dataclass(frozen=True)
class Tested:
    """A finding on the texts of one model."""

    record: FindingsRecord
    result: FindingResult
    chart: LayerChart | None


@dataclass(frozen=True)
class TextFinding:
    """A finding that was tested on texts, with all models."""

    path: str
    tested: tuple[Tested, ...]
    statement: Statement | None
    """Its definitions and remark; None: this version of kvbench does not have the finding."""

    @property
    def about(self) -> FindingResult:
        """Statement and source, as the first record has them."""
        return self.tested[0].result


@dataclass(frozen=True)
class RunFinding:
    """A finding that was tested on runs of the bundled models."""

    path: str
    about: FindingRecord


@dataclass(frozen=True)
class Findings:
    """The findings of a results folder."""

    on_texts: tuple[TextFinding, ...] = ()
    on_runs: tuple[RunFinding, ...] = ()
    records: tuple[FindingsRecord, ...] = ()
    runs: ShapeRecord | None = None
    problem: str | None = None
    """The reason why nothing can be shown."""


def read_pages(results: Path) -> Findings:
    """Read the findings below a results folder."""
    try:
        runs, records = read_findings(results), read_measured(results)
    except UserError as error:
        return Findings(problem=str(error))
    known = {x.name: x for x in find_findings("all")}
    tested: dict[str, list[Tested]] = {}
    for record in records:
        for x in record.findings:
            statement = known.get(x.name)
            chart = None if statement is None or statement.figure is None else draw_layers(x.means, statement.figure)
            tested.setdefault(x.name, []).append(Tested(record, x, chart))
    on_runs = () if runs is None else runs.findings
    text_paths, run_paths = _name_pages("texts", tested), _name_pages("runs", [x.name for x in on_runs])
    return Findings(
        tuple(TextFinding(text_paths[name], tuple(x), known.get(name)) for name, x in tested.items()),
        tuple(RunFinding(run_paths[x.name], x) for x in on_runs), records, runs,
    )


def _name_pages(kind: str, names: Iterable[str]) -> Mapping[str, str]:
    return {name: f"findings/{kind}-{page}.html" for name, page in name_pages(names).items()}


def draw_layers(means: Mapping[str, float | tuple[float, ...]], figure: Figure) -> LayerChart | None:
    """Draw the lines of a figure. Returns None if the record has none of them."""
    lines = {label: x for label, name in figure.lines.items() if isinstance(x := means.get(name), tuple) and x}
    if not lines:
        return None
    numbers = [x for line in lines.values() for x in line]
    low, high = min(0.0, *numbers), max(numbers)
    high = 1.0 if 0.5 < high <= 1 else high or 1.0
    last = max(len(x) for x in lines.values()) - 1

    def across(layer: int) -> float:
        return round(LEFT + (RIGHT - LEFT) * layer / max(1, last), 1)

    def up(number: float) -> float:
        return round(TOP + HEIGHT * (high - number) / (high - low), 1)

    points = {
        label: [Point(across(i), up(x), up(x), up(x)) for i, x in enumerate(line)] for label, line in lines.items()
    }
    return LayerChart(
        figure.title, figure.axis, make_curves(points, HEIGHT),
        tuple((across(x), str(x)) for x in _few(last)),
        tuple((up(x), f"{x:.2g}") for x in (low, (low + high) / 2, high)),
    )


def _few(last: int) -> Sequence[int]:
    """The first layer, one in the middle and the last one."""
    return list(dict.fromkeys((0, math.floor(last / 2), last)))
