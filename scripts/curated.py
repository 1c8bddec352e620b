"""The curated results, and the cells of a table that their runs stand in."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from pages import RESULTS

from kvbench.analysis.compare import compare_runs
from kvbench.analysis.load import FinishedRun, load_run
from kvbench.analysis.shares import fill_full_reads, read_share, stored_share
from kvbench.registry import find_method, refuse_unregistered
from kvbench.runs.results import Result

MINI, SMOLLM2, SMOLLM2_TASKS, LOSSLESS, TEXT, QWEN = (
    RESULTS / x
    for x in (
        "cpu-2-cores", "smollm2-135m", "smollm2-135m-tasks", "smollm2-135m-lossless", "smollm2-135m-text",
        "qwen2.5-coder-1.5b",
    )
)
ANCHORS = ("full", "full-int8")
SEEN = {"hidden": "question hidden", "first-turn": "first of five questions visible"}
QUARTER, HALF = "25%", "50%"
NEEDLES = "niah_multikey_1"
"""The task that the methods are compared on."""
Cell = tuple[str, int, str]
"""Task, length in tokens, visibility."""


@functools.cache
def read_runs(folder: Path) -> list[FinishedRun]:
    """Every run of the folder: anchors first, then by method, length, visibility, stored bytes and bytes read."""
    loaded = [load_run(x.parent) for x in folder.glob("*/result.json")]
    runs = fill_full_reads(loaded, loaded)
    names = {x.result.method.name for x in runs}
    for name in names:
        refuse_unregistered("method", name, "Remove the run.")
    order = [*ANCHORS, *sorted(names - set(ANCHORS))]

    def place(run: FinishedRun) -> tuple[int, int, str, float, float]:
        x = run.result
        return order.index(x.method.name), x.task.length, x.visibility, ratio(x), float(read(x)[:-1])

    return sorted(runs, key=place)


def read_results(folder: Path) -> list[Result]:
    """The results of the folder's runs, in their order."""
    return [x.result for x in read_runs(folder)]


def ratio(result: Result) -> float:
    """Stored bytes as a share of the full cache's, host memory included."""
    share = stored_share(result)
    assert share is not None, result.run_id
    return share


def read(result: Result) -> str:
    """Bytes that a decode step reads, as a share of those that the full cache reads."""
    share = read_share(result)
    assert share is not None, result.run_id
    return f"{share:.1%}"


def setting(result: Result) -> str:
    """The budget asked for, or the bits that come to one."""
    bits = [str(value) for name, value in result.method.settings.items() if name.endswith("_bits")]
    return result.budget.asked or (f"{'/'.join(bits)} bits" if bits else "-")


def score(result: Result) -> str:
    """Mean and interval."""
    mean, interval = result.score.mean, result.score.ci95
    assert mean is not None, result.run_id
    assert interval is not None, result.run_id
    return f"{mean:.2f} [{interval[0]:.2f}, {interval[1]:.2f}]"


def find_full(runs: Sequence[FinishedRun]) -> FinishedRun:
    """The run of the full cache, of which there is one."""
    (full,) = (x for x in runs if x.result.method.name == "full")
    return full


def mark_scores(runs: Sequence[FinishedRun], full: FinishedRun) -> dict[str, str]:
    """The score of every run of a column, by run id: bold if not significantly different from the full cache's.

    Italic if not significantly different from random eviction's; p-values are adjusted over the column.
    """
    marks = {x.result.run_id: "" for x in runs}
    (random,) = (x for x in runs if x.result.method.name == "random")
    for baseline, mark in ((full, "**"), (random, "*")):
        for x in compare_runs(baseline, [x for x in runs if x not in (baseline, full)]):
            assert not x.too_few, x.run_id
            marks[x.run_id] += mark if x.within_noise else ""
    return {x.result.run_id: f"{marks[x.result.run_id]}{score(x.result)}{marks[x.result.run_id]}" for x in runs}


def mark_cells(runs: Sequence[FinishedRun], cells: Sequence[Cell]) -> dict[str, str]:
    """As `mark_scores`, for the runs of each cell that have a quarter of the cache or a fixed size."""
    marked: dict[str, str] = {}
    for cell in cells:
        column = [x for x in runs if cell_of(x.result) == cell and x.result.budget.asked in (None, QUARTER)]
        marked |= mark_scores(column, find_full(column))
    return marked


def group_cells(results: Sequence[Result], budget: str = QUARTER) -> dict[str, dict[Cell, Result]]:
    """Runs with this budget or at the method's fixed size, by method and cell."""
    groups: dict[str, dict[Cell, Result]] = {}
    for x in results:
        if x.budget.asked in (None, budget):
            groups.setdefault(name_method(x), {})[cell_of(x)] = x
    return groups


def name_method(result: Result) -> str:
    """The method, with the bits that come to its size and other settings that are not its defaults."""
    kind, settings = find_method(result.method.name), result.method.settings
    changed = [f"{x} {y}" for x, y in settings.items() if not x.endswith("_bits") and getattr(kind, x) != y]
    bits = [] if result.budget.asked or setting(result) == "-" else [setting(result)]
    return ", ".join([result.method.name, *bits, *changed])


def cell_of(result: Result) -> Cell:
    """Where a run stands in a table."""
    return result.task.name, result.task.length, result.visibility


def order_cell(cell: Cell) -> tuple[bool, Cell]:
    """The needle task first."""
    return cell[0] != NEEDLES, cell


def list_cells(groups: Mapping[str, Mapping[Cell, Result]]) -> list[Cell]:
    """The cells that more than one method has, the needle task first."""
    counts = Counter(x for cells in groups.values() for x in cells)
    return sorted((x for x, count in counts.items() if count > 1), key=order_cell)
