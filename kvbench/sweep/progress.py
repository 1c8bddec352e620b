"""How far a whole grid is, on standard error: a bar on a terminal, a line now and then elsewhere."""

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
    """What is known of the cells while they run; executors write on it."""

    def __init__(self, cells: Sequence[SweepCell], show: Callable[[SweepProgress], None]) -> None:
        self.reports: dict[int, CellReport] = {}
        self.total = sum(x.request.samples for x in cells)
        self.cells = len(cells)
        self.done = dict.fromkeys((x.index for x in cells), 0)
        """Samples by cell."""
        self._new = 0
        self._first = 0.0
        self._show = show

    def hear(self, cell: SweepCell, message: int | str) -> None:
        """One more sample of a cell was run, which makes so many; or a line of its log."""
        if isinstance(message, str):
            say(f"{cell.name}: {message}")
            return
        self._new += 1
        if self._new == 1:
            self._first = time.monotonic()  # the time before it went into loading
        self.done[cell.index] = max(self.done[cell.index], message)  # Ray's counts may come after the report
        self._show(self)

    def finish(self, report: CellReport) -> None:
        """A cell is over."""
        cell = report.cell
        self.reports[cell.index] = report
        self.done[cell.index] = cell.request.samples
        what = "was finished before" if report.existing else "done"
        self.hear(cell, what if report.status == "ok" else f"FAILED: {report.error}")
        self._show(self)

    @property
    def counts(self) -> str:
        """What is over."""
        return f"{len(self.reports)}/{self.cells} cells, {sum(self.done.values())}/{self.total} samples"

    @property
    def left(self) -> str:
        """How long the rest will take at the pace so far; nothing where there is none."""
        missing = self.total - sum(self.done.values())
        if self._new < 2 or not missing:
            return ""
        return f", about {(time.monotonic() - self._first) / (self._new - 1) * missing:.0f} s left"


@contextmanager
def show_progress(cells: Sequence[SweepCell]) -> Iterator[SweepProgress]:
    """A progress that is seen for as long as the sweep goes on."""
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
    """The progress as lines of a log."""

    def __init__(self, console: Console) -> None:
        self._console, self._said = console, time.monotonic()

    def __call__(self, progress: SweepProgress) -> None:
        if time.monotonic() - self._said >= EVERY or len(progress.reports) == progress.cells:
            self._said = time.monotonic()
            self._console.print(progress.counts + progress.left, highlight=False)
