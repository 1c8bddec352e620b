"""Runs over a grid of lengths and depths: read from their journals, and drawn as heat maps."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from kvbench.errors import UserError
from kvbench.results import Answer, Result
from kvbench.runs import Run
from kvbench.table import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.colors import Normalize

ACROSS = 3
"""Most panels beside one another."""
TICKS = 16
"""Most labels of an axis, and most columns of cells that have their number in them."""
LETTERS = 15
"""Letters of a title per inch."""
MISSING = "0.85"
"""The grey of a cell without a score, which is hatched too."""


@dataclass(frozen=True)
class Grid:
    """One run: a score for each depth (rows) and length (columns), None where no sample of the cell has one."""

    result: Result
    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    cells: tuple[tuple[float | None, ...], ...]
    mean: float | None
    """Over the samples that have a score."""
    worst: tuple[float, float] | None
    """The depth whose samples did worst, and their mean."""
    @property
    def name(self) -> str:
        """What was run, and the end of the run's id."""
        budget = "" if self.result.budget.asked is None else f" {self.result.budget.asked}"
        return f"{self.result.method.name}{budget}, question {self.result.visibility} ({self.result.run_id[-12:]})"

    @property
    def size(self) -> str:
        """The measured bytes."""
        memory = self.result.memory
        if memory is None:
            return "no bytes measured"
        held = f"{memory.ratio_total:.1%} of the dense cache held, {format_bytes(memory.cache_bytes)}"
        if memory.host_bytes:
            held += f" and {format_bytes(memory.host_bytes)} in host memory"
        if self.result.budget.kind == "read":
            held += f", {memory.read_bytes_per_step / memory.dense_bytes:.1%} read per step"
        return held

    @property
    def summary(self) -> str:
        """Mean and worst row, and what is missing."""
        if self.mean is None or self.worst is None:
            return "no sample has a score"
        found, n = self.result.n_scored, self.result.n_samples
        over = f"{n} samples" if found == n else f"{found} of {n} samples"
        return f"mean {self.mean:.3f} of {over}, worst row {self.worst[1]:.3f} at depth {self.worst[0]:.0f} %"


def read_grid(run: Run) -> Grid:
    """The grid of a finished run.

    Raises:
        UserError: its samples are not of one.
    """
    places = {x.index: _place(x) for x in run.lines.values() if x.turn == 0}
    found = {x for x in places.values() if x is not None}
    lengths, depths = sorted({length for length, _ in found}), sorted({depth for _, depth in found})
    result = run.result
    if not found or None in places.values() or len(lengths) * len(depths) > result.n_samples:
        raise UserError(
            f"run {result.run_id} is of task {result.task.name}, which is no grid of lengths and depths. Reports show "
            "runs of needle-grid; use `kvbench compare` for others."
        )
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
    """Length and depth of a sample, where its facts name them."""
    length, depth = line.facts.get("length"), line.facts.get("depth")
    if type(length) is int and isinstance(depth, int | float) and math.isfinite(depth):
        return length, float(depth)
    return None


def draw_grids(grids: Sequence[Grid]) -> bytes:
    """A PNG with a panel for each grid, all on one scale of colours."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    values = [x for grid in grids for row in grid.cells for x in row if x is not None]
    norm = Normalize(min(0.0, *values, 0.0), max(1.0, *values, 1.0))
    down = math.ceil(len(grids) / ACROSS)
    across = math.ceil(len(grids) / down)
    wide = min(9.0, max(4.6, max(0.5 * len(x.lengths) for x in grids) + 1))
    high = min(7.0, max(0.32 * len(x.depths) for x in grids) + 1.5)
    figure = Figure(figsize=(across * wide + 1, down * high + 0.4), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False)
    for axes, grid in zip(panels.flat, grids, strict=False):
        _draw(axes, grid, norm, wide)
    for axes in panels.flat[len(grids) :]:
        axes.set_axis_off()
    scale = ScalarMappable(norm, "viridis")
    figure.colorbar(scale, ax=panels, label=f"mean {grids[0].result.score.metric}", shrink=0.8, aspect=30)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    return picture.getvalue()


def _draw(axes: Axes, grid: Grid, norm: Normalize, wide: float) -> None:
    from matplotlib.patches import Rectangle

    values = [[math.nan if x is None else x for x in row] for row in grid.cells]
    axes.pcolormesh(values, norm=norm, cmap="viridis", edgecolors="white", linewidth=0.5)
    axes.invert_yaxis()
    for y, row in enumerate(grid.cells):
        for x, value in enumerate(row):
            if value is None:
                axes.add_patch(Rectangle((x, y), 1, 1, facecolor=MISSING, edgecolor="0.5", hatch="////"))
            elif len(grid.lengths) <= TICKS:
                dark = norm(value) < 0.6
                color = "white" if dark else "black"
                axes.text(x + 0.5, y + 0.5, f"{value:.2f}", ha="center", va="center", size=7, color=color)
    _label(axes.xaxis, [f"{x:,}" for x in grid.lengths])
    _label(axes.yaxis, [f"{x:.0f}" for x in grid.depths])
    axes.set_xlabel("tokens")
    axes.set_ylabel("depth of the needle, %")
    lines = [grid.name, grid.size, grid.summary, *([f"FAILED: {grid.result.error}"] if grid.result.error else [])]
    text = "\n".join(part for line in lines for part in textwrap.wrap(line, int(wide * LETTERS)))
    axes.set_title(text, size=8.5, loc="left", parse_math=False)


def _label(axis: Axis, names: Sequence[str]) -> None:
    """The names of rows or columns; some of them where there are many."""
    every = -(-len(names) // TICKS)
    axis.set_ticks([i + 0.5 for i in range(0, len(names), every)], names[::every], size=8)
