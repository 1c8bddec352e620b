"""Charts as Vega-Lite specifications (through Altair): scores against bytes, against time, and by turn."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.analysis.formatting import format_share
from kvbench.analysis.metrics import Metric
from kvbench.analysis.shares import read_share, stored_share
from kvbench.machine import load_extra
from kvbench.report.group import GroupedRun, find_frontier
from kvbench.report.suggest import name_technique
from kvbench.runs.results import Result

Spec = dict[str, Any]
Point = dict[str, Any]

QUARTER = re.compile(r"-q([1-4])@")
"""In the id of a scorer: the quarter of the reference answer that it looks at."""
RANDOM = "random"
"""The method that keeps random entries; every method should score above its line."""
LABEL_SPACING = (0.12, 0.05)
"""Shares of a chart's width and height within which two labels would overlap."""
COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#666666", "#9a6324", "#b8a800"]
"""The colors of Okabe and Ito, safe for color-blind readers, and further ones for more families."""
TOOLTIP = {
    "label": "method", "family": "family", "shown": "score", "rank": "rank", "stored": "stored", "read": "read",
    "token": "per token", "first": "first token", "run": "run",
}


@dataclass(frozen=True)
class Cost:
    """A quantity against which scores are drawn."""

    name: str
    axis: str
    format: str
    """Number format of the axis, in d3 notation."""
    log: bool
    """Whether the axis is logarithmic if no cost is zero: methods store from a tenth of the full cache to three times
    as much, and most of them less than a half."""
    read: Callable[[Result], float | None]
    """Reads the number from a result; None: not measured."""


COSTS = (
    Cost("stored bytes", "stored bytes, share of the full cache", "~%", True, stored_share),
    Cost("bytes read", "bytes read per decode step, share of the full cache", "~%", True, read_share),
    Cost("time per token", "ms per output token (median)", ",~f", False, lambda x: _milli(x.latency.tpot_s)),
    Cost("time to first token", "ms to first token, compression included (median)", ",~f", False,
         lambda x: _milli(x.latency.ttft_s)),
    Cost("positions computed", "positions computed, share of those without a cache", ".0%", False,
         lambda x: None if x.diffusion is None else x.diffusion.computed_share),
)
"""Stored bytes and bytes read have separate charts and never share an axis."""


def draw_cost(entries: Sequence[GroupedRun], cost: Cost) -> Spec | None:
    """Draw scores against one cost for runs of one group. Returns None if fewer than two runs have both numbers.

    The Pareto frontier is drawn as a line and labeled. The full cache is a labeled dashed line, the method `random` a
    dotted one through its budgets.

    Raises:
        UserError: Altair is not installed.
    """
    rows = [x for x in entries if x.measured and cost.read(x.result) is not None]
    if len(rows) < 2:
        return None
    score = rows[0].result.score
    points = [_place(x, cost) for x in rows]
    best = find_frontier([(x["cost"], x["score"]) for x in points], higher_is_better=score.higher_is_better)
    ends = [end for x in points for end in (x["low"], x["high"])]
    families = tuple(sorted({x["family"] for x in points}))
    log, bounded = cost.log and all(x["cost"] > 0 for x in points), 0 <= min(ends) <= max(ends) <= 1
    named = _choose_labels([points[i] for i in reversed(best)], points, log=log)
    return _outline(cost, Metric.of(score).title, families, log=log, bounded=bounded) | {"datasets": {
        "rows": points, "frontier": [points[i] for i in best], **named,
        "full": [x for x, row in zip(points, rows, strict=True) if row.full][:1],
        "chance": [x for x in points if x["method"] == RANDOM],
    }}


