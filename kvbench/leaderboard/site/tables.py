"""Which rows stand together: one table per protocol and axis, in bands of like size, ranked within a band.

A rank of a method that keeps a tenth of the cache against one that keeps half would be a rank of budgets. Machines may
differ: what is ranked, answers and bytes, does not depend on them. Times do, and are not ranked.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from kvbench.analysis.compare import Difference, compare_runs, name_questions, rank_runs
from kvbench.leaderboard.site.entries import Entry
from kvbench.leaderboard.verification.lookup import is_known_full
from kvbench.report.group import held_share, label_results, read_share
from kvbench.runs.results import Result

EDGES = (0.15, 0.3, 0.6, 1.0)
"""Between bands, as shares of the dense cache: a round budget falls inside of one, with the bytes that come on top."""


class Axis(StrEnum):
    """What a method's budget saves; rows on different axes are never ranked together."""

    STORED = "stored"
    READ = "read"
    COMPUTED = "computed"

    @classmethod
    def of(cls, result: Result) -> Axis:
        """A diffusion policy's are rows that no pass computes; a method's whose budget is of reads, reads."""
        if result.model.kind == "diffusion":
            return cls.COMPUTED
        return cls.READ if result.budget.kind == "read" else cls.STORED

    def measure(self, result: Result) -> float | None:
        """The share of the dense cache's bytes, or of all rows; None: nothing was measured."""
        if self is Axis.COMPUTED:
            return None if result.diffusion is None else result.diffusion.computed_share
        return held_share(result) if self is Axis.STORED else read_share(result)


@dataclass(frozen=True)
class Row:
    """An entry among others of its protocol."""

    entry: Entry
    label: str
    """Method and budget, and what else tells it from the others."""
    difference: Difference | None
    """To the dense cache; None: it is the dense cache, there is none, or the row does not count."""
    rank: int | None = None
    """In its band; None: an anchor, failed, without a score, asked other questions than most of the band, or sent in
    and not verified."""
    tied: bool = False
    """Others have this rank too."""

    @property
    def result(self) -> Result:
        """What the run came to."""
        return self.entry.result


@dataclass(frozen=True)
class Band:
    """Rows of like size, the best first."""

    title: str
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Table:
    """The rows of one protocol on one axis."""

    axis: Axis
    bands: tuple[Band, ...]


@dataclass(frozen=True)
class Group:
    """All rows of one protocol."""

    key: str
    """Of its place on the page."""
    anchors: tuple[Row, ...]
    """Runs of the dense cache, first the one that differences are taken to."""
    tables: tuple[Table, ...]
    failed: tuple[Row, ...]

    @property
    def rows(self) -> list[Row]:
        """All of them, as they come on the page."""
        ranked = [row for table in self.tables for band in table.bands for row in band.rows]
        return [*self.anchors, *ranked, *self.failed]

    @property
    def example(self) -> Result:
        """Any of them, for what they have in common."""
        return self.rows[0].result

    @property
    def machines(self) -> list[str]:
        """Where they ran."""
        return sorted({name_machine(x.result) for x in self.rows})


def name_machine(result: Result) -> str:
    """Where it ran."""
    place = result.environment
    return place.gpu or f"{place.cpu}, {place.threads} thread{'s' if place.threads != 1 else ''}"


def make_groups(entries: Iterable[Entry]) -> list[Group]:
    """Every entry in the one group that it belongs to."""
    found: dict[str, list[Entry]] = {}
    for x in entries:
        found.setdefault(f"{name_questions(x.result.spec)} {x.result.latency.timing}", []).append(x)
    return sorted((_make_group(protocol, members) for protocol, members in found.items()), key=_order)


def _order(group: Group) -> tuple[object, ...]:
    x = group.example
    return (
        x.model.kind, x.model.id, x.task.suite, x.task.name, x.task.length, x.mode, x.visibility != "hidden",
        x.visibility, group.key,
    )


def _make_group(protocol: str, members: Sequence[Entry]) -> Group:
    members = sorted(members, key=lambda x: x.name)
    full = [x for x in members if x.counted and x.result.status == "ok" and is_known_full(x.result)]
    full.sort(key=lambda x: x.trust, reverse=True)
    others = [x for x in members if x.counted and x not in full[:1]]
    differences = compare_runs(full[0].run, [x.run for x in others]) if full else []
    to_full = {x.name: y for x, y in zip(others, differences, strict=False)}
    rows = [
        Row(x, label, to_full.get(x.name))
        for x, label in zip(members, label_results([x.result for x in members]), strict=True)
    ]
    by_axis: dict[Axis, list[Row]] = {}
    for x in rows:
        if x.result.status == "ok" and x.entry not in full:
            by_axis.setdefault(Axis.of(x.result), []).append(x)
    return Group(
        key=hashlib.sha256(protocol.encode()).hexdigest()[:8],
        anchors=tuple(row for x in full for row in rows if row.entry is x),
        tables=tuple(Table(axis, _make_bands(axis, by_axis[axis])) for axis in Axis if axis in by_axis),
        failed=tuple(x for x in rows if x.result.status == "failed"),
    )


def _make_bands(axis: Axis, rows: Sequence[Row]) -> tuple[Band, ...]:
    bands: dict[int, list[Row]] = {}
    for x in rows:
        size = axis.measure(x.result)
        bands.setdefault(len(EDGES) + 1 if size is None else sum(size > edge for edge in EDGES), []).append(x)
    return tuple(Band(_name_band(axis, band), _rank(axis, bands[band])) for band in sorted(bands))


def _name_band(axis: Axis, band: int) -> str:
    whole = "the rows" if axis is Axis.COMPUTED else "the dense cache"
    if band > len(EDGES):
        return "nothing measured"
    if band == len(EDGES):
        return f"{axis}: more than {whole}"
    low = f"{EDGES[band - 1]:.0%} to" if band else "up to"
    return f"{axis}: {low} {EDGES[band]:.0%} of {whole}"


def _rank(axis: Axis, rows: Sequence[Row]) -> tuple[Row, ...]:
    counted = [x for x in rows if x.entry.counted]
    ranks = rank_runs([x.entry.run for x in counted])
    count = Counter(ranks)
    ranked = [replace(x, rank=rank, tied=count[rank] > 1) for x, rank in zip(counted, ranks, strict=True)]
    return tuple(sorted([*ranked, *(x for x in rows if x not in counted)], key=lambda x: _best_first(axis, x)))


def _best_first(axis: Axis, row: Row) -> tuple[float, float, float, str]:
    score = row.result.score
    mean = (score.mean or 0.0) * (-1 if score.higher_is_better else 1)
    return math.inf if row.rank is None else row.rank, mean, axis.measure(row.result) or 0.0, row.entry.name
