"""Settings of methods and tasks from `key=value` text, validated by the types of their own dataclass."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from kvbench.constraints import setting_fields, setting_types, violation
from kvbench.errors import MOST, UserError, check_number, unknown
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


def configure(cls: type[T], given: Mapping[str, str], option: str, name: str) -> T:
    """An instance with these settings, the rest at their defaults.

    Raises:
        UserError: unknown setting, a value of the wrong type or range, or no value where there is no default.
    """
    allowed = setting_fields(cls)
    values: dict[str, Any] = {}
    for key, text in given.items():
        if key not in allowed:
            hint = f"See `kvbench show {name}`." if allowed else f"{name} has no settings: leave {option} out."
            raise unknown(f"setting of {name}", key, allowed, hint)
        try:
            values[key] = _read(text, setting_types(cls)[key])
        except ValueError:
            raise violation(name, cls, key, text) from None
        if isinstance(values[key], int):
            check_number(f"{name}: {key}", values[key], -MOST)
    for key, setting in allowed.items():
        if key not in values and setting.default is MISSING and setting.default_factory is MISSING:
            raise UserError(f"{name}: setting '{key}' has no default. Give it one.")
    try:
        return cls(**values)
    except UserError:
        raise
    except Exception as error:
        given_text = " ".join([option, *(f"{key}={text}" for key, text in given.items())]) if given else name
        detail = error if isinstance(error, ValueError | TypeError) else f"{type(error).__name__}: {error}"
        raise UserError(f"{given_text}: {detail}. See `kvbench show {name}`.") from error


def jsonable_settings(made: Method | Task) -> dict[str, Any]:
    """The settings of an instance, as JSON values."""
    return {name: to_jsonable_python(getattr(made, name)) for name in setting_fields(type(made))}


def _read(text: str, kind: Any) -> Any:
    """Parse a text as a value of a type: as it is, as JSON (lists, numbers in unions), or `none`.

    Raises:
        ValueError: it is no such value, or not finite (JSON has no such number).
    """
    candidates: list[Any] = [text]
    if text.lower() in ("none", "null"):
        candidates.insert(0, None)
    else:
        try:
            candidates.append(json.loads(text))
        except (ValueError, RecursionError):
            candidates.append(text.split(","))
    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    for value in candidates:
        with contextlib.suppress(ValidationError):
            found = adapter.validate_python(value)
            if _is_finite(found) and (isinstance(found, bool) or not isinstance(value, bool)):  # true is not 1
                return found
    raise ValueError(text)


def _is_finite(value: Any) -> bool:
    """Whether there is no infinity and no NaN in a value, however deep."""
    if isinstance(value, Mapping):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)