@functools.cache
def _outline(cost: Cost, metric: str, families: tuple[str, ...], *, log: bool, bounded: bool) -> Spec:
    """The chart without its data; cached, because Altair is slow and groups with the same families share it."""
    alt = load_extra("altair", extra="report", what="a chart")
    scale = alt.Scale(domain=[0, 1]) if bounded else alt.Scale(zero=False)
    across = alt.Scale(type="log", base=2, nice=False, padding=20) if log else alt.Scale(zero=True)
    family = alt.selection_point(name="family", fields=["family"], bind="legend")
    method = alt.selection_point(name="method", fields=["method"], on="pointerover", empty=False)
    legend = alt.Legend(title=None, orient="bottom", columns=4, symbolOpacity=1)
    # The same domain for both, so that colors and shapes share a legend.
    color = alt.Color("family:N", scale=alt.Scale(domain=list(families), range=COLORS), legend=legend)
    shape = alt.Shape("family:N", scale=alt.Scale(domain=list(families)), legend=legend)

    def layer(name: str) -> Any:
        return alt.Chart(alt.NamedData(name)).encode(
            x=alt.X("cost:Q", title=cost.axis, axis=alt.Axis(format=cost.format, tickCount=6), scale=across),
            y=alt.Y("score:Q", title=f"{metric}, 95 % interval", scale=scale),
        )

    def fade(shown: float, hidden: float = 0.03) -> Any:
        return alt.when(family).then(alt.value(shown)).otherwise(alt.value(hidden))

    chart = alt.layer(
        layer("rows").mark_line(strokeWidth=1).encode(color=color, detail="technique:N", opacity=fade(0.3)),
        layer("rows").mark_line(strokeWidth=3).encode(
            color=color, detail="technique:N", opacity=alt.when(method).then(alt.value(1)).otherwise(alt.value(0))
        ),
        layer("rows").mark_rule(strokeWidth=1).encode(y="low:Q", y2="high:Q", color=color, opacity=fade(0.35)),
        alt.Chart(alt.NamedData("full")).mark_rule(strokeDash=[6, 4]).encode(y="score:Q"),
        alt.Chart(alt.NamedData("full")).mark_text(align="right", dx=-4, dy=-7, text="full cache").encode(
            x=alt.value("width"), y="score:Q"
        ),
        layer("chance").mark_line(strokeDash=[2, 3], color="#555"),
        layer("frontier").mark_line(interpolate="step-after", color="black", strokeWidth=1.5, opacity=0.6),
        layer("rows").mark_point(filled=True, size=55).encode(
            color=color, shape=shape, opacity=fade(0.9, 0.08),
            tooltip=[alt.Tooltip(f"{name}:N", title=title) for name, title in TOOLTIP.items()],
        ).add_params(family, method),
        layer("names").mark_text(align="left", dx=7, dy=10, fontWeight="bold", limit=150).encode(text="label:N"),
        layer("far").mark_text(align="right", dx=-7, dy=10, fontWeight="bold", limit=150).encode(text="label:N"),
    )
    return finish(widen(chart, f"{metric} against {cost.name}; the numbers are in the table."))


def _place(entry: GroupedRun, cost: Cost) -> Point:
    """A run as a point."""
    result = entry.result
    mean, ends = result.score.mean, result.score.ci95
    assert mean is not None, result.run_id
    metric = Metric.of(result.score)
    mean, low, high = (metric.scale(x) for x in (mean, *(ends or (mean, mean))))
    return {
        "label": entry.label, "method": result.method.name, "technique": name_technique(result),
        "family": result.method.family, "score": mean, "low": low,
        "high": high, "cost": cost.read(result), "run": result.run_id, "rank": entry.rank,
        "shown": f"{mean:.3f} [{low:.3f}, {high:.3f}]" if ends else f"{mean:.3f}, no interval",
        "stored": format_share(stored_share(result)), "read": format_share(read_share(result)),
        "token": _show(result.latency.tpot_s), "first": _show(result.latency.ttft_s),
    }


def _choose_labels(points: Sequence[Point], every: Sequence[Point], *, log: bool) -> dict[str, list[Point]]:
    """Points whose labels do not overlap, chosen in order: `names` to the right of their points, `far` to the left."""
    costs = [x["cost"] for x in every]
    left, right = (math.log(min(costs)), math.log(max(costs))) if log else (0.0, max(costs))
    high = max(1.0, *(x["score"] for x in every)) - min(0.0, *(x["score"] for x in every))

    def find_place(x: Point) -> tuple[float, float]:
        """Where the point is, as shares of the chart's width and height."""
        at = math.log(x["cost"]) if log else x["cost"]
        return (at - left) / ((right - left) or 1.0), x["score"] / high

    kept: list[Point] = []
    for x in points:
        if all(
            any(abs(a - b) > space for a, b, space in zip(find_place(x), find_place(y), LABEL_SPACING, strict=True))
            for y in kept
        ):
            kept.append(x)
    return {
        "names": [x for x in kept if find_place(x)[0] <= 0.6], "far": [x for x in kept if find_place(x)[0] > 0.6],
    }


