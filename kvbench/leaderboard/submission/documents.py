"""JSON that a stranger wrote: read within limits, as one record of known fields, or refused in one line."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError

from kvbench.leaderboard.verification.outcome import RefusedError, show

T = TypeVar("T", bound=BaseModel)
MOST_DEPTH = 24
MOST_CONTAINERS = 10_000
"""Objects and lists of one document: a validator takes kilobytes for each, however empty it is."""
STRING = re.compile(rb'"(?:[^"\\]+|\\.)*(?:"|\\?\Z)', re.DOTALL)
MOST_NUMBER = 2**53
"""Above it neighboring whole numbers are one and the same in other people's tools."""


def parse(data: bytes, kind: type[T], what: str) -> T:
    """One JSON document as a record.

    Raises:
        RefusedError: not UTF-8, not JSON, a key twice, too deep, more than MOST_CONTAINERS, a number beyond
            MOST_NUMBER, or not this record.
    """
    check_containers(data, what)
    try:
        text = data.decode("utf-8")
        found = json.loads(
            text, object_pairs_hook=_unique, parse_constant=_no_number, parse_float=_float, parse_int=_int
        )
        _look_through(found)
        return kind.model_validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise RefusedError("schema", f"{what}: {show(where)}: {first['msg']}") from error
    except RecursionError as error:
        raise RefusedError("schema", f"{what}: nested deeper than {MOST_DEPTH}") from error
    except ValueError as error:  # of UTF-8, of JSON, and ours
        raise RefusedError("schema", f"{what}: {str(error).splitlines()[0]}") from error


def check_containers(data: bytes, what: str) -> None:
    """Look at a document before anything is made of it.

    Raises:
        RefusedError: it has more than MOST_CONTAINERS.
    """
    if data.count(b"{") + data.count(b"[") > MOST_CONTAINERS:  # of which some may be text
        data = STRING.sub(b"", data)
        if data.count(b"{") + data.count(b"[") > MOST_CONTAINERS:
            raise RefusedError("schema", f"{what}: more than {MOST_CONTAINERS:,} objects and lists")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (key, _), = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"key {show(key)} comes twice")
    return found


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or abs(value) > MOST_NUMBER:
        raise ValueError(f"number {show(text)} is too large")
    return value


def _int(text: str) -> int:
    if len(text) > len(str(MOST_NUMBER)) + 1 or abs(int(text)) > MOST_NUMBER:
        raise ValueError(f"number {show(text)} is too large")
    return int(text)


def _look_through(document: object) -> None:
    """Refuse depth, and text that no file can hold (half of a surrogate pair)."""
    level = [document]
    for _ in range(MOST_DEPTH):
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
    raise ValueError(f"nested deeper than {MOST_DEPTH}")
