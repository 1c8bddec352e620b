"""`kvbench report`: write finished runs to an HTML page, or needle grids to a PNG."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvbench.cli.options import Baseline, Json, Out
from kvbench.cli.output import print_json
from kvbench.errors import UserError, unknown
from kvbench.log import say

if TYPE_CHECKING:
    from kvbench.report.grid import Grid
    from kvbench.report.group import GroupedRun

KINDS = (".png", ".html")


def report_command(
    runs: Annotated[
        list[str], typer.Argument(help="Ids or folders of runs, folders of suites, or folders with runs at any depth.")
    ],
    *,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="File to write: .html, or .png for runs of needle-grid.")
    ],
    baseline: Baseline = None,
    out: Out = Path("runs"),
    as_json: Json = False,
) -> None:
    """Write finished runs to one HTML file of tables and charts.

    Tables have ranks; charts show the score against bytes and time.
    """
    kind = output.suffix.lower()
    if kind not in KINDS:
        raise unknown("report format", output.suffix or str(output), KINDS, "Change the file name given with -o.")
    say("reading runs ...")
    from kvbench.analysis.doubts import group_doubts
    from kvbench.analysis.formatting import print_table
    from kvbench.analysis.load import load_runs
    from kvbench.analysis.metrics import Metric
    from kvbench.analysis.significance import describe_too_few
    from kvbench.cli.tables import group_cells
    from kvbench.report.grid import draw_picture, read_grid
    from kvbench.report.group import group_runs
    from kvbench.report.sections import name_groups, write_report
    from kvbench.runs.files import replace_file

    loaded = load_runs(runs, out)
    for run in loaded:
        if run.result.status == "failed":
            say(f"warning: {run.result.run_id} failed: {run.result.error}")
    found = [read_grid(x) for x in loaded]
    grids = [x for x in found if x is not None]
    if kind == ".png" and None in found:
        result = loaded[found.index(None)].result
        raise UserError(
            f"run {result.run_id} belongs to task {result.task.name}, which has no grid of lengths and depths. A .png "
            "shows runs of needle-grid only; use -o report.html for others."
        )
    groups = group_runs(loaded, baseline)
    content = draw_picture(grids) if kind == ".png" else write_report(groups, grids)
    try:
        replace_file(output.resolve(), content)
    except OSError as error:
        raise UserError(f"report '{output}' cannot be written: {error.strerror}. Give another path with -o.") from error
    for title, entries in zip(name_groups([x[0].result for x in groups]), groups, strict=True):
        columns, rows = group_cells(entries)
        print_table(f"{title}: {Metric.of(entries[0].result.score).title}", columns, rows)
        for doubt in group_doubts((x.label, x.result) for x in entries):
            say(f"warning: {doubt}")
        tested = [x.difference for x in entries if x.difference is not None and x.difference.p is not None]
        if tested and tested[0].too_few:
            say(describe_too_few(tested[0].contexts, len(tested)))
    for grid in grids:
        print_table("", (grid.name, ""), [("bytes", grid.size), ("score", grid.summary)])
    print_table("", ("file", str(output)), [("runs", str(len(loaded))), ("bytes", f"{len(content):,}")])
    if as_json:
        print_json({
            "file": str(output), "groups": [[_describe(x) for x in entries] for entries in groups],
            "grids": [_describe_grid(x) for x in grids],
        })


def _describe(entry: GroupedRun) -> dict[str, Any]:
    return {
        "run_id": entry.result.run_id, "label": entry.label, "rank": entry.rank, "status": entry.result.status,
        "score": entry.result.score.mean,
        "p_full": None if entry.difference is None else entry.difference.p_adjusted,
    }


def _describe_grid(grid: Grid) -> dict[str, Any]:
    return {
        "run_id": grid.result.run_id, "mean": grid.mean,
        "worst_row": None if grid.worst is None else {"depth": grid.worst[0], "mean": grid.worst[1]},
        "lengths": grid.lengths, "depths": grid.depths, "cells": grid.cells,
    }
