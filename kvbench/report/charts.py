"""Charts as Vega-Lite specifications, made by Altair: what a group of rows scores against bytes, time and turns."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.extras import load_extra
from kvbench.report.group import Entry, find_frontier, held_share, read_share
from kvbench.runs.results import Result

Spec = dict[str, Any]
Point = dict[str, Any]

CHANCE = "random"
"""The method that keeps rows by chance: its line is what any other must be above."""
NEAR = (0.12, 0.05)
"""Shares of a chart's width and height within which a second name would cover the first."""
COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#666666", "#9a6324", "#b8a800"]
"""Apart for color-blind eyes too (Okabe and Ito), and more for more families."""
TOOLTIP = {
    "label": "row", "family": "family", "shown": "score", "rank": "rank", "held": "held", "read": "read",
    "token": "per token", "first": "first token", "run": "run",
}


@dataclass(frozen=True)
class Cost:
    """What a score is drawn against."""

    name: str
    axis: str
    format: str
    """Of the axis, as d3 writes it."""
    read: Callable[[Result], float | None]
    """Its number in a result; None: not measured."""


COSTS = (
    Cost("bytes held", "bytes held, share of the dense cache", ".0%", held_share),
    Cost("bytes read", "bytes that a decode step reads, share of the dense cache", ".0%", read_share),
    Cost("time per token", "ms per output token (median)", ",~f", lambda x: _milli(x.latency.tpot_s)),
    Cost("time to first token", "ms to the first token, compression included (median)", ",~f",
         lambda x: _milli(x.latency.ttft_s)),
    Cost("rows computed", "rows computed, share of those without a cache", ".0%",
         lambda x: None if x.diffusion is None else x.diffusion.computed_share),
)
"""Held and read bytes are costs of their own: they never share an axis."""


def draw_cost(entries: Sequence[Entry], cost: Cost) -> Spec | None:
    """Scores against one cost, of rows that may share a ranking; None: fewer than two rows have both.

    Rows that no other beats in both are joined and named. The full cache is a dashed line over the whole width, chance
    a dotted one through its budgets.

    Raises:
        UserError: Altair is not there.
    """
    rows = [x for x in entries if x.measured and cost.read(x.result) is not None]
    if len(rows) < 2:
        return None
    score = rows[0].result.score
    points = [_place(x, cost) for x in rows]
    best = find_frontier([(x["cost"], x["score"]) for x in points], higher_is_better=score.higher_is_better)
    ends = [end for x in points for end in (x["low"], x["high"])]
    families = tuple(sorted({x["family"] for x in points}))
    metric = score.metric if score.higher_is_better else f"{score.metric} (less is better)"
    return _outline(cost, metric, families, bounded=0 <= min(ends) <= max(ends) <= 1) | {"datasets": {
        "rows": points, "frontier": [points[i] for i in best], **_name([points[i] for i in reversed(best)], points),
        "full": [x for x, row in zip(points, rows, strict=True) if row.full][:1],
        "chance": [x for x in points if x["method"] == CHANCE],
    }}