def draw_turns(entries: Sequence[GroupedRun]) -> Spec | None:
    """Draw the mean score of each turn, one line of cells per run. Returns None if no run has more than one turn.

    Raises:
        UserError: Altair is not installed.
    """
    return _draw_cells("turn", "Mean score of each turn.", [
        {"label": x.label, "turn": turn, "score": Metric.of(x.result.score).scale(part.mean)}
        for x in entries if x.measured and len(x.result.score.by_turn) > 1
        for turn, part in enumerate(x.result.score.by_turn, 1) if part.mean is not None
    ])


def draw_quarters(entries: Sequence[GroupedRun]) -> Spec | None:
    """Draw the score of each quarter of the answer, one line of cells per run. Returns None if no task measures it.

    Raises:
        UserError: Altair is not installed.
    """
    return _draw_cells("quarter of the answer", "Mean score of each quarter of the reference answer.", [
        {"label": x.label, "quarter of the answer": int(found[1]), "score": score}
        for x in entries if x.measured for name, score in sorted(x.result.scores.items())
        if (found := QUARTER.search(name)) is not None
    ])


def draw_distances(entries: Sequence[GroupedRun]) -> Spec | None:
    """Draw the top-1 agreement by position in the answer, one line of cells per run. Returns None for short answers.

    Raises:
        UserError: Altair is not installed.
    """
    return _draw_cells("from token", "Top-1 agreement with the full cache, by position in the reference answer.", [
        {"label": x.label, "from token": part.start, "score": part.top1}
        for x in entries if x.result.status == "ok" and x.result.agreement is not None
        for part in x.result.agreement.by_distance
    ])


def _draw_cells(axis: str, about: str, cells: list[Point]) -> Spec | None:
    """One line of cells per label; the field `axis` is the column and `score` the number in the cell."""
    if not cells:
        return None
    alt = load_extra("altair", extra="report", what="a chart")
    labels = list(dict.fromkeys(x["label"] for x in cells))
    base = alt.Chart(alt.NamedData("cells")).encode(
        x=alt.X(f"{axis}:O", axis=alt.Axis(labelAngle=0, orient="top")),
        y=alt.Y("label:N", title=None, sort=labels, axis=alt.Axis(labelLimit=170)),
        tooltip=["label:N", f"{axis}:O", "score:Q"],
    )
    chart = color_cells(base, [x["score"] for x in cells])
    spec = finish(widen(chart.properties(height=15 * len(labels)), about))
    return spec | {"datasets": {"cells": cells}}


def color_cells(base: Any, scores: Sequence[float]) -> Any:
    """Color cells by the field `score`, light for high scores, and print the score in each.

    scores: all scores that share the color scale.
    """
    alt = load_extra("altair", extra="report", what="a chart")
    low, high = min([0.0, *scores]), max([1.0, *scores])
    dark = alt.datum.score < low + 0.6 * (high - low)
    return base.mark_rect().encode(
        color=alt.Color("score:Q", scale=alt.Scale(scheme="viridis", domain=[low, high]), legend=None)
    ) + base.mark_text(fontSize=10).encode(
        text=alt.Text("score:Q", format=".2f"),
        color=alt.when(dark).then(alt.value("white")).otherwise(alt.value("black")),
    )


def widen(chart: Any, about: str) -> Any:
    """Make a chart as wide as its container; `about` is its description for screen readers."""
    return chart.properties(width="container", description=about, autosize={"type": "fit-x", "contains": "padding"})


def finish(chart: Any) -> Spec:
    """Return the specification of a chart. Its data are added by name under `datasets`."""
    spec: Spec = chart.configure_view(strokeOpacity=0.3).configure_axis(
        labelFontSize=11, titleFontSize=11, titleFontWeight="normal"
    ).to_dict()
    return spec


def _milli(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def _show(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f} ms"
