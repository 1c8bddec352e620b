"""A page with hit rates over capacity, one line per policy; trace simulations only."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from kvbench.report.page import write_chart, write_page

NOTE = (
    "Trace simulation: hit rates of a cache that is simulated on recorded requests. No model ran, and no time was "
    "measured. The policy optimum looks at later requests; no policy can be above it. The dashed lines are two sizes "
    "to compare with: that of a cache which holds every distinct block once and so misses nothing twice, and that of "
    "the token ids alone, in 4 bytes each, from which all entries would be computed again."
)


def write_trace_page(trace: str, rows: Sequence[dict[str, Any]], bounds: Sequence[dict[str, Any]]) -> bytes:
    """A self-contained HTML page.

    rows: of `tabulate`. bounds: of `find_bounds`.

    Raises:
        UserError: a package of the extra `report` is missing.
    """
    names = ("policy", "blocks", "gigabytes", "block", "low", "high", "token", "request", "of_optimum", "evictions",
             "rejected")
    head = "".join(f'<th scope="col">{escape(x.replace("_", " "))}</th>' for x in names)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(_show(row[x]))}</td>" for x in names) + "</tr>" for row in rows
    )
    table = (
        f'<table class="rows"><caption>Trace simulation on {escape(trace)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )
    chart = write_chart(_draw(rows, bounds), "hit-rates", "Blocks found over blocks asked for; bands: 95 % over time")
    return write_page(f"Trace simulation: {trace}", f"<p>{escape(NOTE)}</p>\n{chart}\n{table}\n")


def _draw(rows: Sequence[dict[str, Any]], bounds: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """A Vega-Lite chart over finite capacities, with vertical lines; None where there is no line to draw."""
    points = [x for x in rows if x["blocks"] is not None]
    if len({x["blocks"] for x in points}) < 2:
        return None
    color = {"field": "policy", "type": "nominal", "title": "policy", "legend": {"symbolOpacity": 1}}
    x = {"field": "blocks", "type": "quantitative", "scale": {"type": "log"}, "title": "capacity in blocks"}
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json", "width": 640, "height": 380,
        "data": {"values": points},
        "layer": [
            {"mark": {"type": "area", "opacity": 0.12}, "encoding": {
                "x": x, "y": {"field": "low", "type": "quantitative"}, "y2": {"field": "high"}, "color": color,
            }},
            {"mark": {"type": "line", "point": True}, "encoding": {
                "x": x, "y": {"field": "block", "type": "quantitative", "title": "hit rate, blocks"}, "color": color,
            }},
            {"data": {"values": bounds}, "encoding": {"x": x}, "layer": [
                {"mark": {"type": "rule", "strokeDash": [6, 4], "color": "#555"}},
                {"mark": {"type": "text", "angle": 270, "align": "left", "dx": -370, "dy": -6}, "encoding": {
                    "text": {"field": "bound"}, "y": {"value": 0},
                }},
            ]},
        ],
    }


def _show(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if isinstance(value, float) else str(value)
