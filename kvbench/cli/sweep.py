"""`kvbench sweep`: run a grid of runs from a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvbench.cli.output import echo, print_json
from kvbench.errors import MOST_INSTANCES, InterruptionError, UserError, check_number, unknown
from kvbench.log import count

if TYPE_CHECKING:
    from kvbench.runs.options import Request
    from kvbench.sweep.cell import CellReport, SweepCell

EXECUTORS = ("local", "ray")


def sweep_command(
    file: Annotated[Path, typer.Argument(help="Sweep file in TOML; see docs/sweeps.md.")],
    *,
    executor: Annotated[str, typer.Option(help="local or ray.")] = "local",
    workers: Annotated[
        int | None, typer.Option(
            help="Cells to run in parallel; default: 1, or as many as fit on the GPUs or the Ray cluster."
        )
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="HOST:PORT of a Ray cluster; default: start one on this machine.")
    ] = None,
    share_prefill: Annotated[
        bool, typer.Option("--share-prefill", help="Run each context's prefill once for all methods; gives no times.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the cells and predict their time; run nothing.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print all cells as one JSON line, last on standard output.")
    ] = False,
) -> int:
    """Run every cell of a sweep file. The same command resumes it. Exit code 1 if a cell failed."""
    from kvbench.sweep.check import check_cells
    from kvbench.sweep.file import read_sweep

    if executor not in EXECUTORS:
        raise unknown("executor", executor, EXECUTORS)
    if workers is not None:
        check_number("workers", workers, most=MOST_INSTANCES)
    if address is not None and executor != "ray":
        raise UserError(f"--address {address} has no effect with --executor {executor}. Use --executor ray.")
    cells = read_sweep(file)
    check_cells(cells)
    if (workers or 1) > 1 and any(x.request.device_map is not None for x in cells):
        raise UserError("a cell with a device map may use all GPUs. Use --workers 1.")
    if dry_run:
        return show_prediction(cells, workers or 1, share=share_prefill, as_json=as_json)
    reports = run_cells(cells, executor, workers, address, share=share_prefill)
    _print(reports)
    if as_json:
        print_json([x.document for x in reports])
    return 0 if all(x.status == "ok" for x in reports) else 1


def run_cells(
    cells: list[SweepCell], executor: str = "local", workers: int | None = None, address: str | None = None, *,
    share: bool = False,
) -> list[CellReport]:
    """Run the cells and return their reports in the same order. share: run the prefills of the same contexts once.

    Raises:
        InterruptionError: Ctrl-C; the message says how many cells are done.
        UserError: a cell's device, or Ray, cannot be used.
    """
    from kvbench.sweep.local import run_local  # these import torch; the file is checked first
    from kvbench.sweep.progress import show_progress
    from kvbench.sweep.ray import connected, find_device, run_ray

    progress = None
    try:
        if executor == "ray":
            with connected(address):
                cells = _place(cells, find_device)
                with show_progress(cells) as progress:
                    run_ray(cells, workers, progress, share=share)
        else:
            cells = _place(cells)
            with show_progress(cells) as progress:
                run_local(cells, workers, progress, share=share)
    except (KeyboardInterrupt, InterruptionError):
        done = "nothing was run" if progress is None else f"saved {progress.counts} in {cells[0].request.out}"
        raise InterruptionError(f"interrupted: {done}. Run the same command to continue.") from None
    return [progress.reports[x.index] for x in cells]


def _place(cells: list[SweepCell], *how: Callable[[Request], str]) -> list[SweepCell]:
    """The cells with their devices; logs their minimum detectable effect."""
    from kvbench.analysis.power import describe_powers
    from kvbench.log import say
    from kvbench.sweep.check import place_cells

    cells, plans = place_cells(cells, *how)
    for line in describe_powers(plans):
        say(line)
    return cells


def _print(reports: list[CellReport]) -> None:
    """Print one row per cell."""
    from kvbench.analysis.formatting import format_score, format_share, print_table
    from kvbench.analysis.shares import stored_share
    from kvbench.runs.spec import shorten

    rows = []
    for report in reports:
        result = report.result
        stored = "-" if result is None else format_share(stored_share(result))
        where = None if report.folder is None else shorten(report.folder.name)
        rows.append([
            report.cell.name, report.status, "-" if result is None else format_score(result), stored,
            ": ".join(filter(None, [where, report.error])),
        ])
    print_table("", ("cell", "", "score", "stored", "run"), rows)


def show_prediction(cells: list[SweepCell], workers: int, *, share: bool = False, as_json: bool) -> int:
    """Print the predicted time of every cell; exit code 1 if a cell cannot run. share: as in `run_cells`."""
    from kvbench.analysis.formatting import print_table
    from kvbench.log import say_progress
    from kvbench.sweep.predict import predict

    predictions = say_progress(predict(_place(cells)), lambda number: f"predicted {number} of {len(cells)} cells")
    found = list(predictions)
    rows = []
    for x in found:
        shown = "finished" if x.missing == 0 else "-" if x.seconds is None else f"{x.seconds:.0f} s"
        rows.append([x.cell.name, str(x.missing), shown if x.error is None else f"FAILS: {x.error}"])
    print_table("", ("cell", "samples to run", "predicted"), rows)
    seconds = sum(x.seconds or 0.0 for x in found)
    failing = sum(x.error is not None for x in found)
    total = count(len(found), "cell") + (f", {failing} of them failing" if failing else "")
    missing = count(sum(x.missing for x in found if x.error is None), "sample")
    echo(
        f"{total}, {missing} to run; predicted time {seconds / workers:.0f} s with {count(workers, 'worker')} "
        f"(measured with the full cache on this machine{', each method with its own prefill' if share else ''})."
    )
    if as_json:
        print_json([
            {"cell": x.cell.name, "run_id": None if x.folder is None else x.folder.name,
             "folder": None if x.folder is None else str(x.folder), "samples": x.cell.request.samples,
             "missing": x.missing, "predicted_s": x.seconds, "error": x.error}
            for x in found
        ])
    return 0 if all(x.error is None for x in found) else 1
