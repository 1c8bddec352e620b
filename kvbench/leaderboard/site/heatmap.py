"""Heat maps of runs over a grid of lengths and depths, as static SVG."""

from __future__ import annotations

import functools
import json
from xml.etree import ElementTree as ET

from markupsafe import Markup

from kvbench.analysis.load import FinishedRun
from kvbench.machine import load_extra
from kvbench.report.charts import Spec
from kvbench.report.grid import draw_grid, list_scores, read_grid

WIDTH = 560
SVG = "{http://www.w3.org/2000/svg}"


def draw_heatmap(run: FinishedRun) -> Markup | None:
    """Draw scores by depth and length. Returns None if the run is not of a grid."""
    grid = read_grid(run)
    return None if grid is None else _render(draw_grid(grid, list_scores([grid])))


def _render(spec: Spec) -> Markup:
    """Render a chart as SVG with the page's colors. It holds numbers and our own words only."""
    root = ET.fromstring(_convert(json.dumps({**spec, "width": WIDTH})))  # noqa: S314  # made here
    for node in root.iter():
        for name in ("aria-label", "aria-roledescription", "role"):
            node.attrib.pop(name, None)
    root.remove(root[0])  # the white background
    root.attrib |= {"class": "chart cells", "role": "img", "aria-label": spec["description"]}
    ET.register_namespace("", SVG[1:-1])
    return Markup(ET.tostring(root, encoding="unicode"))  # noqa: S704  # its writer escaped what is text


@functools.lru_cache(maxsize=256)
def _convert(spec: str) -> str:
    """Cached, because a server rebuilds the site after each submission."""
    svg: str = load_extra("vl_convert", extra="report", what="kvbench leaderboard build").vegalite_to_svg(spec)
    return svg
