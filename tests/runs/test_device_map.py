"""A run whose model is spread over devices is the same run, and records the places of its parts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvbench.runs.files import read_lines
from kvbench.runs.request import read_device_map

pytest.importorskip("accelerate", reason="accelerate is not installed: pip install 'kvbench[accelerate]'")

TOYS = Path(__file__).parents[1] / "toys" / "toy.py"
LAST = f"{TOYS}:Last"
SPREAD = {
    "model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu",
    "model.rotary_emb": "cpu", "lm_head": "cpu",
}


@pytest.fixture
def spread(tmp_path: Path) -> Path:
    """One of the two layers on disk."""
    path = tmp_path / "spread.json"
    path.write_text(json.dumps(SPREAD))
    return path


@pytest.mark.slow
def test_a_spread_run_is_the_same_run(kvbench, arguments, tmp_path, spread):
    """Id, answers, scores, entries and bytes are equal; the places are in its environment and are compared."""
    whole = kvbench(*arguments, "--method", LAST, "--mode", "multi-turn").json
    elsewhere = ("--out", tmp_path / "other")
    answer = kvbench(*arguments, "--method", LAST, "--mode", "multi-turn", "--device-map", spread, *elsewhere)
    assert answer.code == 0, answer.err
    assert f"spread by {spread}" in answer.err
    assert answer.json["environment"]["device_map"] == SPREAD
    assert whole["environment"]["device_map"] is None
    for part in ("run_id", "spec", "score", "scores", "agreement", "output", "memory", "effect"):
        assert answer.json[part] == whole[part], part
    folders = [tmp_path / x / whole["run_id"] for x in ("runs", "other")]
    first, second = (read_lines(x / "samples.jsonl") for x in folders)
    assert [(x.ids, x.score, x.bytes) for x in first] == [(x.ids, x.score, x.bytes) for x in second]
    assert "environment.device_map differs" in kvbench("compare", *folders).err
    again = kvbench(*arguments, "--method", LAST, "--mode", "multi-turn", "--device-map", spread)
    assert "already finished" in again.err


@pytest.mark.parametrize(("options", "message"), [
    ("--device-map=audo", "unknown device map 'audo'. Did you mean 'auto'?"),
    ("--device-map=none.json", "device map 'none.json' cannot be read"),
    ("--device-map={folder}/cut.json", "cut.json' cannot be read"),
    ("--device-map={folder}/list.json", "list.json' must be an object of places by module name"),
    ("--device-map={folder}/places.json", "places.json' must be an object of places by module name"),
    ("--device-map={folder}/gpu.json", "device 'cuda:7' is not on this machine"),
    ("--device-map={folder}/tpu.json", "unknown device 'tpu'"),
    ("--device-map=auto --device=cuda", "device 'cuda' is not"),
    ("--device-map=auto --model=random:.", "has no files for a device map"),
])
def test_a_bad_map_is_refused(kvbench, arguments, tmp_path, monkeypatch, options, message):
    """Before the model is loaded or a file written."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    files = {"cut": '{"a', "list": "[0]", "places": '{"a": 1.5}', "gpu": '{"": 7}', "tpu": '{"": "tpu"}'}
    for name, text in files.items():
        (tmp_path / f"{name}.json").write_text(text)
    answer = kvbench(*arguments, "--method", LAST, *options.format(folder=tmp_path).split())
    assert answer.code == 2
    (line,) = answer.err.splitlines()
    assert message in line
    assert not (tmp_path / "runs").exists()


def test_a_device_that_contradicts_the_map_is_refused(kvbench, arguments, spread, monkeypatch):
    """A GPU that the map does not name is refused."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    answer = kvbench(*arguments, "--method", LAST, "--device", "cuda", "--device-map", spread)
    assert answer.code == 2
    assert f"device 'cuda' contradicts device map '{spread}'" in answer.err


def test_a_map_needs_accelerate(monkeypatch):
    """The message says how to install it."""
    monkeypatch.setattr("kvbench.runs.request.importlib.util.find_spec", lambda _: None)
    with pytest.raises(Exception, match=r"pip install 'kvbench\[accelerate\]'"):
        read_device_map("auto")


def sweep_file(folder: Path, model: Path, cells: str) -> Path:
    """A sweep of toy runs."""
    path = folder / "sweep.toml"
    path.write_text(
        f'out = "{folder / "runs"}"\n[run]\ntask = "{TOYS}:Toy"\nmodel = "{model}"\nsamples = 2\n'
        f'method = "{LAST}"\n{cells}'
    )
    return path


@pytest.mark.slow
def test_a_sweep_spreads_models_too(kvbench, model_folder, tmp_path, spread):
    """Each map loads the model again; a cell that differs only in its map is the same run."""
    cells = f'[[grid]]\ndevice-map = "{spread}"\n[[grid]]\nseed = 1\n'
    answer = kvbench("sweep", sweep_file(tmp_path, model_folder, cells), "--json")
    assert answer.code == 0, answer.err
    results = [json.loads((Path(x["folder"]) / "result.json").read_text()) for x in answer.json]
    assert [x["environment"]["device_map"] for x in results] == [SPREAD, None]
    file = sweep_file(tmp_path, model_folder, f'[[grid]]\ndevice-map = "{spread}"\n[[grid]]\n')
    file.write_text(file.read_text() + 'device = "cpu"\n')
    answer = kvbench("sweep", file)
    assert answer.code == 2
    assert "are the same run" in answer.err


@pytest.mark.parametrize(("options", "message"), [
    (("--workers", "2"), "Use --workers 1"), (("--executor", "ray"), "Use --executor local"),
])
def test_a_spread_cell_shares_its_machine_with_no_other(
    kvbench, model_folder, tmp_path, spread, monkeypatch, options, message
):
    """The map may use every GPU, and executors give a cell one."""
    monkeypatch.setattr("kvbench.sweep.ray.load_ray", lambda: type("Ray", (), {
        "init": lambda **_: None, "shutdown": lambda: None, "cluster_resources": dict,
    }))
    cells = f'[[grid]]\ndevice-map = "{spread}"\n'
    answer = kvbench("sweep", sweep_file(tmp_path, model_folder, cells), *options)
    assert answer.code == 2
    assert message in answer.err
    assert not (tmp_path / "runs").exists()
