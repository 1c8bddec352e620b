"""`kvbench sweep`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvbench.cli.output import print_json
from kvbench.errors import UserError, unknown

if TYPE_CHECKING:
    from kvbench.runs.request import Request
    from kvbench.sweep.cell import CellReport, SweepCell

EXECUTORS = ("local", "ray")


def sweep_command(
    file: Annotated[Path, typer.Argument(help="A grid of runs in TOML; see docs/sweeps.md.")],
    *,
    executor: Annotated[str, typer.Option(help="local or ray.")] = "local",
    workers: Annotated[
        int | None, typer.Option(help="Cells at a time; default: 1, or all that a Ray cluster has room for.")
    ] = None,
    address: Annotated[str | None, typer.Option(help="HOST:PORT of a Ray cluster; default: one made here.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what there is to do and predict how long.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="End standard output with all cells as one JSON line.")
    ] = False,
) -> int:
    """Run every cell of a grid; again, it goes on where it stopped. Exit code 1 where a cell failed."""
    from kvbench.sweep.check import check_cells
    from kvbench.sweep.file import read_sweep

    if executor not in EXECUTORS:
        raise unknown("executor", executor, EXECUTORS)
    if workers is not None and workers < 1:
        raise UserError(f"workers {workers} must be 1 or more.")
    if address is not None and executor != "ray":
        raise UserError(f"--address {address} has no meaning for executor {executor}. Use --executor ray.")
    cells = read_sweep(file)
    check_cells(cells)
    if (workers or 1) > 1 and any(x.request.device_map is not None for x in cells):
        raise UserError("a cell with a device map may take every GPU there is. Use --workers 1.")
    if dry_run:
        return show_prediction(cells, workers or 1, as_json=as_json)
    reports = run_cells(cells, executor, workers, address)
    _print(reports)
    if as_json:
        print_json([x.document for x in reports])
    return 0 if all(x.status == "ok" for x in reports) else 1


def run_cells(
    cells: list[SweepCell], executor: str = "local", workers: int | None = None, address: str | None = None
) -> list[CellReport]:
    """Every cell's report, in the order of the file.

    Raises:
        InterruptedRunError: Ctrl-C, with how far the cells are.
        UserError: a cell's device, or Ray, cannot be used.
    """
    from kvbench.runs.runner import InterruptedRunError  # these import torch, which a wrong file need not wait for
    from kvbench.sweep.local import run_local
    from kvbench.sweep.progress import show_progress
    from kvbench.sweep.ray import connected, find_device, run_ray

    progress = None
    try:
        if executor == "ray":
            with connected(address):
                cells = _place(cells, find_device)
                with show_progress(cells) as progress:
                    run_ray(cells, workers, progress)
        else:
            cells = _place(cells)
            with show_progress(cells) as progress:
                run_local(cells, workers or 1, progress)
    except (KeyboardInterrupt, InterruptedRunError):
        done = "nothing was run" if progress is None else f"{progress.counts} are saved in {cells[0].request.out}"
        raise InterruptedRunError(f"interrupted: {done}. Run the same command to go on.") from None
    return [progress.reports[x.index] for x in cells]


def _place(cells: list[SweepCell], *how: Callable[[Request], str]) -> list[SweepCell]:
    """The cells with their devices; before they run, how small a difference they can find is said."""
    from kvbench.analysis.power import describe_powers
    from kvbench.log import say
    from kvbench.sweep.check import place_cells

    cells, plans = place_cells(cells, *how)
    for line in describe_powers(plans):
        say(line)
    return cells


def _print(reports: list[CellReport]) -> None:
    """One row per cell."""
    from kvbench.analysis.formatting import format_score, print_table

    rows = []
    for report in reports:
        result = report.result
        ratio = "-" if result is None or result.memory is None else f"{result.memory.ratio:.1%}"
        where = "-" if report.folder is None else str(report.folder)
        rows.append([
            report.cell.name, report.status, "-" if result is None else format_score(result), ratio,
            where if report.error is None else f"{where}: {report.error}",
        ])
    print_table("", ("cell", "", "score", "bytes held", "run"), rows)


def show_prediction(cells: list[SweepCell], workers: int, *, as_json: bool) -> int:
    """One row per cell with the time that it will take."""
    from kvbench.analysis.formatting import print_table
    from kvbench.sweep.predict import predict

    found = list(predict(_place(cells)))
    rows = []
    for x in found:
        shown = "finished" if x.missing == 0 else "-" if x.seconds is None else f"{x.seconds:.0f} s"
        rows.append([x.cell.name, str(x.missing), shown if x.error is None else f"FAILS: {x.error}"])
    print_table("", ("cell", "samples to run", "predicted"), rows)
    seconds = sum(x.seconds or 0.0 for x in found)
    typer.echo(
        f"{len(found)} cells, {sum(x.missing for x in found)} samples to run; predicted with the dense cache on this "
        f"machine: {seconds / workers:.0f} s with {workers} worker{'s' if workers > 1 else ''}."
    )
    if as_json:
        print_json([
            {"cell": x.cell.name, "run_id": None if x.folder is None else x.folder.name,
             "folder": None if x.folder is None else str(x.folder), "samples": x.cell.request.samples,
             "missing": x.missing, "predicted_s": x.seconds, "error": x.error}
            for x in found
        ])
    return 0 if all(x.error is None for x in found) else 1
