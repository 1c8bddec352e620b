"""Charts of the site as static SVG: score against measured size, one panel per family.

They are drawn when the site is built, so pages show them without a script, in print and in archives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvbench.analysis.metrics import Metric
from kvbench.leaderboard.site.tables import Group, RankedRun
from kvbench.report.charts import RANDOM
from kvbench.report.group import Axis
from kvbench.report.suggest import name_technique

LEFT, RIGHT, TOP = 30.0, 232.0, 10.0
"""Edges of a panel's plot."""
HEIGHT, LINE = 160.0, 13.0
"""Height of a plot, and of a line of text."""
TICKS = 1.0, 0.25, 0.1, 0.5, 0.05, 0.02, 0.01, 4.0, 2.0, 8.0, 16.0
"""Shares that the horizontal axis may label; the earlier ones go first where labels would collide."""
TICK_WIDTH = 36.0
"""Width of such a label."""
ROOM = 0.8
"""The left edge over the least size, so that the labels of both axes do not meet."""
LEAST_SIZE = 0.01
"""Smaller shares, such as 0, stand at the left edge."""
MOST_CURVES = 12
"""Techniques of a panel; a larger family has several panels, so that labels lie near their curves."""
STYLES = 8
"""Number of colors and of markers."""


@dataclass(frozen=True)
class Scale:
    """Where sizes and scores lie in the panels of one axis."""

    axis: Axis
    narrowest: float
    widest: float
    low: float
    high: float
    show: Callable[[float], float] = float
    """A score as it is shown."""

    @classmethod
    def of(cls, axis: Axis, rows: Iterable[RankedRun]) -> Scale:
        """The scale on which all rows fit, with room at the left; sizes at least from 0.4 to 1, scores from 0 to 1."""
        sizes, scores, show = [0.5, 1.0], [0.0, 1.0], cls.show
        for x in rows:
            score, size = x.result.score, axis.measure(x.result)
            if score.mean is not None and size is not None:
                sizes.append(size)
                scores += [score.mean, *(score.ci95 or ())]
                show = Metric.of(score).scale
        return cls(axis, max(LEAST_SIZE, ROOM * min(sizes)), max(sizes), min(scores), max(scores), show)

    def across(self, size: float) -> float:
        """Horizontal position of a size, on a logarithmic axis."""
        share = math.log(max(size, self.narrowest) / self.narrowest) / math.log(self.widest / self.narrowest)
        return round(LEFT + (RIGHT - LEFT) * share, 1)

    def up(self, score: float) -> float:
        """Vertical position of a score."""
        return round(TOP + HEIGHT * (self.high - score) / (self.high - self.low), 1)


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

    family: str
    title: str
    scale: Scale
    curves: tuple[Curve, ...]
    full: float | None
    """Vertical position of the full cache's score."""
    chance: tuple[CurvePoint, ...]
    """The method `random`, which every method should beat."""
    height: float = HEIGHT

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Positions and labels of the horizontal axis."""
        found: list[tuple[float, str]] = []
        for share in TICKS:
            place = self.scale.across(share)
            inside = self.scale.narrowest <= share <= self.scale.widest
            if inside and all(abs(place - other) >= TICK_WIDTH for other, _ in found):
                found.append((place, f"{share:.0%}"))
        return sorted(found)

    @property
    def levels(self) -> list[tuple[float, str]]:
        """Positions and labels of the vertical axis."""
        low, high = self.scale.low, self.scale.high
        return [(self.scale.up(x), f"{self.scale.show(x):.3g}") for x in (low, (low + high) / 2, high)]


def draw_families(group: Group, labels: Mapping[str, str]) -> list[tuple[Axis, list[Panel]]]:
    """The panels of each axis on one scale: one per family, or several, the best techniques first.

    labels: of techniques.
    """
    counted = [x for x in group.rows if x.listed.counted and x.result.status == "ok"]
    found = []
    for axis in (x.axis for x in group.tables):
        scale = Scale.of(axis, counted)
        rows = [x for x in counted if x not in group.anchors and axis.measure(x.result) is not None]
        families = sorted({x.result.method.family for x in rows})
        panels: list[Panel] = []
        for name in families:
            panels += _draw(name, scale, group, [x for x in rows if x.result.method.family == name], labels)
        found.append((axis, panels))
    return [(axis, panels) for axis, panels in found if panels]


def draw_method(group: Group, rows: Sequence[RankedRun], labels: Mapping[str, str]) -> list[Panel]:
    """The panels of one method under one protocol; none if no run has both numbers."""
    axis, name = Axis.of(rows[0].result), rows[0].result.method.name
    short = {key: label.removeprefix(name).strip() or name for key, label in labels.items()}
    return _draw("", Scale.of(axis, [*rows, *group.anchors]), group, rows, short)


def _draw(
    family: str, scale: Scale, group: Group, rows: Sequence[RankedRun], labels: Mapping[str, str]
) -> list[Panel]:
    techniques: dict[str, list[RankedRun]] = {}
    chance = [x for x in group.rows if x.result.method.name == RANDOM and x.listed.counted]
    if all(x in chance for x in rows):
        chance = []  # a panel of this method alone
    for x in (x for x in rows if x not in chance):
        if x.result.score.mean is not None and scale.axis.measure(x.result) is not None:
            label = labels.get(name_technique(x.result), x.label)
            techniques.setdefault(f"{label}{' (trained)' if x.result.budget.trained else ''}", []).append(x)
    placed = [(label, _place(some, scale)) for label, some in techniques.items()]
    higher = group.example.score.higher_is_better
    placed.sort(key=lambda x: ((-1 if higher else 1) * (x[1][-1].row.result.score.mean or 0.0), x[0]))
    count = -(-len(placed) // MOST_CURVES)
    full = next((x.result.score.mean for x in group.anchors), None)
    return [
        Panel(
            family, family if count == 1 else f"{family}, {part + 1} of {count}", scale,
            make_curves(dict(sorted(placed[part * len(placed) // count : (part + 1) * len(placed) // count])), HEIGHT),
            None if full is None else scale.up(full), _place(chance, scale),
        )
        for part in range(count)
    ]


def make_curves(lines: Mapping[str, Sequence[Point]], height: float, names: Sequence[str] = ()) -> tuple[Curve, ...]:
    """The curves of a chart of this height. names: a line's place among them, else in `lines`, decides its style."""
    order = names or list(lines)
    labels = spread([points[-1].y for points in lines.values()], LINE, TOP, TOP + height)
    return tuple(
        Curve(name, i % STYLES, (i + i // STYLES) % STYLES, tuple(points), y)
        for (name, points), y in zip(lines.items(), labels, strict=True) for i in (order.index(name),)
    )


def _place(rows: Iterable[RankedRun], scale: Scale) -> tuple[CurvePoint, ...]:
    """The points of runs that have both numbers, smallest first."""
    sized = ((x, scale.axis.measure(x.result), x.result.score) for x in rows)
    found = [
        (size, score.mean, score.ci95 or (score.mean, score.mean), x) for x, size, score in sized
        if size is not None and score.mean is not None
    ]
    return tuple(
        CurvePoint(scale.across(size), scale.up(mean), scale.up(low), scale.up(high), x)
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
