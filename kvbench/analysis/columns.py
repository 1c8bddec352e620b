"""Flattens records into columns, for `kvbench query` and for the downloads of reports and the leaderboard.

A column is named after its path in the file, joined by underscores: `memory.ratio` is `memory_ratio`.
Lists of scalars stay lists; settings, counts by name and lists of records become JSON text.
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
from kvbench.machine import load_extra
from kvbench.runs.results import Result

FlatRecord = dict[str, Any]

SHORT = {"method_name": "method", "task_name": "task", "model_id": "model", "score_mean": "score"}
"""Short names of the columns that are used most."""
LEFT_OUT = ("method_card", "schema_version")
FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""Characters that start a formula in a spreadsheet."""


@dataclass(frozen=True)
class RecordColumn:
    """A field of a record, as a column of a table."""

    name: str
    place: tuple[str, ...]
    """Path of the field."""
    kind: type
    """str, int, float or bool; str for JSON."""
    many: bool
    """True for a list of `kind`."""
    text: bool
    """True for JSON text."""


@functools.cache
def find_columns(record: type[BaseModel]) -> tuple[RecordColumn, ...]:
    """The columns of a record type; a field that a result has both in `spec` and at the top appears once."""
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
    """The type of an annotation without its None."""
    if get_origin(annotation) in (Union, UnionType):
        return next(x for x in get_args(annotation) if x is not NoneType)
    return annotation


def _scalar(kind: Any) -> type | None:
    """str, int, float or bool for a scalar type; None for any other."""
    if get_origin(kind) is Literal:
        return type(get_args(kind)[0])
    if isinstance(kind, type) and issubclass(kind, Enum):
        return str
    return kind if kind in (str, int, float, bool) else None


def flatten(record: BaseModel) -> FlatRecord:
    """The values of a record by column name."""
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
    """Records as CSV; text that a spreadsheet would run as a formula gets a leading apostrophe."""
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
    """Records as a pyarrow table.

    Raises:
        UserError: pyarrow is not installed, or a number is too large for its column.
    """
    arrow = load_extra("pyarrow", extra="report", what="a table of runs")
    types = {str: arrow.string(), int: arrow.int64(), float: arrow.float64(), bool: arrow.bool_()}
    schema = arrow.schema([
        (x.name, arrow.list_(types[x.kind]) if x.many else types[x.kind]) for x in columns
    ])
    try:
        return arrow.Table.from_pylist(list(rows), schema)
    except (arrow.ArrowException, OverflowError, ValueError) as error:
        raise UserError(f"a value of these runs does not fit into a table: {error}.") from error
