"""Bundles with something changed at random: never a traceback, and never another score that counts as verified."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbench.leaderboard.submission.records import MANIFEST, RESULT, SAMPLES, SPEC
from kvbench.leaderboard.submission.repository import Repository
from kvbench.leaderboard.verification.verify import verify
from kvbench.runs.spec import RunSpec

from .conftest import edit_spec, repack

HOSTILE = [
    None, True, False, 0, -1, 1, 3, 0.5, -0.5, 1e300, 2**53, 2**63, 10**400, float("nan"), float("inf"), "", "x", "..",
    "../../etc/passwd", "/dev/zero", "a.py:B", "<script>alert(1)</script>", "\x00\x1b[2J", "\u202e\u0430", "=1+1",
    [], {}, [[[]]], {"a": {}}, "9" * 400, "\ud800",
]


def places(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of everything in a document."""
    keys = document if isinstance(document, dict) else range(len(document)) if isinstance(document, list) else ()
    return [path, *(x for key in keys for x in places(document[key], (*path, key)))]


def change(document: Any, draw: Any) -> Any:
    """One thing in it replaced, removed, added or exchanged for another."""
    path = draw(st.sampled_from(places(document)[1:]))
    holder = document
    for key in path[:-1]:
        holder = holder[key]
    kind = draw(st.sampled_from(["replace", "remove", "add", "exchange"]))
    if kind == "replace":
        holder[path[-1]] = draw(st.sampled_from(HOSTILE))
    elif kind == "remove":
        del holder[path[-1]]
    elif kind == "add":
        if isinstance(holder, dict):
            holder[draw(st.sampled_from(["more", "score", "__class__", ""]))] = draw(st.sampled_from(HOSTILE))
        else:
            holder.append(draw(st.sampled_from(HOSTILE)))
    else:
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        other = draw(st.sampled_from(list(keys)))
        holder[path[-1]], holder[other] = holder[other], holder[path[-1]]
    return document


def write(document: Any) -> bytes:
    """As JSON that may not be JSON."""
    return json.dumps(document).encode()


def judge(files: dict[str, bytes], true: float) -> None:
    """It is looked at without a traceback; a level means the true score, and a refusal means none."""
    found = verify(files, Repository()).conclude()
    assert found.checks
    assert all(x.reason.isascii() and x.reason.isprintable() for x in found.checks)
    if found.level is not None:
        assert not found.refused
        assert found.score is not None and found.score.mean == true


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_spec_with_something_changed_everywhere(runs, data):
    """A lie that is told alike in all files, under the name that it gives the run if it still is a spec."""
    files, true = runs["snapkv"].files, runs["snapkv"].bundle.result.score.mean
    changed = change(json.loads(files[SPEC]), data.draw)
    try:
        RunSpec.model_validate(changed).run_id.encode()
    except ValueError:
        judge(repack(files, {SPEC: write(changed)}), true)
    else:
        judge(edit_spec(files, lambda spec: (spec.clear(), spec.update(changed))), true)


@pytest.mark.parametrize("name", [SPEC, RESULT, MANIFEST])
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_document_with_something_changed(runs, name, data):
    files = runs["snapkv"].files
    changed = write(change(json.loads(files[name]), data.draw))
    true = runs["snapkv"].bundle.result.score.mean
    judge({**files, MANIFEST: changed} if name == MANIFEST else repack(files, {name: changed}), true)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_journal_with_something_changed(runs, data):
    """Whatever a line says, the answers that are verified are those of its tokens, and the result must be theirs."""
    files = runs["snapkv"].files
    lines = [json.loads(x) for x in gzip.decompress(files[SAMPLES]).splitlines()]
    number = data.draw(st.integers(0, len(lines) - 1))
    lines[number] = change(lines[number], data.draw)
    packed = gzip.compress(b"".join(write(x) + b"\n" for x in lines))
    judge(repack(files, {SAMPLES: packed}), runs["snapkv"].bundle.result.score.mean)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_file_cut_or_overwritten_anywhere(runs, data):
    files = runs["snapkv"].files
    name = data.draw(st.sampled_from([SPEC, RESULT, SAMPLES]))
    at = data.draw(st.integers(0, len(files[name])))
    changed = files[name][:at] + data.draw(st.binary(max_size=3))
    changed += files[name][len(changed):] if data.draw(st.booleans()) else b""
    judge(repack(files, {name: changed}), runs["snapkv"].bundle.result.score.mean)
