"""Reads sweep files: options of every cell, and grids in which a list means one cell per value."""

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
    """The tables of a sweep file; each grid is combined with each table of common options."""

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
    found: list[tuple[str, dict[str, Any], Request]] = []
    for number, run in enumerate(file.run, 1):
        source = f"[[run]] {number}" if several else "[run]"
        _check_names(run, source)
        for key, value in flatten(run):
            if isinstance(value, list):
                raise UserError(f"{source}: {key} is a list. Put lists in a [[grid]].")
        for place, given in _list_given(file.grid):
            options = merge(run, given)
            try:
                request = make_request(options, Path(file.out))
            except ValidationError as error:
                raise UserError(f"{place}, {source} included: {explain(error)}. See `kvbench run --help`.") from error
            found.append((f"{source}, {place}" if several else place, options, request))
    return _name(found)


def _list_given(grids: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The options that the grids give, one combination at a time, each with the grid's place in the file."""
    for number, table in enumerate(grids, 1):
        place = f"[[grid]] {number}"
        _check_names(table, place)
        if not table:
            raise UserError(f'{place} is empty: give at least one option, such as method = ["snapkv", "h2o"].')
        for given in _combine(table, place):
            yield place, given


def merge(common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """A grid with the options of [run]; its own options take precedence."""
    tables = {key: {**common[key], **value} for key, value in own.items()
              if isinstance(value, dict) and isinstance(common.get(key), dict)}
    return {**common, **own, **tables}


def _combine(table: Mapping[str, Any], where: str) -> Iterator[dict[str, Any]]:
    """The cross product of the lists in a grid; the last list varies fastest."""
    axes: list[tuple[str, list[Any]]] = []
    for key, value in flatten(table):
        if value == []:
            raise UserError(f"{where}: {key} is an empty list, which makes no cell. Give values, or remove it.")
        values = value if isinstance(value, list) else [value]
        if twice := [x for i, x in enumerate(values) if x in values[:i]]:
            raise UserError(f"{where}: {key} has {twice[0]!r} twice, which is the same run. Remove one.")
        axes.append((key, values))
    for combination in itertools.product(*(x for _, x in axes)):
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


def _check_names(table: Mapping[str, Any], where: str) -> None:
    for name in table:
        if name not in NAMES:
            raise unknown("option", name, NAMES, f"In {where}.")


def as_text(value: object) -> str:
    """A value as it is written on the command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)
