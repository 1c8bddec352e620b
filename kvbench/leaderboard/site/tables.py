"""Groups runs into tables: one per protocol and axis, in bands of similar size, ranked within a band.

Ranking a method that keeps a tenth of the cache against one that keeps half would rank budgets. Runs of different
machines share a table, because bytes do not depend on the machine, and answers hardly do. Times do, so they are not
ranked.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kvbench.analysis.compare import Difference, compare_runs, name_questions, rank_runs
from kvbench.leaderboard.site.listed import ListedRun
from kvbench.leaderboard.verification.lookup import is_known_full
from kvbench.log import count
from kvbench.report.group import EDGES, Axis, find_band, label_results
from kvbench.report.suggest import explain_failing
from kvbench.runs.results import TASKS, Result

UNRANKED = "not ranked: answers or bytes are not verified, the method is not registered, or the weights differ"
"""Title of the band of runs that are not counted."""

TRAINED = f"not ranked: trained on {TASKS}"
"""Title of the band of runs with trained parts, which methods without training are not compared with."""


@dataclass(frozen=True)
class RankedRun:
    """A run among others of its protocol; one row of a table."""

    listed: ListedRun
    label: str
    """Method, budget, and the settings that distinguish it from the other runs."""
    difference: Difference | None
    """To the full cache; None: it is the full cache, there is none, or the run is not counted."""
    rank: int | None = None
    """Within its band; None: full cache, failed, without a score, on other questions than most of the band, not
    counted, trained on the tasks, too few contexts to tell, or a full cache that fails the task.
    """
    tied: bool = False
    """Whether others share the rank."""

    @property
    def result(self) -> Result:
        """The run's result."""
        return self.listed.result


@dataclass(frozen=True)
class Band:
    """Runs of similar size, best first."""

    title: str
    rows: tuple[RankedRun, ...]


@dataclass(frozen=True)
class AxisTable:
    """The runs of one protocol on one axis."""

    axis: Axis
    bands: tuple[Band, ...]


@dataclass(frozen=True)
class Group:
    """All runs of one protocol."""

    key: str
    """Anchor on the page."""
    anchors: tuple[RankedRun, ...]
    """Runs of the full cache; differences are taken to the first."""
    tables: tuple[AxisTable, ...]
    failed: tuple[RankedRun, ...]

    @property
    def rows(self) -> list[RankedRun]:
        """All runs in page order."""
        ranked = [row for table in self.tables for band in table.bands for row in band.rows]
        return [*self.anchors, *ranked, *self.failed]

    @property
    def example(self) -> Result:
        """Any of the runs, for the fields that they share."""
        return self.rows[0].result

    @property
    def machines(self) -> list[str]:
        """Machines on which the runs were made."""
        return sorted({name_machine(x.result) for x in self.rows})

    @property
    def usual_machine(self) -> str:
        """The machine of most runs; rows name any other."""
        return Counter(name_machine(x.result) for x in self.rows).most_common(1)[0][0]


def name_machine(result: Result) -> str:
    """GPU, or CPU and threads, of a run."""
    place = result.environment
    return place.gpu or f"{place.cpu}, {count(place.threads, 'thread')}"


def make_groups(runs: Iterable[ListedRun]) -> list[Group]:
    """Sort the runs into groups by protocol."""
    found: dict[str, list[ListedRun]] = {}
    for x in runs:
        found.setdefault(f"{name_questions(x.result.spec)} {x.result.latency.timing}", []).append(x)
    return sorted((_make_group(protocol, members) for protocol, members in found.items()), key=_order)


def _order(group: Group) -> tuple[object, ...]:
    x = group.example
    return (
        x.model.kind, x.model.id, x.task.suite, x.task.name, x.task.length, x.mode, x.visibility != "hidden",
        x.visibility, group.key,
    )


def _make_group(protocol: str, members: Sequence[ListedRun]) -> Group:
    members = sorted(members, key=lambda x: x.name)
    full = [x for x in members if x.counted and x.result.status == "ok" and is_known_full(x.result)]
    full.sort(key=lambda x: x.priority, reverse=True)
    others = [x for x in members if x.counted and x not in full[:1]]
    differences = compare_runs(full[0].run, [x.run for x in others]) if full else []
    to_full = {x.name: y for x, y in zip(others, differences, strict=False)}
    rows = [
        RankedRun(x, label, to_full.get(x.name))
        for x, label in zip(members, label_results([x.result for x in members]), strict=True)
    ]
    by_axis: dict[Axis, list[RankedRun]] = {}
    for x in rows:
        if x.result.status == "ok" and x.listed not in full:
            by_axis.setdefault(Axis.of(x.result), []).append(x)
    ranked = not full or explain_failing(full[0].result) is None
    return Group(
        key=hashlib.sha256(protocol.encode()).hexdigest()[:8],
        anchors=tuple(row for x in full for row in rows if row.listed is x),
        tables=tuple(
            AxisTable(axis, _make_bands(axis, by_axis[axis], ranked=ranked)) for axis in Axis if axis in by_axis
        ),
        failed=tuple(x for x in rows if x.result.status == "failed"),
    )


def _make_bands(axis: Axis, rows: Sequence[RankedRun], *, ranked: bool) -> tuple[Band, ...]:
    bands: dict[int, list[RankedRun]] = {}
    for x in (x for x in rows if x.listed.counted and not x.result.budget.trained):
        size = axis.measure(x.result)
        bands.setdefault(len(EDGES) + 1 if size is None else find_band(size), []).append(x)
    counted = [Band(_name_band(axis, band), _rank(axis, bands[band], ranked=ranked)) for band in sorted(bands)]
    trained, others = (
        tuple(sorted((x for x in rows if belongs(x)), key=lambda x: _best_first(axis, x)))
        for belongs in (lambda x: x.listed.counted and x.result.budget.trained, lambda x: not x.listed.counted)
    )
    return (*counted, *(Band(title, some) for title, some in ((TRAINED, trained), (UNRANKED, others)) if some))


def _name_band(axis: Axis, band: int) -> str:
    whole = "all positions" if axis is Axis.COMPUTED else "the full cache"
    if band > len(EDGES):
        return "nothing measured"
    if band == len(EDGES):
        return f"{axis}: more than {whole}"
    low = f"{EDGES[band - 1]:.0%} to" if band else "up to"
    return f"{axis}: {low} {EDGES[band]:.0%} of {whole}"


def _rank(axis: Axis, rows: Sequence[RankedRun], *, ranked: bool) -> tuple[RankedRun, ...]:
    ranks = rank_runs([x.listed.run for x in rows]) if ranked else [None] * len(rows)
    count = Counter(ranks)
    placed = [
        replace(x, rank=rank, tied=rank is not None and count[rank] > 1) for x, rank in zip(rows, ranks, strict=True)
    ]
    return tuple(sorted(placed, key=lambda x: _best_first(axis, x)))


def _best_first(axis: Axis, row: RankedRun) -> tuple[float, float, float, str]:
    score = row.result.score
    mean = (score.mean or 0.0) * (-1 if score.higher_is_better else 1)
    return math.inf if row.rank is None else row.rank, mean, axis.measure(row.result) or 0.0, row.listed.name
