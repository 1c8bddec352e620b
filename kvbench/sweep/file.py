"""Reads sweep files: common options and grids, in which a list means one cell per value."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError, create_model, field_validator

from kvbench.errors import UserError, unknown
from kvbench.runs.options import Request, list_options
from kvbench.sweep.cell import SweepCell
from kvbench.toml import STRICT, explain, read_toml

Setting = str | int | float | bool


class SweepFile(BaseModel):
    """The tables of a sweep file, in which a list means one cell per value; each grid is combined with each run."""

    model_config = STRICT

    out: str = "runs"
    run: list[dict[str, Any]] = Field([{}], min_length=1)
    grid: list[dict[str, Any]] = []

    @field_validator("run", mode="before")
    @classmethod
    def _list_runs(cls, value: object) -> object:
        """One [run] is a list of one [[run]]."""
        return [value] if isinstance(value, dict) else value


def _list_fields() -> Iterator[tuple[str, Any]]:
    """Options of a cell by their keys in a sweep file, with their types there; left out, each has its own default."""
    for option in list_options():
        if option.repeatable:
            yield option.key, (dict[str, Setting], {})
        elif option.required:
            yield option.key, (option.kind, ...)
        else:
            yield option.key, (option.kind | (int | float if option.numeric else None) | None, None)


CellOptions: type[BaseModel] = create_model("CellOptions", __config__=STRICT, **dict(_list_fields()))
"""The options of one cell, generated from the table of options."""
NAMES = list(CellOptions.model_fields)
TABLES = [x.key for x in list_options() if x.repeatable]
"""Options whose values are tables."""


def make_request(options: Mapping[str, Any], out: Path) -> Request:
    """The request of a cell, from values by their keys in a sweep file.

    Raises:
        ValidationError: an unknown key, or a value of the wrong type.
    """
    cell = CellOptions(**options)
    given: dict[str, Any] = {}
    for option in list_options():
        if option.key in cell.model_fields_set:
            value = getattr(cell, option.key)
            if option.repeatable:
                value = tuple(f"{key}={as_text(x)}" for key, x in value.items())
            given[option.name] = as_text(value) if option.numeric else value
    return Request(**given, out=out)


def read_sweep(path: Path) -> list[SweepCell]:
    """The cells of a sweep file, in order. Names of methods and tasks are not checked yet.

    Raises:
        UserError: the file cannot be read or is not a valid sweep.
    """
    hint = "Put run options in [run] or [[grid]]; see docs/sweeps.md."
    return expand(read_toml(path, SweepFile, "sweep file", hint))


def expand(file: SweepFile) -> list[SweepCell]:
    """One cell per combination of values, for each [[run]] in turn.

    Raises:
        UserError: an unknown option, a value of the wrong type, or an empty list or grid.
    """
    if not file.grid:
        raise UserError("the sweep has no [[grid]]. Add one with at least a method.")
    several = len(file.run) > 1
    runs = {f"[[run]] {number}" if several else "[run]": table for number, table in enumerate(file.run, 1)}
    grids = {f"[[grid]] {number}": table for number, table in enumerate(file.grid, 1)}
    for place, table in (runs | grids).items():
        check_table(table, place)
    if empty := next((place for place, table in grids.items() if not table), None):
        raise UserError(f'{empty} is empty: give at least one option, such as method = ["snapkv", "h2o"].')
    found: list[tuple[str, dict[str, Any], Request]] = []
    for (source, run), (place, grid) in itertools.product(runs.items(), grids.items()):
        for options in _combine(merge(run, grid)):
            try:
                request = make_request(options, Path(file.out).expanduser())
            except ValidationError as error:
                raise UserError(f"{place} (with {source}): {explain(error)}. See `kvbench run --help`.") from error
            found.append((f"{source}, {place}" if several else place, options, request))
    return _name(found)


def check_table(table: Mapping[str, Any], place: str) -> None:
    """Check the options of a [run] or a grid.

    Raises:
        UserError: an unknown option, a value in place of a table, an empty list or a list with a value twice.
    """
    for name, value in table.items():
        if name not in NAMES:
            raise unknown("option", name, NAMES, f"In {place}.")
        if name in TABLES and not isinstance(value, dict):
            raise UserError(
                f"{place}: {name} must be one table; lists stand inside it, such as {name}.NAME = [16, 64]."
            )
    for key, value in flatten(table):
        if value == []:
            raise UserError(f"{place}: {key} is an empty list, which makes no cell. Give values, or remove it.")
        values = value if isinstance(value, list) else []
        if twice := [x for i, x in enumerate(values) if x in values[:i]]:
            raise UserError(f"{place}: {key} has {twice[0]!r} twice, which is the same run. Remove one.")


def merge(common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a [run] before those of a grid, which take precedence; tables are merged entry by entry."""
    rest = {key: value for key, value in common.items() if key not in own}
    return rest | {
        key: merge(common[key], value) if isinstance(value, dict) and isinstance(common.get(key), dict) else value
        for key, value in own.items()
    }


def _combine(table: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The cross product of the lists in a table; the last list varies fastest."""
    axes = [(key, value if isinstance(value, list) else [value]) for key, value in flatten(table)]
    for combination in itertools.product(*(values for _, values in axes)):
        cell: dict[str, Any] = {}
        for (key, _), value in zip(axes, combination, strict=True):
            option, _, setting = key.partition(".")
            if setting:
                cell.setdefault(option, {})[setting] = value
            else:
                cell[option] = value
        yield cell


def flatten(table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Options by name; entries of nested tables as `set.window`."""
    for key, value in table.items():
        if key in TABLES and isinstance(value, dict):
            yield from ((f"{key}.{setting}", x) for setting, x in value.items())
        else:
            yield key, value


def _name(found: list[tuple[str, dict[str, Any], Request]]) -> list[SweepCell]:
    """Cells, each named after its method and the options that vary between cells."""
    flat = [dict(flatten(options)) for _, options, _ in found]
    keys = sorted(dict.fromkeys(key for x in flat for key in x), key=lambda x: NAMES.index(x.partition(".")[0]))
    varying = [x for x in keys if x != "method" and any(y.get(x) != flat[0].get(x) for y in flat)]
    cells = []
    for index, (place, _, request) in enumerate(found):
        own = {x: as_text(flat[index][x]) for x in varying if x in flat[index]}
        name = " ".join([request.method, *(f"{key}={value}" for key, value in own.items())])
        cells.append(SweepCell(index, name, request, own, place))
    return cells


def as_text(value: object) -> str:
    """A value as it is written on the command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)
