"""`kvbench report`: finished runs as a picture or a page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvbench.cli.judge import Json, Out
from kvbench.cli.output import print_json
from kvbench.errors import UserError, unknown

if TYPE_CHECKING:
    from kvbench.heatmap import Grid
    from kvbench.page import Section

KINDS = (".png", ".html")


def report_command(
    runs: Annotated[list[str], typer.Argument(help="Folders or ids of runs of needle-grid.")],
    *,
    output: Annotated[Path, typer.Option("-o", "--output", help="The file to write: .png or .html.")],
    out: Out = Path("runs"),
    as_json: Json = False,
) -> None:
    """Draw the scores of runs by length and depth, to a file."""
    if output.suffix.lower() not in KINDS:
        raise unknown("kind of report", output.suffix or str(output), KINDS, "It is the end of the file's name.")
    from kvbench.compare import find_conflicts
    from kvbench.heatmap import draw_grids, read_grid
    from kvbench.log import say
    from kvbench.page import write_page
    from kvbench.runs import find_run, load_run
    from kvbench.table import print_rows

    loaded = [load_run(find_run(x, out)) for x in runs]
    grids = [read_grid(x) for x in loaded]
    for conflict in find_conflicts(loaded):
        say(f"warning: {conflict}")
    picture = draw_grids(grids)
    if output.suffix.lower() == ".html":
        alt = "Heat maps of scores by length and depth; the numbers are in the tables below."
        content = write_page("Scores by length and depth", picture, alt, [_describe(x) for x in grids]).encode()
    else:
        content = picture
    try:
        output.write_bytes(content)
    except OSError as error:
        raise UserError(f"report '{output}' cannot be written: {error.strerror}. Give another -o.") from error
    rows = [(x.name, x.size, x.summary, f"FAILED: {x.result.error}" if x.result.error else "ok") for x in grids]
    print_rows("", ("run", "bytes", "score", ""), [*rows, ("file", str(output), "", "")])
    if as_json:
        print_json([
            {
                "run_id": x.result.run_id, "mean": x.mean,
                "worst_row": None if x.worst is None else {"depth": x.worst[0], "mean": x.worst[1]},
                "lengths": x.lengths, "depths": x.depths, "cells": x.cells,
            }
            for x in grids
        ])


def _describe(grid: Grid) -> Section:
    """A grid as numbers."""
    from kvbench.page import Section

    result = grid.result
    what = f"{result.task.name} on {result.model.id}, scored by {result.score.metric}"
    return Section(
        heading=grid.name, lines=(what, grid.size, grid.summary),
        caption="Mean score by depth of the needle (rows) and tokens (columns)",
        columns=("", *(f"{x:,}" for x in grid.lengths)),
        rows=tuple(
            (f"{depth:.0f} %", *("-" if x is None else f"{x:.3f}" for x in row))
            for depth, row in zip(grid.depths, grid.cells, strict=True)
        ),
        failure=result.error,
    )
