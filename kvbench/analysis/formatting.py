"""Formats numbers, and prints tables on standard output."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from kvbench.analysis.metrics import Metric

if TYPE_CHECKING:
    from kvbench.analysis.compare import Difference
    from kvbench.runs.results import Result, Score

WIDEST = 200
"""Most characters per line of a table that goes to a file or a pipe."""


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table on standard output; cells are folded, never truncated, and names stay on one line."""
    table = Table(title=title or None, title_justify="left", header_style="bold")
    for name in columns:
        table.add_column(name, overflow="fold", no_wrap=name == "name" and len(columns) > 1)
    for row in rows:
        table.add_row(*map(_printable, row))
    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        widest = Console(width=WIDEST).measure(table).maximum
        console = Console(markup=False, highlight=False, width=widest)
    console.print(table)


def print_list(columns: Sequence[str], groups: Mapping[str, Sequence[Sequence[str]]], *, cut: bool = False) -> None:
    """Print rows on standard output under the headings of their groups, without rules, one line per row if it fits.

    groups: rows by heading.
    cut: the last cell ends where the terminal does, instead of continuing on the next line.
    """
    console = Console(markup=False, highlight=False)
    widths = [max(map(len, x)) + 2 for x in zip(columns, *chain.from_iterable(groups.values()), strict=True)][:-1]
    room = (console.width if console.is_terminal else WIDEST) - sum(widths)

    def write(cells: Sequence[str]) -> str:
        first = "".join(x.ljust(width) for x, width in zip(cells, widths, strict=False))
        last = _printable(cells[-1])
        if cut:
            return first + (last if len(last) <= room else f"{last[:room - 1]}\N{HORIZONTAL ELLIPSIS}")
        return first + f"\n{' ' * len(first)}".join(textwrap.wrap(last, room))

    console.print(write(columns), style="bold", soft_wrap=True)
    for heading, rows in groups.items():
        console.print(*([f"\n{heading}"] if heading else []), style="bold", soft_wrap=True)
        for row in rows:
            console.print(write(row), soft_wrap=True)


def _printable(text: str) -> str:
    """Text without control characters: untrusted text could contain terminal escape sequences."""
    return "".join(x if x.isprintable() or x == "\n" else "\N{REPLACEMENT CHARACTER}" for x in text)


def format_difference(difference: Difference | None, score: Score) -> tuple[str, str, str, str]:
    """Mean, confidence interval, adjusted p-value and verdict of a difference."""
    if difference is None or difference.mean is None or difference.p_adjusted is None:
        return "-", "-", "-", ""
    metric = Metric.of(score)
    interval = "-" if difference.ci95 is None else metric.write_difference_interval(difference.ci95)
    verdict = difference.judge(higher_is_better=score.higher_is_better)
    return metric.write_difference(difference.mean), interval, format_p(difference.p_adjusted), verdict


def format_p(p: float) -> str:
    """A p-value with three decimals."""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def format_interval(ends: tuple[float, float]) -> str:
    """A confidence interval of scores."""
    return f"[{ends[0]:.2f}, {ends[1]:.2f}]"


def format_score(result: Result) -> str:
    """Mean and confidence interval of the score with its metric, or the reason why there is none."""
    score: Score = result.score
    metric = Metric.of(score)
    if score.mean is not None:
        interval = "no interval" if score.ci95 is None else metric.write_interval(score.ci95)
        return f"{metric.write(score.mean)}  {interval}  {metric.title}"
    if score.partial_mean is not None:
        return f"none: {result.n_failed} samples failed (mean of the others {metric.write(score.partial_mean)})"
    return "none: random weights" if result.n_failed == 0 else "none: every sample failed"


def format_bytes(count: float) -> str:
    """A number of bytes with a decimal unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def format_share(share: float | None) -> str:
    """A share in percent; a dash for None."""
    return "-" if share is None else f"{share:.1%}"


def format_seconds(value: float | None) -> str:
    """A duration; a dash for None."""
    if value is None:
        return "-"
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"
