"""Records as flat rows: what `kvbench query` reads, and what a report and the leaderboard give to download.

A column is named after its place in the file, with an underscore for every step: `memory.ratio` is `memory_ratio`.
Lists of single values stay lists; settings, counts by name and records in lists are JSON text.
"""

from __future__ import annotations

import csv
import functools
import io
import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import to_json

from kvbench.errors import UserError
from kvbench.extras import load_extra
from kvbench.runs.results import Result

FlatRecord = dict[str, Any]

SHORT = {"method_name": "method", "task_name": "task", "model_id": "model", "score_mean": "score"}
"""Columns that are asked for most, under a plain name."""
LEFT_OUT = ("method_card", "schema_version")
FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""What a spreadsheet takes for the start of a formula."""


@dataclass(frozen=True)
class RecordColumn:
    """A place in a record, and what stands there."""

    name: str
    place: tuple[str, ...]
    kind: type
    """str, int, float or bool; str also of JSON."""
    many: bool
    """Whether it is a list of these."""
    text: bool
    """Whether it is JSON."""


@functools.cache
def find_columns(record: type[BaseModel]) -> tuple[RecordColumn, ...]:
    """The columns of a record; what a result has both in `spec` and outside it is there once."""
    return tuple(x for x in _walk(record, ()) if x.name not in LEFT_OUT)


def _walk(record: type[BaseModel], at: tuple[str, ...]) -> Iterable[RecordColumn]:
    for field, info in record.model_fields.items():
        kind = _strip(info.annotation)
        place = (*at, field)
        if at == ("spec",) and field in Result.model_fields:
            continue
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _walk(kind, place)
        else:
            name = "_".join(place[1:] if at[:1] == ("spec",) else place)
            (single, many) = (get_args(kind)[0], True) if get_origin(kind) is tuple else (kind, False)
            scalar = _scalar(single)
            yield RecordColumn(SHORT.get(name, name), place, scalar or str, many and scalar is not None, scalar is None)


def _strip(annotation: Any) -> Any:
    """The type that is not None."""
    if get_origin(annotation) in (Union, UnionType):
        return next(x for x in get_args(annotation) if x is not NoneType)
    return annotation


def _scalar(kind: Any) -> type | None:
    """The type of a single value; None: it is none."""
    if get_origin(kind) is Literal:
        return type(get_args(kind)[0])
    if isinstance(kind, type) and issubclass(kind, Enum):
        return str
    return kind if kind in (str, int, float, bool) else None


def flatten(record: BaseModel) -> FlatRecord:
    """A record as one row."""
    return {x.name: _read(record, x) for x in find_columns(type(record))}


def _read(record: BaseModel, column: RecordColumn) -> Any:
    value: Any = record
    for part in column.place:
        value = getattr(value, part)
        if value is None:
            return None
    if column.text:
        return to_json(value).decode()
    return list(value) if column.many else value


def write_csv(rows: Iterable[FlatRecord], columns: Iterable[str]) -> str:
    """Rows as CSV; text that a spreadsheet would run as a formula has an apostrophe before it."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: _cell(value) for key, value in row.items()})
    return text.getvalue()


def _cell(value: Any) -> Any:
    if isinstance(value, list):
        return json.dumps(value)
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value


def make_table(rows: Iterable[FlatRecord], columns: Iterable[RecordColumn]) -> Any:
    """Rows as a table of pyarrow.

    Raises:
        UserError: pyarrow is missing, or a number of a file is too large for any table.
    """
    arrow = load_extra("pyarrow", extra="report", what="a table of runs")
    types = {str: arrow.string(), int: arrow.int64(), float: arrow.float64(), bool: arrow.bool_()}
    schema = arrow.schema([
        (x.name, arrow.list_(types[x.kind]) if x.many else types[x.kind]) for x in columns
    ])
    try:
        return arrow.Table.from_pylist(list(rows), schema)
    except (arrow.ArrowException, OverflowError, ValueError) as error:
        raise UserError(f"a value of these runs fits no table: {error}.") from error
