"""Tables in HTML: there without a script, sorted and filtered by DataTables where it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Cell:
    """What stands in a cell, not yet escaped."""

    text: str
    order: float | str | None = None
    """What it is sorted by, where that is not its text; "" comes before every number."""
    kind: str = ""
    """Classes: `text` is not a number; in a head, `pick` has its column filtered by a list of values."""
    link: str = ""
    """Where it leads, an address of ours."""


def number(value: float | None, how: str) -> Cell:
    """A number in a format; None: a dash."""
    return NONE if value is None else Cell(format(value, how), value)


def milliseconds(seconds: float | None) -> Cell:
    """A time; None: a dash."""
    return NONE if seconds is None else Cell(f"{1000 * seconds:,.1f} ms", seconds)


def interval(ends: tuple[float, float] | None) -> Cell:
    """An interval, sorted by its lower end; None: a dash."""
    return NONE if ends is None else Cell(f"[{ends[0]:.2f}, {ends[1]:.2f}]", ends[0])


NONE = Cell("-", "")


def write_table(
    caption: str, head: Sequence[Cell], rows: Sequence[Sequence[Cell]], *, named_by: int = 0,
    shaded: Sequence[bool] = (), sortable: bool = False,
) -> str:
    """A table; every text is escaped.

    named_by: the column whose cells are the names of their rows.
    shaded: rows with a ground of their own.
    """
    columns = "".join(f'<th scope="col"{_class(x.kind)}>{escape(x.text)}</th>' for x in head)
    lines = ("".join(_write(x, name=i == named_by) for i, x in enumerate(row)) for row in rows)
    grounds = ("shaded" if x else "" for x in shaded or [False] * len(rows))
    body = "".join(f"<tr{_class(ground)}>{line}</tr>\n" for line, ground in zip(lines, grounds, strict=True))
    return (
        f'<div class="scroll"><table{_class("rows compact" if sortable else "")}>\n<caption>{escape(caption)}</caption>'
        f"\n<thead><tr>{columns}</tr></thead>\n<tbody>\n{body}</tbody>\n</table></div>\n"
    )


def _write(cell: Cell, *, name: bool) -> str:
    tag, scope = ("th", ' scope="row"') if name else ("td", "")
    order = "" if cell.order is None else f' data-order="{cell.order}"'
    text = f'<a href="{escape(cell.link)}">{escape(cell.text)}</a>' if cell.link else escape(cell.text)
    return f"<{tag}{scope}{_class(cell.kind)}{order}>{text}</{tag}>"


def _class(names: str) -> str:
    return f' class="{names}"' if names else ""