@functools.cache
def _outline(cost: Cost, metric: str, families: tuple[str, ...], *, bounded: bool) -> Spec:
    """The chart without its data, which groups of the same families share: Altair takes its time."""
    alt = load_extra("altair", extra="report", what="a chart")
    scale = alt.Scale(domain=[0, 1]) if bounded else alt.Scale(zero=False)
    family = alt.selection_point(name="family", fields=["family"], bind="legend")
    method = alt.selection_point(name="method", fields=["method"], on="pointerover", empty=False)
    legend = alt.Legend(title=None, orient="bottom", columns=4, symbolOpacity=1)
    # The domain is said of both, so that colors and shapes share a legend.
    color = alt.Color("family:N", scale=alt.Scale(domain=list(families), range=COLORS), legend=legend)
    shape = alt.Shape("family:N", scale=alt.Scale(domain=list(families)), legend=legend)

    def layer(name: str) -> Any:
        return alt.Chart(alt.NamedData(name)).encode(
            x=alt.X("cost:Q", title=cost.axis, axis=alt.Axis(format=cost.format, tickCount=6), scale=alt.Scale(
                zero=True,
            )),
            y=alt.Y("score:Q", title=f"{metric}, 95 % interval", scale=scale),
        )

    def fade(shown: float, hidden: float = 0.03) -> Any:
        return alt.when(family).then(alt.value(shown)).otherwise(alt.value(hidden))

    chart = alt.layer(
        layer("rows").mark_line(strokeWidth=1).encode(color=color, detail="method:N", opacity=fade(0.3)),
        layer("rows").mark_line(strokeWidth=3).encode(
            color=color, detail="method:N", opacity=alt.when(method).then(alt.value(1)).otherwise(alt.value(0))
        ),
        layer("rows").mark_rule(strokeWidth=1).encode(y="low:Q", y2="high:Q", color=color, opacity=fade(0.35)),
        alt.Chart(alt.NamedData("full")).mark_rule(strokeDash=[6, 4]).encode(y="score:Q"),
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


def _place(entry: Entry, cost: Cost) -> Point:
    """A row as a point."""
    result = entry.result
    mean, ends = result.score.mean, result.score.ci95
    assert mean is not None, result.run_id
    low, high = ends or (mean, mean)
    held, read = held_share(result), read_share(result)
    return {
        "label": entry.label, "method": result.method.name, "family": result.method.family, "score": mean, "low": low,
        "high": high, "cost": cost.read(result), "run": result.run_id, "rank": entry.rank,
        "shown": f"{mean:.3f} [{low:.3f}, {high:.3f}]",
        "held": "-" if held is None else f"{held:.1%}", "read": "-" if read is None else f"{read:.1%}",
        "token": _show(result.latency.tpot_s), "first": _show(result.latency.ttft_s),
    }


def _name(points: Sequence[Point], every: Sequence[Point]) -> dict[str, list[Point]]:
    """Points whose names cover no other's, the first ones first; those far on the right have theirs on the left."""
    wide = max(x["cost"] for x in every) or 1.0
    high = max(1.0, *(x["score"] for x in every)) - min(0.0, *(x["score"] for x in every))
    kept: list[Point] = []
    for x in points:
        if all(abs(x["cost"] - y["cost"]) > NEAR[0] * wide or abs(x["score"] - y["score"]) > NEAR[1] * high
               for y in kept):
            kept.append(x)
    return {
        "names": [x for x in kept if x["cost"] <= 0.6 * wide], "far": [x for x in kept if x["cost"] > 0.6 * wide],
    }


def draw_turns(entries: Sequence[Entry]) -> Spec | None:
    """Mean score of each turn, a line of cells per row; None: no row has more than one turn.

    Raises:
        UserError: Altair is not there.
    """
    alt = load_extra("altair", extra="report", what="a chart")
    cells = [
        {"label": x.label, "turn": turn, "score": part.mean, "n": part.n}
        for x in entries if x.measured and len(x.result.score.by_turn) > 1
        for turn, part in enumerate(x.result.score.by_turn, 1) if part.mean is not None
    ]
    if not cells:
        return None
    labels = list(dict.fromkeys(x["label"] for x in cells))
    base = alt.Chart(alt.NamedData("cells")).encode(
        x=alt.X("turn:O", axis=alt.Axis(labelAngle=0, orient="top")),
        y=alt.Y("label:N", title=None, sort=labels, axis=alt.Axis(labelLimit=170)),
        tooltip=["label:N", "turn:O", "score:Q", "n:Q"],
    )
    chart = color_cells(base, [x.mean for entry in entries for x in entry.result.score.by_turn if x.mean is not None])
    spec = finish(widen(chart.properties(height=15 * len(labels)), "Mean score of each turn."))
    return spec | {"datasets": {"cells": cells}}


def color_cells(base: Any, scores: Sequence[float]) -> Any:
    """Cells colored by the field `score`, light where it is high, each with its number in it.

    scores: all that share the colors.
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
    """A chart as wide as its place on a page; `about`: what it shows, for those who cannot see it."""
    return chart.properties(width="container", description=about, autosize={"type": "fit-x", "contains": "padding"})


def finish(chart: Any) -> Spec:
    """The specification of a chart; its data come to it by name, in `datasets`."""
    spec: Spec = chart.configure_view(strokeOpacity=0.3).configure_axis(
        labelFontSize=11, titleFontSize=11, titleFontWeight="normal"
    ).to_dict()
    return spec


def _milli(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def _show(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f} ms"
