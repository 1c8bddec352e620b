"""Formats numbers, and prints tables on standard output."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from kvbench.analysis.metrics import Metric
from kvbench.log import printable

if TYPE_CHECKING:
    from kvbench.analysis.compare import Difference
    from kvbench.runs.results import Result, Score

WIDTH = 80
"""Characters per line of a table in a file or a pipe, if the longest word of each column fits."""
WIDEST = 200
"""Most characters per line there."""
LEAST = 16
"""Fewest characters per line of the last cells of a list."""
WORDS = re.compile(r"\[\S+, \S+\]|\S+")
"""Words, and intervals as one word each."""


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, blocks: bool = False) -> None:
    """Print a table on standard output; cells are folded, never truncated, and names stay on one line.

    A word is folded only where the longest words of the columns do not fit side by side, even without spaces around
    them: in a terminal, not in a file or a pipe, so that a run id or a path can be copied from there.

    blocks: in place of a table whose words do not fit, print a line per cell, and an empty line after each row.
    """
    title, columns = printable(title), list(map(printable, columns))
    cells = [[printable(x) for x in row] for row in rows]
    console = Console(markup=False, highlight=False)
    words = [max(map(cell_len, _words(x)), default=0) for x in zip(columns, *cells, strict=True)]
    spaced, tight = (sum(words) + (1 + 2 * x) * len(columns) + 1 for x in (1, 0))
    width = console.width if console.is_terminal else WIDTH if tight <= WIDTH else WIDEST
    if blocks and tight > width:
        for row in cells:
            console.print(*(f"{name}: {x}" for name, x in zip(columns, row, strict=True)), "", sep="\n", soft_wrap=True)
        if not cells:
            console.print("no rows")
        return
    padding = 0 if tight <= width < spaced else 1
    widths = _share_out(columns, cells, words, width - (1 + 2 * padding) * len(columns) - 1)
    console = Console(markup=False, highlight=False, width=width)
    table = Table(title=title or None, title_justify="left", header_style="bold", padding=(0, padding))
    for name, share in zip(columns, widths, strict=True):
        table.add_column(name, overflow="fold", no_wrap=name == "name" and len(columns) > 1, width=share)
    for row in cells:
        table.add_row(*(x if share is None else _wrap(x, share) for x, share in zip(row, widths, strict=True)))
    console.print(table)


def _share_out(
    columns: Sequence[str], cells: Sequence[Sequence[str]], words: Sequence[int], room: int
) -> Sequence[int | None]:
    """Widths that fit `room` and fold no word, equal for wide columns; None: rich's own, where words do not fit."""
    if sum(words) > room:
        return [None] * len(columns)
    lines = [
        max(cell_len(line) for cell in x for line in [*cell.splitlines(), ""])
        for x in zip(columns, *cells, strict=True)
    ]
    for cap in range(room, 0, -1):
        widths = [min(line, max(word, cap)) for line, word in zip(lines, words, strict=True)]
        if sum(widths) <= room:
            return widths
    return words


def _words(cells: Iterable[str]) -> Iterable[str]:
    """The words and intervals of the cells, which stay on one line each."""
    return chain.from_iterable(WORDS.findall(x) for x in cells)


def _wrap(cell: str, width: int) -> str:
    """The cell with lines that are too long broken before words and intervals."""
    lines = []
    for line in cell.splitlines():
        if cell_len(line) <= width:
            lines.append(line)
            continue
        lines.append("")
        for word in WORDS.findall(line):
            longer = f"{lines[-1]} {word}".lstrip()
            lines[-1:] = [longer] if cell_len(longer) <= width else [lines[-1], word]
    return "\n".join(lines)


def print_list(columns: Sequence[str], groups: Mapping[str, Sequence[Sequence[str]]], *, cut: bool = False) -> None:
    """Print rows on standard output under the headings of their groups, without rules, one line per row if it fits.

    Where the last cells would have fewer than LEAST characters per line, they stand below the others.

    groups: rows by heading.
    cut: the last cell ends where the terminal does, instead of continuing on the next line.
    """
    columns = list(map(printable, columns))
    groups = {printable(key): [list(map(printable, row)) for row in rows] for key, rows in groups.items()}
    console = Console(markup=False, highlight=False)
    widths = [max(map(len, x)) + 2 for x in zip(columns, *chain.from_iterable(groups.values()), strict=True)][:-1]
    width = console.width if console.is_terminal else WIDEST
    below = width - sum(widths) < LEAST
    indent = 4 if below else sum(widths)
    room = max(LEAST, width - indent)

    def write(cells: Sequence[str]) -> str:
        first = "".join(x.ljust(width) for x, width in zip(cells, widths, strict=False))
        last = cells[-1]
        if below:
            first = f"{first.rstrip()}\n{' ' * indent}" if last else first.rstrip()
        if cut:
            return first + (last if len(last) <= room else f"{last[:room - 1]}\N{HORIZONTAL ELLIPSIS}")
        return first + f"\n{' ' * indent}".join(textwrap.wrap(last, room))

    console.print(write(columns), style="bold", soft_wrap=True)
    for heading, rows in groups.items():
        console.print(*([f"\n{heading}"] if heading else []), style="bold", soft_wrap=True)
        for row in rows:
            console.print(write(row), soft_wrap=True)


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
        failed = f"{result.n_failed} of {result.n_samples} samples failed"
        return f"none: {failed} (mean of the others {metric.write(score.partial_mean)})"
    return f"none: {explain_no_score(result)}"


def explain_no_score(result: Result) -> str:
    """The reason why none of a run's answers has a score."""
    if result.n_failed == result.n_samples:
        return "every sample failed"
    return "random weights" if result.model.random else f"scorer {result.task.scorer} applies to no answer"


def format_bytes(count: float) -> str:
    """A number of bytes with a decimal unit."""
    for unit in ("B", "kB", "MB", "GB"):
        text = f"{count:.0f}" if unit == "B" else f"{count:.2f}"
        if float(text) < 1000:
            return f"{text} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def format_settings(settings: Mapping[str, object]) -> str:
    """Settings with their names, in one line."""
    return " ".join(f"{key}={value}" for key, value in settings.items())


def format_share(share: float | None) -> str:
    """A share in percent; a dash for None."""
    return "-" if share is None else f"{share:.1%}"


def format_seconds(value: float | None) -> str:
    """A duration; a dash for None."""
    if value is None:
        return "-"
    text = f"{value * 1000:.1f}"
    return f"{text} ms" if float(text) < 1000 else f"{value:.2f} s"
