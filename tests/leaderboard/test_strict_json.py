"""Untrusted JSON is parsed as a record or refused in one line."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from kvbench.leaderboard.submission.outcome import RefusedError
from kvbench.leaderboard.submission.strict_json import parse
from kvbench.runs.spec import Record


class Form(Record):
    """An example record."""

    name: str = ""
    number: float = 0.0
    count: int = 0
    free: dict[str, Any] = Field(default_factory=dict)


def read(text: str | bytes) -> Form | str:
    """The record, or the reason of the refusal."""
    try:
        return parse(text if isinstance(text, bytes) else text.encode(), Form, "it")
    except RefusedError as error:
        reason = error.check.reason
    assert reason.isascii() and reason.isprintable()
    return reason


def test_a_valid_document_is_parsed():
    assert read('{"name": "x", "number": 1, "count": 2, "free": {"a": [1, null]}}') == Form(
        name="x", number=1.0, count=2, free={"a": [1, None]}
    )


@pytest.mark.parametrize(("text", "reason"), [
    ("", "it: Expecting value: line 1 column 1 (char 0)"),
    ('{"number": 1', "it: Expecting ',' delimiter"),
    (b'{"name": "\xff"}', "it: 'utf-8' codec can't decode"),
    ('{"number": NaN}', "it: NaN is not a finite number"),
    ('{"number": -Infinity}', "it: -Infinity is not a finite number"),
    ('{"number": 1e999}', "it: number '1e999' is too large"),
    ('{"number": 1e300}', "it: number '1e300' is too large"),
    ('{"count": 99999999999999999999}', "it: number '99999999999999999999' is too large"),
    (f'{{"count": {"9" * 5000}}}', "it: number '9999"),
    ('{"count": 1.0}', "it: 'count': Input should be a valid integer"),
    ('{"count": "1"}', "it: 'count': Input should be a valid integer"),
    ('{"count": true}', "it: 'count': Input should be a valid integer"),
    ('{"name": 1}', "it: 'name': Input should be a valid string"),
    ('{"name": "\\ud800"}', "it: 'utf-8' codec can't encode"),
    ('{"name": "a", "name": "b"}', "it: key 'name' occurs twice"),
    ('{"free": {"a": 1, "a": 1}}', "it: key 'a' occurs twice"),
    ('{"more": 1}', "it: 'more': Extra inputs are not permitted"),
    ("[]", "it: '': Input should be an object"),
    ('{"free": ' + '{"a": ' * 40 + "1" + "}" * 41, "it: nested deeper than 24"),
    ('{"free": {"a": ' + "[" * 5_000 + "]" * 5_000 + "}}", "it: nested deeper than 24"),
])
def test_an_invalid_document_is_refused_in_one_line(text, reason):
    found = read(text)
    assert isinstance(found, str) and found.startswith(reason)


def test_containers_are_counted_before_parsing():
    """A mebibyte of empty objects would take 700 MiB; brackets inside strings do not count."""
    many = "{}," * 300_000
    assert read(f'{{"free": {{"a": [{many}{{}}]}}}}') == "it: more than 10,000 objects and lists"
    assert read(f'{{"free": {{"a": "\\"{many}"}}}}') == Form(free={"a": f'"{many}'})
    assert read(f'{{"name": "\\"{many}\\').startswith("it: Unterminated string")
    tracemalloc.start()
    read(f"[{many}")
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


def test_values_are_counted_before_parsing():
    """A list of short numbers takes ten times its bytes in memory; commas inside strings do not count."""
    many = "1," * 300_000
    assert read(f'{{"free": {{"a": [{many}1]}}}}') == "it: more than 100,000 values"
    assert read(f'{{"free": {{"a": "{many}"}}}}') == Form(free={"a": many})
    tracemalloc.start()
    read(f"[{many}1]")
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4), max_leaves=12,
)


@pytest.mark.slow
@given(st.fixed_dictionaries({}, optional={
    "name": st.text() | json_values, "number": st.floats(-1e9, 1e9) | json_values,
    "count": st.integers(-(10**9), 10**9) | json_values, "free": st.dictionaries(st.text(max_size=8), json_values),
}) | st.dictionaries(st.sampled_from(["name", "number", "count", "free", "x"]), json_values))
def test_any_object_is_parsed_or_refused(document):
    """A parsed record equals its document."""
    found = read(json.dumps(document))
    if isinstance(found, Form):
        assert {key: getattr(found, key) for key in document} == document


@given(st.binary(max_size=60))
def test_any_bytes_are_parsed_or_refused(data):
    assert isinstance(read(data), Form | str)
