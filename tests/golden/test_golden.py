"""Outputs change only together with a version: see record.py for how an entry is recorded."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kvbench.registry import find_task
from kvbench.task import Example, Turn

from . import record
from .record import COMPOSED, METHODS, TASKS, compute, find_version, hash_example, read

NEXT = "Undo the change, or raise the version and run `python tests/golden/record.py`."


@pytest.mark.parametrize(
    ("kind", "name"), [*(("methods", x) for x in [*METHODS, *COMPOSED]), *(("tasks", x) for x in TASKS)],
)
def test_outputs_change_only_with_the_version(kind, name):
    """Kept positions, tokens and bytes of a method, and prompts of a task, are those recorded for its version."""
    entry = read(kind).get(name)
    assert entry is not None, f"{name} has no golden output. Run `python tests/golden/record.py`."
    versions = find_version(kind, name)
    assert {key: entry[key] for key in versions} == versions, f"{name} has a new version. {NEXT}"
    assert compute(kind, name, entry.get("seed", 0)) == entry["output"], f"{name}: outputs changed. {NEXT}"


@pytest.mark.parametrize("kind", ["methods", "tasks"])
def test_no_entry_is_left_over(kind):
    """Every entry is of a method or task that exists."""
    assert list(read(kind)) == sorted(record.find_names(kind))


def test_a_hash_covers_every_field_of_an_example(monkeypatch):
    """A change of one field, or of the texts that the task puts between them, is another hash."""
    task = find_task("niah")()
    turn = Turn("question", "prefix", "answer", ("reference",), 8, ("choice",), {"depth": 1})
    example = Example("id", "context", (turn,), {"key": 1}, "joint", ("part",), (("earlier",),))
    changed = [replace(example, turns=(replace(turn, **{name: "other"}),)) for name in vars(turn)]
    changed += [replace(example, **{name: "other"}) for name in vars(example) if name != "turns"]
    found = [hash_example(task, x) for x in (example, *changed)]
    for name in ("joint", "separator"):
        monkeypatch.setattr(type(task), name, "other")
        found.append(hash_example(task, example))
    assert len(set(found)) == len(found) == 16


@pytest.mark.slow
def test_an_entry_of_an_unchanged_version_is_kept(tmp_path, monkeypatch, capsys):
    """Recording again refuses to overwrite outputs unless the version was raised."""
    monkeypatch.setattr(record, "HERE", tmp_path)
    monkeypatch.setattr(record, "find_names", lambda kind: ["niah_single_1"] if kind == "tasks" else [])
    path = tmp_path / "tasks.json"
    assert record.update("tasks") == []
    recorded = json.loads(path.read_text())
    recorded["niah_single_1"]["output"]["single"] = "another"
    path.write_text(json.dumps(recorded))
    assert record.update("tasks") == ["niah_single_1"]
    assert json.loads(path.read_text()) == recorded
    recorded["niah_single_1"]["version"] = "0"
    path.write_text(json.dumps(recorded))
    assert record.update("tasks") == []
    assert json.loads(path.read_text()) != recorded
    capsys.readouterr()
