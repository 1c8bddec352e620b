"""Progress of a run on standard error: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

EVERY = 5.0
"""Seconds between lines if there is no terminal."""


class Progress(Protocol):
    """Receives the progress of a run."""

    def advance(self, done: int) -> None:
        """Report the number of finished samples; the first is that of an earlier run."""


class LogProgress:
    """Progress as lines of a log."""

    def __init__(self, console: Console, total: int) -> None:
        self.console, self.total = console, total
        self.started = self.said = time.monotonic()
        self.first: int | None = None

    def advance(self, done: int) -> None:
        """Report the number of finished samples."""
        current = time.monotonic()
        if self.first is None:
            self.first = done
        if done == self.first or (current - self.said < EVERY and done < self.total):
            return
        self.said = current
        left = (current - self.started) / (done - self.first) * (self.total - done)
        self.console.print(f"{done}/{self.total} samples, about {left:.0f} s left", highlight=False)


class Bar:
    """Progress as a bar with the time left."""

    def __init__(self, bar: RichProgress, total: int) -> None:
        self.bar, self.task = bar, bar.add_task("samples", total=total)

    def advance(self, done: int) -> None:
        """Report the number of finished samples."""
        self.bar.update(self.task, completed=done)


@contextmanager
def show_progress(total: int) -> Iterator[Progress]:
    """Show a bar or lines during a run of `total` samples."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield LogProgress(console, total)
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"),
        TimeRemainingColumn(),
    )
    with RichProgress(*columns, console=console, transient=True) as bar:
        yield Bar(bar, total)
