"""Randomly mutated bundles: no traceback, and no wrong score counts as verified."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbench.leaderboard.submission.records import MANIFEST, RESULT, SAMPLES, SPEC
from kvbench.leaderboard.verification.repository import Repository
from kvbench.leaderboard.verification.verify import verify
from kvbench.runs.spec import RunSpec

from .conftest import edit_spec, repack

HOSTILE = [
    None, True, False, 0, -1, 1, 3, 0.5, -0.5, 1e300, 2**53, 2**63, 10**400, float("nan"), float("inf"), "", "x", "..",
    "../../etc/passwd", "/dev/zero", "a.py:B", "<script>alert(1)</script>", "\x00\x1b[2J", "\u202e\u0430", "=1+1",
    [], {}, [[[]]], {"a": {}}, "9" * 400, "\ud800",
]


def places(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all values in a document."""
    keys = document if isinstance(document, dict) else range(len(document)) if isinstance(document, list) else ()
    return [path, *(x for key in keys for x in places(document[key], (*path, key)))]


def change(document: Any, draw: Any) -> Any:
    """Replace, remove, add or swap one value."""
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
    """JSON text, possibly with values that JSON does not allow."""
    return json.dumps(document).encode()


def verify_mutated(files: dict[str, bytes], true: float) -> None:
    """Verify without a traceback; a level implies the true score, and a refusal implies no level."""
    found = verify(files, Repository()).conclude()
    assert found.checks
    assert all(x.reason.isascii() and x.reason.isprintable() for x in found.checks)
    if found.level is not None:
        assert not found.refused
        assert found.score is not None and found.score.mean == true


@pytest.mark.slow
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_mutated_spec_in_all_files(runs, data):
    """The same mutation in all files, with a matching run id where the spec stays valid."""
    files, true = runs["snapkv"].files, runs["snapkv"].bundle.result.score.mean
    changed = change(json.loads(files[SPEC]), data.draw)
    try:
        RunSpec.model_validate(changed).run_id.encode()
    except ValueError:
        verify_mutated(repack(files, {SPEC: write(changed)}), true)
    else:
        verify_mutated(edit_spec(files, lambda spec: (spec.clear(), spec.update(changed))), true)


@pytest.mark.few
@pytest.mark.parametrize("name", [SPEC, RESULT, MANIFEST])
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_mutated_document(runs, name, data):
    files = runs["snapkv"].files
    changed = write(change(json.loads(files[name]), data.draw))
    true = runs["snapkv"].bundle.result.score.mean
    verify_mutated({**files, MANIFEST: changed} if name == MANIFEST else repack(files, {name: changed}), true)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_mutated_journal(runs, data):
    """For every content of a line: verified answers come from its token ids and the result must follow from them."""
    files = runs["snapkv"].files
    lines = [json.loads(x) for x in gzip.decompress(files[SAMPLES]).splitlines()]
    number = data.draw(st.integers(0, len(lines) - 1))
    lines[number] = change(lines[number], data.draw)
    packed = gzip.compress(b"".join(write(x) + b"\n" for x in lines))
    verify_mutated(repack(files, {SAMPLES: packed}), runs["snapkv"].bundle.result.score.mean)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_truncated_or_overwritten_file(runs, data):
    files = runs["snapkv"].files
    name = data.draw(st.sampled_from([SPEC, RESULT, SAMPLES]))
    at = data.draw(st.integers(0, len(files[name])))
    changed = files[name][:at] + data.draw(st.binary(max_size=3))
    changed += files[name][len(changed):] if data.draw(st.booleans()) else b""
    verify_mutated(repack(files, {name: changed}), runs["snapkv"].bundle.result.score.mean)
