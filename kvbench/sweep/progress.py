"""Progress of a sweep on standard error: a bar on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from kvbench.log import say
from kvbench.runs.progress import EVERY
from kvbench.sweep.cell import CellReport, SweepCell


class SweepProgress:
    """State of all cells while they run, updated by the executors."""

    def __init__(self, cells: Sequence[SweepCell], show: Callable[[SweepProgress], None]) -> None:
        self.reports: dict[int, CellReport] = {}
        self.samples = {x.index: x.request.samples for x in cells}
        self.total = sum(self.samples.values())
        self.done = dict.fromkeys((x.index for x in cells), 0)
        """Saved samples by cell."""
        self._saved: dict[int, int] = {}
        """Samples that this sweep did not compute, by cell that has begun."""
        self._began: float | None = None
        self._show = show

    def receive(self, cell: SweepCell, message: int | str) -> None:
        """Handle a message of a cell: the number of its finished samples, or a log line."""
        if isinstance(message, str):
            say(f"{cell.name}: {message}")
            return
        if self._began is None:
            self._began = time.monotonic()  # the time before includes loading
        self._saved.setdefault(cell.index, message)  # the first count is that of an earlier run
        self.done[cell.index] = max(self.done[cell.index], message)  # counts from Ray may arrive after the report
        self._show(self)

    def finish(self, report: CellReport) -> None:
        """Record the report of a cell."""
        cell, done = report.cell, self.done[report.cell.index]
        self.reports[cell.index] = report
        if _is_saved(report):
            self._saved[cell.index] = cell.request.samples - (done - self._saved.get(cell.index, done))
            self.done[cell.index] = cell.request.samples
        what = "already finished" if report.existing else "done"
        self.receive(cell, what if report.status == "ok" else f"FAILED: {report.error}")
        self._show(self)

    @property
    def counts(self) -> str:
        """Saved cells and samples, as text; a cell without a result has those that were saved before it failed."""
        cells = sum(map(_is_saved, self.reports.values()))
        return f"{cells}/{len(self.samples)} cells, {sum(self.done.values())}/{self.total} samples"

    @property
    def left(self) -> str:
        """Estimated time left, as text; empty until every cell that has begun has computed a sample.

        The first of cells that share a prefill computes it for all.
        """
        missing = sum(n - self.done[cell] for cell, n in self.samples.items() if cell not in self.reports)
        computed = {cell: self.done[cell] - saved for cell, saved in self._saved.items()}
        waiting = any(not count for cell, count in computed.items() if cell not in self.reports)
        if self._began is None or waiting or not any(computed.values()) or not missing:
            return ""
        return f", about {(time.monotonic() - self._began) / sum(computed.values()) * missing:.0f} s left"


def _is_saved(report: CellReport) -> bool:
    """Whether all samples of a cell are saved: it has a result, of which single samples may have failed."""
    return report.status == "ok" or report.result is not None


@contextmanager
def show_progress(cells: Sequence[SweepCell]) -> Iterator[SweepProgress]:
    """The progress of a sweep, shown while the context is open."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield SweepProgress(cells, _Lines(console))
        return
    bar = Progress(TextColumn("{task.description}"), BarColumn(), console=console, transient=True)
    with bar:
        task = bar.add_task("", total=None)
        yield SweepProgress(cells, lambda x: bar.update(
            task, description=x.counts + x.left, completed=sum(x.done.values()), total=x.total
        ))


class _Lines:
    """Shows the progress as log lines."""

    def __init__(self, console: Console) -> None:
        self._console, self._said = console, time.monotonic()

    def __call__(self, progress: SweepProgress) -> None:
        if time.monotonic() - self._said >= EVERY or len(progress.reports) == len(progress.samples):
            self._said = time.monotonic()
            self._console.print(progress.counts + progress.left, highlight=False)
