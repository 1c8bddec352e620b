"""Read TOML files that users write, strictly; errors are one line."""

from __future__ import annotations

import reprlib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from kvbench.errors import UserError, suggest_file, unknown

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

T = TypeVar("T", bound=BaseModel)
STRICT = ConfigDict(extra="forbid", frozen=True, strict=True)


def read_toml(path: Path, form: type[T], what: str, hint: str, renamed: Mapping[str, str] | None = None) -> T:
    """Read and validate a file.

    Args:
        path: the file.
        form: the model of its tables.
        what: the kind of file in error messages, e.g. `sweep file`.
        hint: a sentence that points to the documentation.
        renamed: current names of keys by their former names.

    Raises:
        UserError: the file cannot be read, is not TOML, or does not match the model.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{what} '{path}' cannot be read: {error.strerror}.{suggest_file(path)} {hint}") from error
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, or nested too deep
        raise UserError(f"{what} '{path}' is not TOML: {error}. {hint}") from error
    for name in document:
        if renamed and name in renamed:
            raise UserError(f"{path}: key {name} is now {renamed[name]}. {hint}")
        if name not in form.model_fields:
            raise unknown("key", name, form.model_fields, f"In {path}. {hint}")
    try:
        return form(**document)
    except ValidationError as error:
        raise UserError(f"{path}: {explain(error)}. {hint}") from error


def explain(error: ValidationError) -> str:
    """The first validation error as text: place, value, rule."""
    return explain_all(error)[0]


def explain_all(error: ValidationError) -> list[str]:
    """Every validation error as text, those of the types that one value may have together."""
    places: dict[str, list[ErrorDetails]] = {}
    for found in error.errors():
        places.setdefault(_place(found["loc"]), []).append(found)
    return [_explain_one(place, found) for place, found in places.items()]


def _place(found: tuple[int | str, ...]) -> str:
    """The keys of a value; pydantic adds the type that was tried where several are allowed, as `int` or `list[str]`."""
    last = len(found) - 1
    return ".".join(
        str(x) for i, x in enumerate(found)
        if not (isinstance(x, str) and ("[" in x or (0 < i == last and x in ("str", "int", "float", "bool"))))
    )


def _explain_one(place: str, errors: list[ErrorDetails]) -> str:
    found = errors[0]
    if found["type"] == "missing":
        return f"{place} is missing"
    if found["type"] == "extra_forbidden":
        return f"{place} is an unknown key"
    messages = [x["msg"].removeprefix("Input ").removeprefix("Value error, ") for x in errors]
    rule, message = "should be ", messages[0]
    if all(x.startswith(rule) for x in messages):
        message = rule + " or ".join(x.removeprefix(rule) for x in messages)
    return f"{place} = {reprlib.repr(found['input'])} {message[0].lower()}{message[1:]}" if place else message
