"""Progress of a run on standard error: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

EVERY = 5.0
"""Seconds between lines if there is no terminal."""
Progress = Callable[[int], None]
"""Receives the number of finished samples; the first number is that of an earlier run."""


class LogProgress:
    """Progress as lines of a log."""

    def __init__(self, console: Console, total: int) -> None:
        self.console, self.total = console, total
        self.started = self.said = time.monotonic()
        self.first: int | None = None

    def __call__(self, done: int) -> None:
        """Report the number of finished samples."""
        current = time.monotonic()
        if self.first is None:
            self.first = done
        if done == self.first or (current - self.said < EVERY and done < self.total):
            return
        self.said = current
        left = (current - self.started) / (done - self.first) * (self.total - done)
        self.console.print(f"{done}/{self.total} samples, about {left:.0f} s left", highlight=False)


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
        task = bar.add_task("samples", total=total)
        yield lambda done: bar.update(task, completed=done)
