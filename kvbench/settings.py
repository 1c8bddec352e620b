"""Settings of methods and tasks from `key=value` text, validated by the types of their own dataclass."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from kvbench.errors import UserError, unknown
from kvbench.method import Method
from kvbench.task import Task

T = TypeVar("T", Method, Task)


def parse_pairs(pairs: Iterable[str], option: str) -> dict[str, str]:
    """`key=value` texts as a dictionary.

    Raises:
        UserError: no `=`, no key, or a key twice.
    """
    found: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise UserError(f"{option} '{pair}' is not key=value. Write for example {option} window=32.")
        if key.strip() in found:
            raise UserError(f"{option} {key.strip()} is given twice. Give each setting once.")
        found[key.strip()] = value.strip()
    return found


def setting_fields(cls: type[Method | Task]) -> dict[str, dataclasses.Field[Any]]:
    """The fields that are settings: those that `fit` and `bind` fill in are not."""
    return {x.name: x for x in dataclasses.fields(cls) if x.init and not x.metadata.get("resolved")}


def setting_types(cls: type[Method | Task]) -> dict[str, Any]:
    """The settings' types, resolved."""
    hints = get_type_hints(cls, include_extras=True)
    return {name: hints[name] for name in setting_fields(cls)}


def configure(cls: type[T], given: Mapping[str, str], option: str, name: str) -> T:
    """An instance with these settings, the rest at their defaults.

    Raises:
        UserError: unknown setting, or a value of the wrong type or range.
    """
    allowed = setting_fields(cls)
    values: dict[str, Any] = {}
    for key, text in given.items():
        if key not in allowed:
            hint = f"See `kvbench show {name}`." if allowed else f"{name} has no settings: leave {option} out."
            raise unknown(f"setting of {name}", key, allowed, hint)
        values[key] = _read(text, setting_types(cls)[key], f"{option} {key}={text}")
    try:
        return cls(**values)
    except (ValueError, TypeError) as error:
        given_text = " ".join(f"{key}={text}" for key, text in given.items())
        raise UserError(f"{option} {given_text}: {error}. See `kvbench show {name}`.") from error


def jsonable_settings(made: Method | Task) -> dict[str, Any]:
    """The settings of an instance, as JSON values."""
    return {name: to_jsonable_python(getattr(made, name)) for name in setting_fields(type(made))}


def type_name(kind: Any) -> str:
    """A type as an author would write it."""
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")


def _read(text: str, kind: Any, what: str) -> Any:
    """The value of a type that a text stands for: as it is, as JSON (lists, numbers in unions), or `none`."""
    candidates: list[Any] = [text]
    if text.lower() in ("none", "null"):
        candidates.insert(0, None)
    else:
        try:
            candidates.append(json.loads(text))
        except ValueError:
            candidates += [text.split(",")] if "," in text else []
    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    first: ValidationError | None = None
    for value in candidates:
        try:
            found = adapter.validate_python(value)
        except ValidationError as error:
            first = first or error
        else:
            if not _is_finite(found):  # JSON has no such number: a spec would say null, as of any other of them
                raise UserError(f"{what} is no finite number. Allowed: {type_name(kind)}.")
            return found
    assert first is not None
    reason = first.errors()[0]["msg"]
    raise UserError(f"{what}: {reason[0].lower()}{reason[1:]}. Allowed: {type_name(kind)}.")


def _is_finite(value: Any) -> bool:
    """Whether there is no infinity and no NaN in a value, however deep."""
    if isinstance(value, Mapping):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)
