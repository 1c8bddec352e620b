"""Charts of the site as static SVG: one set per protocol, and a small curve per protocol for a method's page.

They are drawn when the site is built, so pages show them without a script, in print and in archives.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree as ET

from markupsafe import Markup

from kvbench.analysis.load import FinishedRun
from kvbench.extras import load_extra
from kvbench.leaderboard.site.pages import sanitize
from kvbench.leaderboard.site.tables import Group, RankedRun
from kvbench.report.charts import COSTS, Spec, draw_cost
from kvbench.report.grid import draw_grid, list_scores, read_grid
from kvbench.report.group import Axis, GroupedRun

WIDTH = 560
"""Pixels; two charts fit next to each other on a wide page."""
SVG = "{http://www.w3.org/2000/svg}"
CHARTS = {Axis.STORED: "stored bytes", Axis.READ: "bytes read", Axis.COMPUTED: "positions computed"}
"""The report's chart for each axis."""
BACKSLASH = "\N{REVERSE SOLIDUS OPERATOR}"
"""Looks like a backslash, without being an escape character."""
TITLE_FIELDS = ("method: ", "score: ", "stored: ", "read: ")
"""Fields of the report's tooltip that become the title of a point."""


def draw_group(group: Group) -> list[Markup]:
    """Draw scores against the measured saving, and against time if all runs are from one GPU."""
    wanted = {CHARTS[x.axis] for x in group.tables}
    if group.example.spec.device != "cpu" and len(group.machines) == 1:
        wanted.add("time per token")
    entries = [GroupedRun(x.result, x.label, x.rank, full=x in group.anchors)
               for x in group.rows if x.listed.counted]
    specs = [draw_cost(entries, x) for x in COSTS if x.name in wanted]
    runs = {_sanitize(x.result.run_id): f"runs/{x.listed.name}/index.html" for x in group.rows}
    return [_render(x, "points", runs) for x in specs if x is not None]


def draw_heatmap(run: FinishedRun) -> Markup | None:
    """Draw scores by depth and length. Returns None if the run is not of a grid."""
    grid = read_grid(run)
    return None if grid is None else _render(draw_grid(grid, list_scores([grid])), "cells", {})


def _render(spec: Spec, kind: str, runs: Mapping[str, str]) -> Markup:
    """Render a chart as SVG with the page's colors. A point gets a title and links to the page of its run."""
    spec = _sanitize(spec)
    root = ET.fromstring(_convert(json.dumps({**spec, "width": WIDTH})))  # noqa: S314  # made here
    for parent in list(root.iter()):
        for place, node in enumerate(parent):
            fields = node.attrib.pop("aria-label", "").split("; ")
            roles = node.attrib.pop("aria-roledescription", None), node.attrib.pop("role", None)
            page = runs.get(fields[-1].removeprefix("run: "))
            if roles[0] == "point" and page is not None:
                title = "; ".join(x for x in fields if x.startswith(TITLE_FIELDS))
                ET.SubElement(node, f"{SVG}title").text = title
                # Not in the tab order: the table has the same links.
                parent[place] = ET.Element(f"{SVG}a", {"href": page, "aria-label": title, "tabindex": "-1"})
                parent[place].append(node)
    root.remove(root[0])  # the white background
    root.attrib |= {"class": f"chart {kind}", "role": "group" if runs else "img", "aria-label": spec["description"]}
    ET.register_namespace("", SVG[1:-1])
    return Markup(ET.tostring(root, encoding="unicode"))  # noqa: S704  # its writer escaped what is text


def _sanitize(part: Any) -> Any:
    """Sanitize all strings of a specification, and replace backslashes.

    XML cannot hold every character, and Vega-Lite puts titles into expressions without escaping backslashes.
    """
    if isinstance(part, dict):
        return {key: _sanitize(value) for key, value in part.items()}
    if isinstance(part, list):
        return [_sanitize(x) for x in part]
    return sanitize(part).replace("\\", BACKSLASH) if isinstance(part, str) else part


@functools.lru_cache(maxsize=256)
def _convert(spec: str) -> str:
    """Cached, because a server rebuilds the site after each submission."""
    svg: str = load_extra("vl_convert", extra="report", what="kvbench leaderboard build").vegalite_to_svg(spec)
    return svg


@dataclass(frozen=True)
class CurvePoint:
    """A run in a small chart, in the chart's coordinates."""

    row: RankedRun
    x: float
    y: float
    low: float
    high: float


@dataclass(frozen=True)
class MethodCurve:
    """The curve of one method under one protocol."""

    group: Group
    axis: Axis
    points: tuple[CurvePoint, ...]
    full: float | None
    """Vertical position of the full cache's score."""
    ticks: tuple[tuple[float, str], ...]
    levels: tuple[tuple[float, str], ...]


LEFT, RIGHT, TOP, BOTTOM = 34.0, 298.0, 10.0, 150.0


def place_curve(group: Group, rows: Sequence[RankedRun]) -> MethodCurve | None:
    """Place the runs of one method by measured saving and score. Returns None if no run has both numbers."""
    axis = Axis.of(rows[0].result)
    sized = [(x, axis.measure(x.result), x.result.score) for x in rows]
    found = sorted(
        ((x, size, score.mean, score.ci95 or (score.mean, score.mean)) for x, size, score in sized
         if size is not None and score.mean is not None),
        key=lambda x: x[1],
    )
    if not found:
        return None
    full = next((x.result.score.mean for x in group.anchors), None)
    ends = [0.0, 1.0, *(end for *_, ci in found for end in ci), *([] if full is None else [full])]
    low, high, widest = min(ends), max(ends), max(1.0, *(size for _, size, *_ in found))

    def across(size: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * size / widest, 1)

    def up(score: float) -> float:
        return round(BOTTOM - (BOTTOM - TOP) * (score - low) / (high - low), 1)

    return MethodCurve(
        group, axis, tuple(CurvePoint(x, across(size), up(mean), up(ci[0]), up(ci[1])) for x, size, mean, ci in found),
        None if full is None else up(full), tuple((across(x), f"{x:.0%}") for x in (0.0, widest / 2, widest)),
        tuple((up(x), f"{x:.3g}") for x in (low, (low + high) / 2, high)),
    )
