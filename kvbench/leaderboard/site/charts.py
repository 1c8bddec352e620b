"""Charts of the site as static SVG: score against measured size, one panel per family.

They are drawn when the site is built, so pages show them without a script, in print and in archives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvbench.leaderboard.site.tables import Group, RankedRun
from kvbench.report.charts import RANDOM
from kvbench.report.group import Axis
from kvbench.report.suggest import name_technique

LEFT, RIGHT, TOP, LABELS = 30.0, 232.0, 10.0, 246.0
"""Edges of a panel's plot, and where its labels begin."""
LEAST_HEIGHT, LINE = 160.0, 13.0
"""Height of a plot with few labels, and of a line of text."""
TICK = 0.5
"""Shares between the labels of the horizontal axis."""
STYLES = 8
"""Number of colors and of markers."""


@dataclass(frozen=True)
class Scale:
    """Where sizes and scores lie in the panels of one axis."""

    axis: Axis
    widest: float
    low: float
    high: float

    @classmethod
    def of(cls, axis: Axis, rows: Iterable[RankedRun]) -> Scale:
        """The scale on which all rows fit; sizes from 0 to at least 1, scores at least from 0 to 1."""
        sizes, scores = [1.0], [0.0, 1.0]
        for x in rows:
            score, size = x.result.score, axis.measure(x.result)
            if score.mean is not None and size is not None:
                sizes.append(size)
                scores += [score.mean, *(score.ci95 or ())]
        return cls(axis, max(sizes), min(scores), max(scores))

    def across(self, size: float) -> float:
        """Horizontal position of a size."""
        return round(LEFT + (RIGHT - LEFT) * size / self.widest, 1)

    def up(self, score: float, height: float) -> float:
        """Vertical position of a score in a plot of this height."""
        return round(TOP + height * (self.high - score) / (self.high - self.low), 1)


@dataclass(frozen=True)
class Point:
    """A value with its interval, in the coordinates of a chart."""

    x: float
    y: float
    low: float
    high: float


@dataclass(frozen=True)
class CurvePoint(Point):
    """A run in a panel."""

    row: RankedRun


@dataclass(frozen=True)
class Curve:
    """The points of one technique or policy, smallest first."""

    label: str
    color: int
    marker: int
    points: tuple[Point, ...]
    label_y: float


@dataclass(frozen=True)
class Panel:
    """A chart of a few techniques, with labels at its right edge."""

    title: str
    scale: Scale
    height: float
    curves: tuple[Curve, ...]
    full: float | None
    """Vertical position of the full cache's score."""
    chance: tuple[CurvePoint, ...]
    """The method `random`, which every method should beat."""

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Positions and labels of the horizontal axis."""
        step = TICK * max(1, round(self.scale.widest / (4 * TICK)))
        return [(self.scale.across(i * step), f"{i * step:.0%}") for i in range(int(self.scale.widest / step) + 1)]

    @property
    def levels(self) -> list[tuple[float, str]]:
        """Positions and labels of the vertical axis."""
        low, high = self.scale.low, self.scale.high
        return [(self.scale.up(x, self.height), f"{x:.3g}") for x in (low, (low + high) / 2, high)]


def draw_families(group: Group, labels: Mapping[str, str]) -> list[tuple[Axis, list[Panel]]]:
    """One panel per family and axis, all panels of an axis on one scale.

    labels: of techniques.
    """
    counted = [x for x in group.rows if x.listed.counted and x.result.status == "ok"]
    found = []
    for axis in (x.axis for x in group.tables):
        scale = Scale.of(axis, counted)
        rows = [x for x in counted if x not in group.anchors and axis.measure(x.result) is not None]
        families = sorted({x.result.method.family for x in rows})
        panels = [
            _draw(name, scale, group, [x for x in rows if x.result.method.family == name], labels) for name in families
        ]
        found.append((axis, [x for x in panels if x is not None]))
    return [(axis, panels) for axis, panels in found if panels]


def draw_method(group: Group, rows: Sequence[RankedRun], labels: Mapping[str, str]) -> Panel | None:
    """The panel of one method under one protocol. Returns None if no run has both numbers."""
    axis, name = Axis.of(rows[0].result), rows[0].result.method.name
    short = {key: label.removeprefix(name).strip() or name for key, label in labels.items()}
    return _draw("", Scale.of(axis, [*rows, *group.anchors]), group, rows, short)


def _draw(
    title: str, scale: Scale, group: Group, rows: Sequence[RankedRun], labels: Mapping[str, str]
) -> Panel | None:
    techniques: dict[str, list[RankedRun]] = {}
    chance = [x for x in group.rows if x.result.method.name == RANDOM and x.listed.counted]
    if all(x in chance for x in rows):
        chance = []  # a panel of this method alone
    for x in (x for x in rows if x not in chance):
        if x.result.score.mean is not None and scale.axis.measure(x.result) is not None:
            techniques.setdefault(labels.get(name_technique(x.result), x.label), []).append(x)
    if not techniques:
        return None
    height = max(LEAST_HEIGHT, LINE * len(techniques))
    placed = [(label, _place(some, scale, height)) for label, some in sorted(techniques.items())]
    heights = spread([points[-1].y for _, points in placed], LINE, TOP, TOP + height)
    full = next((x.result.score.mean for x in group.anchors), None)
    return Panel(
        title, scale, height,
        tuple(Curve(label, i % STYLES, (i + i // STYLES) % STYLES, points, y) for i, ((label, points), y) in enumerate(
            zip(placed, heights, strict=True)
        )),
        None if full is None else scale.up(full, height), _place(chance, scale, height),
    )


def _place(rows: Iterable[RankedRun], scale: Scale, height: float) -> tuple[CurvePoint, ...]:
    """The points of runs that have both numbers, smallest first."""
    sized = ((x, scale.axis.measure(x.result), x.result.score) for x in rows)
    found = [
        (size, score.mean, score.ci95 or (score.mean, score.mean), x) for x, size, score in sized
        if size is not None and score.mean is not None
    ]
    return tuple(
        CurvePoint(scale.across(size), scale.up(mean, height), scale.up(low, height), scale.up(high, height), x)
        for size, mean, (low, high), x in sorted(found, key=lambda x: (x[0], x[1]))
    )


def spread(wanted: Sequence[float], apart: float, top: float, bottom: float) -> list[float]:
    """Positions near the wanted ones that are at least `apart` from each other.

    They lie between top and bottom if there is space for all.
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    found = dict.fromkeys(order, 0.0)
    last = top - apart
    for i in order:
        last = found[i] = max(wanted[i], last + apart)
    last = bottom + apart
    for i in reversed(order):
        last = found[i] = min(found[i], last - apart)
    return [round(found[i], 1) for i in range(len(wanted))]
