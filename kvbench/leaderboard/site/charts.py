"""Pictures of the site: the report's charts as plain SVG, and a small one of each protocol for a method's page.

They are drawn when the site is built: a page needs no script for them, and they are printed and archived with it.
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
from kvbench.leaderboard.site.pages import show_plain
from kvbench.leaderboard.site.tables import Axis, Group, Row
from kvbench.report.charts import COSTS, Spec, draw_cost
from kvbench.report.grid import draw_grid, list_scores, read_grid
from kvbench.report.group import Entry

WIDTH = 560
"""Two stand beside one another on a wide page."""
SVG = "{http://www.w3.org/2000/svg}"
CHARTS = {Axis.STORED: "bytes held", Axis.READ: "bytes read", Axis.COMPUTED: "rows computed"}
"""The report's charts by what is saved."""
BACKSLASH = "\N{REVERSE SOLIDUS OPERATOR}"
"""What looks like a backslash, and escapes nothing."""
TOLD = ("row: ", "score: ", "held: ", "read: ")
"""What a point says, of all that the report's chart has of it."""


def draw_group(group: Group) -> list[Markup]:
    """Scores against what its methods save, and on one GPU against time."""
    wanted = {CHARTS[x.axis] for x in group.tables}
    if group.example.spec.device != "cpu" and len(group.machines) == 1:
        wanted.add("time per token")
    entries = [Entry(x.result, x.label, x.rank, full=x in group.anchors) for x in group.rows]
    specs = [draw_cost(entries, x) for x in COSTS if x.name in wanted]
    runs = {_spell(x.result.run_id): f"runs/{x.entry.name}/index.html" for x in group.rows}
    return [_render(x, "points", runs) for x in specs if x is not None]


def draw_heatmap(run: FinishedRun) -> Markup | None:
    """Scores by depth and length; None: the run is not of a grid."""
    grid = read_grid(run)
    return None if grid is None else _render(draw_grid(grid, list_scores([grid])), "cells", {})


def _render(spec: Spec, kind: str, runs: Mapping[str, str]) -> Markup:
    """A chart as SVG that takes its colors from the page; a point of a run says what it is, and leads to its page."""
    spec = _spell(spec)
    root = ET.fromstring(_convert(json.dumps({**spec, "width": WIDTH})))  # noqa: S314  # made here
    for parent in list(root.iter()):
        for place, node in enumerate(parent):
            told = node.attrib.pop("aria-label", "").split("; ")
            roles = node.attrib.pop("aria-roledescription", None), node.attrib.pop("role", None)
            page = runs.get(told[-1].removeprefix("run: "))
            if roles[0] == "point" and page is not None:
                words = "; ".join(x for x in told if x.startswith(TOLD))
                ET.SubElement(node, f"{SVG}title").text = words
                # The table has the same links: with the keyboard nobody needs to pass all of these.
                parent[place] = ET.Element(f"{SVG}a", {"href": page, "aria-label": words, "tabindex": "-1"})
                parent[place].append(node)
    root.remove(root[0])  # the white ground
    root.attrib |= {"class": f"chart {kind}", "role": "group" if runs else "img", "aria-label": spec["description"]}
    ET.register_namespace("", SVG[1:-1])
    return Markup(ET.tostring(root, encoding="unicode"))  # noqa: S704  # its writer escaped what is text


def _spell(part: Any) -> Any:
    """A specification whose strings are as a page shows them, and without backslashes.

    XML cannot hold every character; and Vega-Lite writes titles into expressions, where it does not escape backslashes.
    """
    if isinstance(part, dict):
        return {key: _spell(value) for key, value in part.items()}
    if isinstance(part, list):
        return [_spell(x) for x in part]
    return show_plain(part).replace("\\", BACKSLASH) if isinstance(part, str) else part


@functools.lru_cache(maxsize=256)
def _convert(spec: str) -> str:
    """Drawn once in a process: a server builds the site again for every row that it gets."""
    svg: str = load_extra("vl_convert", extra="report", what="kvbench leaderboard build").vegalite_to_svg(spec)
    return svg


@dataclass(frozen=True)
class Point:
    """A row in a small chart, in its coordinates."""

    row: Row
    x: float
    y: float
    low: float
    high: float


@dataclass(frozen=True)
class Curve:
    """A method under one protocol."""

    group: Group
    axis: Axis
    points: tuple[Point, ...]
    dense: float | None
    """Height of the dense cache's score."""
    ticks: tuple[tuple[float, str], ...]
    levels: tuple[tuple[float, str], ...]


LEFT, RIGHT, TOP, BOTTOM = 34.0, 298.0, 10.0, 150.0


def trace(group: Group, rows: Sequence[Row]) -> Curve | None:
    """The rows of one method against what its budget saves; None: none of them has both numbers."""
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

    return Curve(
        group, axis, tuple(Point(x, across(size), up(mean), up(ci[0]), up(ci[1])) for x, size, mean, ci in found),
        None if full is None else up(full), tuple((across(x), f"{x:.0%}") for x in (0.0, widest / 2, widest)),
        tuple((up(x), f"{x:.3g}") for x in (low, (low + high) / 2, high)),
    )
