"""Runs over a grid of lengths and needle depths: read from their journals and drawn as heat maps."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from kvbench.analysis.formatting import format_bytes, format_share
from kvbench.analysis.load import FinishedRun
from kvbench.analysis.shares import read_share, stored_share
from kvbench.log import count
from kvbench.machine import load_extra
from kvbench.report.charts import Point, Spec, color_cells, finish, widen
from kvbench.report.group import VISIBILITIES
from kvbench.runs.journal import Answer
from kvbench.runs.results import Result

PLACE = "length", "depth"
"""Facts of a sample that give its cell."""
MAX_COLUMNS = 3
"""Maximum number of panels side by side."""
PIXELS_PER_LETTER = 5
"""Pixels per letter of a title."""

MAX_LENGTH = 2**31
"""Tokens of a sample; untrusted journals may hold larger values, which are ignored."""
MAX_DEPTH = 100
"""Percent of the context."""


@dataclass(frozen=True)
class Grid:
    """One run: a score for each depth (rows) and length (columns); None for a cell without a score."""

    result: Result
    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    cells: tuple[tuple[float | None, ...], ...]
    mean: float | None
    """Over the samples that have a score."""
    worst: tuple[float, float] | None
    """The depth with the worst mean score, and that mean."""

    @property
    def name(self) -> str:
        """Method, budget, visibility, and the end of the run id."""
        budget = "" if self.result.budget.asked is None else f" {self.result.budget.asked}"
        return f"{self.result.method.name}{budget}, {VISIBILITIES[self.result.visibility]} ({self.result.run_id[-12:]})"

    @property
    def size(self) -> str:
        """The measured bytes."""
        memory = self.result.memory
        if memory is None:
            return "no bytes measured"
        share = format_share(stored_share(self.result))
        text = f"stores {share} of the full cache, {format_bytes(memory.stored_bytes)}"
        for size, where in ((memory.host_bytes, "in host memory"), (memory.file_bytes, "in files")):
            text += f" and {format_bytes(size)} {where}" if size else ""
        if self.result.budget.kind == "read":
            text += f", {format_share(read_share(self.result))} read per step"
        return text

    @property
    def summary(self) -> str:
        """Mean score, worst depth, and the number of missing samples."""
        if self.mean is None or self.worst is None:
            return "no sample has a score"
        found, n = self.result.n_scored, self.result.n_samples
        over = count(n, "sample") if found == n else f"{found} of {n} samples"
        return f"mean {self.mean:.3f} of {over}, worst mean {self.worst[1]:.3f} at depth {self.worst[0]:.0f} %"


def read_grid(run: FinishedRun) -> Grid | None:
    """Read the grid of a finished run. Returns None if its samples do not form a grid."""
    places = {x.index: _place(x) for x in run.lines.values() if x.turn == 0}
    found = {x for x in places.values() if x is not None}
    lengths, depths = sorted({length for length, _ in found}), sorted({depth for _, depth in found})
    result = run.result
    if not found or None in places.values() or len(lengths) * len(depths) > result.n_samples:
        return None
    scores: dict[tuple[int, float], list[float]] = {}
    for line in run.lines.values():
        place = places.get(line.index)
        if place is not None and line.score is not None:
            scores.setdefault(place, []).append(line.score)
    every = [x for some in scores.values() for x in some]
    rows = [(depth, [x for length in lengths for x in scores.get((length, depth), [])]) for depth in depths]
    means = [(depth, fmean(some)) for depth, some in rows if some]
    pick = min if result.score.higher_is_better else max
    return Grid(
        result=result, lengths=tuple(lengths), depths=tuple(depths),
        cells=tuple(
            tuple(fmean(scores[length, depth]) if (length, depth) in scores else None for length in lengths)
            for depth in depths
        ),
        mean=fmean(every) if every else None, worst=pick(means, key=lambda x: x[1]) if means else None,
    )


def _place(line: Answer) -> tuple[int, float] | None:
    """Length and depth of a sample, if its facts contain both."""
    length, depth = (line.facts.get(x) for x in PLACE)
    if isinstance(length, bool) or isinstance(depth, bool):
        return None
    if isinstance(length, int) and 0 < length < MAX_LENGTH and isinstance(depth, int | float) and (
        0 <= depth <= MAX_DEPTH
    ):
        return length, float(depth)
    return None


def draw_cells(scores: Sequence[float]) -> Any:
    """Draw the cells of a grid as an Altair chart without data or width; `scores` share its color scale.

    Raises:
        UserError: Altair is not installed.
    """
    alt = load_extra("altair", extra="report", what="a heat map")
    base = alt.Chart().encode(
        x=alt.X("length:O", title="tokens", axis=alt.Axis(labelAngle=0, labelOverlap=True, format=",")),
        y=alt.Y("depth:O", title="depth of the needle, %", axis=alt.Axis(labelOverlap=True, format=".0f")),
        tooltip=["length:Q", "depth:Q", "score:Q"],
    )
    empty = base.mark_rect(color="#ddd") + base.mark_text(color="#555").transform_filter("datum.score === null").encode(
        text=alt.value("none")
    )
    return empty + color_cells(base, scores)


def draw_grid(grid: Grid, scores: Sequence[float]) -> Spec:
    """Draw a grid for a page."""
    alt = load_extra("altair", extra="report", what="a heat map")
    chart = draw_cells(scores).properties(data=alt.NamedData("cells"), height=max(150, 26 * len(grid.depths)))
    spec = finish(widen(chart, "Mean score by depth and length; the numbers are in the table."))
    return spec | {"datasets": {"cells": list_cells(grid)}}


def list_cells(grid: Grid) -> list[Point]:
    """List one point per cell."""
    return [
        {"length": length, "depth": depth, "score": score}
        for depth, row in zip(grid.depths, grid.cells, strict=True)
        for length, score in zip(grid.lengths, row, strict=True)
    ]


def list_scores(grids: Sequence[Grid]) -> list[float]:
    """List the scores of all grids."""
    return [x for grid in grids for row in grid.cells for x in row if x is not None]


def draw_picture(grids: Sequence[Grid]) -> bytes:
    """Draw a PNG with one panel per grid, all on one color scale.

    Raises:
        UserError: Altair or vl-convert is not installed.
    """
    alt, convert = (load_extra(x, extra="report", what="a picture") for x in ("altair", "vl_convert"))
    scores = list_scores(grids)
    panels = []
    for i, grid in enumerate(grids):
        wide = max(320, 40 * len(grid.lengths))
        lines = [grid.name, grid.size, grid.summary, *([f"FAILED: {grid.result.error}"] if grid.result.error else [])]
        text = [part for line in lines for part in textwrap.wrap(line, wide // PIXELS_PER_LETTER)]
        panels.append(draw_cells(scores).properties(
            data=alt.NamedData(str(i)), width=wide, height=max(150, 26 * len(grid.depths)),
            title=alt.Title(text, anchor="start", fontSize=11, fontWeight="normal"),
        ))
    across = -(-len(grids) // -(-len(grids) // MAX_COLUMNS))
    spec = finish(alt.concat(*panels, columns=across, spacing=30))
    data = {str(i): list_cells(x) for i, x in enumerate(grids)}
    picture: bytes = convert.vegalite_to_png(spec | {"datasets": data}, scale=2)
    return picture
