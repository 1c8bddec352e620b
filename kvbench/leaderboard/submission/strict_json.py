"""Parses untrusted JSON within limits, into one record of known fields."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError

from kvbench.errors import first_line
from kvbench.leaderboard.submission.outcome import RefusedError, quote
from kvbench.runs.schema import exceeds, upgrade

T = TypeVar("T", bound=BaseModel)
MAX_DEPTH = 24
MAX_CONTAINERS = 10_000
"""Objects and lists in one document: pydantic takes kilobytes for each, even if empty."""
MAX_VALUES = 100_000
"""Values in one document: a short number in a list takes ten times as many bytes in memory as in JSON."""
STRING = re.compile(rb'"(?:[^"\\]+|\\.)*(?:"|\\?\Z)', re.DOTALL)
MAX_NUMBER = 2**53
"""Larger integers lose precision in tools that read numbers as float64."""


def parse(data: bytes, kind: type[T], what: str) -> T:
    """Parse one JSON document as a record; documents with earlier names are upgraded.

    Raises:
        RefusedError: not UTF-8, not JSON, no schema_version, a repeated key, too deep, more than MAX_CONTAINERS or
            MAX_VALUES, a number beyond MAX_NUMBER, or fields that do not fit the record.
    """
    check_containers(data, what)
    try:
        text = data.decode("utf-8")
        found = json.loads(
            text, object_pairs_hook=_unique, parse_constant=_no_number, parse_float=_float, parse_int=_int
        )
        _check_nesting(found)
        if "schema_version" in kind.model_fields and isinstance(found, dict) and "schema_version" not in found:
            raise ValueError("no schema_version")  # commands that read files of a run skip or refuse them, too
        current = upgrade(found)
        return kind.model_validate_json(text if current == found else json.dumps(current), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise RefusedError("schema", f"{what}: {quote(where)}: {first['msg']}") from error
    except RecursionError as error:
        raise RefusedError("schema", f"{what}: nested deeper than {MAX_DEPTH}") from error
    except ValueError as error:  # from UTF-8, JSON and our own checks
        raise RefusedError("schema", f"{what}: {first_line(error)}") from error


def check_containers(data: bytes, what: str) -> None:
    """Count objects and lists, and the values in them, before anything is parsed.

    Raises:
        RefusedError: more than MAX_CONTAINERS, or than MAX_VALUES.
    """
    if _find_excess(data) is not None and (found := _find_excess(STRING.sub(b"", data))) is not None:
        raise RefusedError("schema", f"{what}: more than {found}")


def _find_excess(data: bytes) -> str | None:
    """The limit that a document exceeds, if the characters inside its strings count, too."""
    if data.count(b"{") + data.count(b"[") > MAX_CONTAINERS:
        return f"{MAX_CONTAINERS:,} objects and lists"
    return f"{MAX_VALUES:,} values" if data.count(b",") > MAX_VALUES else None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (key, _), = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"key {quote(key)} occurs twice")
    return found


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a finite number")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or abs(value) > MAX_NUMBER:
        raise ValueError(f"number {quote(text)} is too large")
    return value


def _int(text: str) -> int:
    if exceeds(text, MAX_NUMBER):
        raise ValueError(f"number {quote(text)} is too large")
    return int(text)


def _check_nesting(document: object) -> None:
    """Raise ValueError for deep nesting, and for text that UTF-8 cannot hold (half of a surrogate pair)."""
    level = [document]
    for _ in range(MAX_DEPTH):
        inner: list[object] = []
        for x in level:
            if isinstance(x, dict):
                inner += [*x, *x.values()]
            elif isinstance(x, list):
                inner += x
            elif isinstance(x, str):
                x.encode("utf-8")
        level = inner
        if not level:
            return
    raise ValueError(f"nested deeper than {MAX_DEPTH}")
