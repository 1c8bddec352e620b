"""HTML tables, readable without a script; DataTables adds sorting and filters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class TableCell:
    """One cell of a table, not yet escaped."""

    text: str
    order: float | str | None = None
    """Sort key, if it is not the text; "" sorts before every number."""
    kind: str = ""
    """CSS classes: `text` is not a number; `pick`, in a head, filters its column by a list of values."""


def number(value: float | None, how: str) -> TableCell:
    """A formatted number; a dash for None."""
    return NONE if value is None else TableCell(format(value, how), value)


def milliseconds(seconds: float | None) -> TableCell:
    """A time in milliseconds; a dash for None."""
    return NONE if seconds is None else TableCell(f"{1000 * seconds:,.1f} ms", seconds)


NONE = TableCell("-", "")


def write_table(
    caption: str, head: Sequence[TableCell], rows: Sequence[Sequence[TableCell]], *, named_by: int = 0,
    shaded: Sequence[bool] = (), sortable: bool = False,
) -> str:
    """Write a table; all text is escaped.

    named_by: index of the column whose cells head their rows.
    shaded: rows with a shaded background.
    """
    columns = "".join(f'<th scope="col"{_class(x.kind)}>{escape(x.text)}</th>' for x in head)
    lines = ("".join(_write(x, name=i == named_by) for i, x in enumerate(row)) for row in rows)
    grounds = ("shaded" if x else "" for x in shaded or [False] * len(rows))
    body = "".join(f"<tr{_class(ground)}>{line}</tr>\n" for line, ground in zip(lines, grounds, strict=True))
    return (
        f'<div class="scroll"><table{_class("rows compact" if sortable else "")}>\n<caption>{escape(caption)}</caption>'
        f"\n<thead><tr>{columns}</tr></thead>\n<tbody>\n{body}</tbody>\n</table></div>\n"
    )


def _write(cell: TableCell, *, name: bool) -> str:
    tag, scope = ("th", ' scope="row"') if name else ("td", "")
    order = "" if cell.order is None else f' data-order="{cell.order}"'
    return f"<{tag}{scope}{_class(cell.kind)}{order}>{escape(cell.text)}</{tag}>"


def _class(names: str) -> str:
    return f' class="{names}"' if names else ""
