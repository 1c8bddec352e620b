"""Code that the files of a run name is not executed when the run is read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from kvbench.errors import UserError
from kvbench.registry import refuse_unregistered
from kvbench.runs.spec import RunSpec

CURATED = Path(__file__).parents[2] / "results" / "cpu-2-cores"


@pytest.fixture
def forge(tmp_path, monkeypatch):
    """Returns the folder of a curated run that names a file next to it, which shows that it ran."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")

    def made(part: str, name: str) -> Path:
        folder = tmp_path / f"{part}-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(next(CURATED.glob("snapkv-niah*")), folder)
        spec, result = (json.loads((folder / f"{x}.json").read_text()) for x in ("spec", "result"))
        for document in (spec, result["spec"], result):
            document[part]["name"] = name
        result["run_id"] = RunSpec.model_validate(spec).run_id
        (folder / "spec.json").write_text(json.dumps(spec))
        (folder / "result.json").write_text(json.dumps(result))
        return folder

    return made


@pytest.mark.parametrize("name", ["x.py", "./x", "lm-eval:x.yaml", "x.toml", "snapkv+adakv"])
def test_score_executes_no_task_that_a_run_names(kvbench, forge, tmp_path, name):
    answer = kvbench("score", forge("task", name))
    assert answer.code == 2
    assert f"task '{name}' of the run is not registered" in answer.err
    assert "--task path/to/file.py:Class" in answer.err
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["x.py", "x.py+adakv", "./x"])
def test_explain_executes_no_method_that_a_run_names(kvbench, forge, tmp_path, name):
    first, other = forge("method", name), forge("method", "snapkv")
    for pair in ((first, other), (other, first)):
        answer = kvbench("explain", *pair, "--json")
        notes = [x["note"] for x in answer.json["differences"] if x["name"] == "method"]
        if pair == (other, first):  # the other run's method would replace the first's
            assert notes[0].startswith(f"cannot be run alone: not allowed: method '{name}' of the run is not register")
    assert not (tmp_path / "ran").exists()


def test_explain_executes_no_task_that_runs_name(kvbench, forge, tmp_path):
    runs = [forge("task", "x.py"), forge("task", "x.py")]
    assert kvbench("explain", *runs, "--run", "--out", tmp_path / "runs").code == 0
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("kind", "name"), [("method", "snapkv"), ("method", "snapkv+adakv"), ("task", "niah")])
def test_registered_names_aliases_and_compositions_are_accepted(kind, name):
    refuse_unregistered(kind, name, "")


@pytest.mark.parametrize("name", ["", "+", "snapkv+", "snapkv+x.py", "theirs"])
def test_any_other_name_is_refused(name):
    with pytest.raises(UserError, match="executes no file that a run names"):
        refuse_unregistered("method", name, "")
