"""How far a run is, on standard error: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from kvbench.runs.runner import Progress

EVERY = 5.0
"""Seconds between lines where there is no terminal."""


class Lines:
    """Progress as lines of a log."""

    def __init__(self, console: Console, total: int) -> None:
        self.console, self.total = console, total
        self.started = self.said = time.monotonic()
        self.first: int | None = None

    def advance(self, done: int) -> None:
        """So many samples are done."""
        current = time.monotonic()
        self.first = done - 1 if self.first is None else self.first
        if current - self.said < EVERY and done < self.total:
            return
        self.said = current
        left = (current - self.started) / (done - self.first) * (self.total - done)
        self.console.print(f"{done}/{self.total} samples, about {left:.0f} s left", highlight=False)


class Bar:
    """Progress as a bar with the time left."""

    def __init__(self, bar: RichProgress, total: int) -> None:
        self.bar, self.task = bar, bar.add_task("samples", total=total)

    def advance(self, done: int) -> None:
        """So many samples are done."""
        self.bar.update(self.task, completed=done)


@contextmanager
def show_progress(total: int) -> Iterator[Progress]:
    """A bar or lines, for as long as the run goes on."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield Lines(console, total)
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"),
        TimeRemainingColumn(),
    )
    with RichProgress(*columns, console=console, transient=True) as bar:
        yield Bar(bar, total)
