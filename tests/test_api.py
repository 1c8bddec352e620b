"""The Python entry point: quick to import, typed from the table of options, and equal to the command line."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvbench
from kvbench.errors import UserError
from kvbench.hf import load_model
from kvbench.runs.options import list_options

ROOT = Path(__file__).parent.parent
TOYS = Path(__file__).parent / "toys" / "toy.py"
LAST, TOY = f"{TOYS}:Last", f"{TOYS}:Toy"


@pytest.mark.slow  # as tests/cli/test_startup.py
@pytest.mark.parametrize("code", [
    "import kvbench",
    "from kvbench.cli import call\nassert call(['--help']) == 0",
    "from kvbench.cli import call\nassert call(['list', 'methods']) == 0",
])
def test_torch_is_not_imported_before_it_is_needed(code):
    """Importing, help and lists stay quick."""
    code = f"import sys\n{code}\nsys.exit(bool({{'torch', 'transformers', 'numpy'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_there():
    """And another name is an AttributeError."""
    assert all(getattr(kvbench, x) is not None for x in kvbench.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        kvbench.nothing  # noqa: B018  # asked for its error


def test_the_arguments_of_run_are_the_options_of_the_table():
    """Names, order and defaults."""
    found = inspect.signature(kvbench.run).parameters
    assert list(found) == [*(x.name for x in list_options()), "out"]
    for option in list_options():
        default = found[option.name].default
        assert (default is inspect.Parameter.empty) == option.required
        assert option.required or default == ({} if option.repeatable else option.default)


def test_a_call_is_the_run_of_the_command(request, arguments, tmp_path):
    """The same id, files and result, also with a loaded model; settings are mappings."""
    answer = request.getfixturevalue("kvbench")(
        *arguments, "--method", LAST, "--budget", "20", "--set", "fails_at=9", "--gen", "max_new_tokens=2",
    )
    assert answer.code == 0, answer.err
    name = arguments[arguments.index("--model") + 1]
    given = {
        "method": LAST, "task": TOY, "budget": 20, "samples": 4, "method_settings": {"fails_at": 9},
        "generation": {"max_new_tokens": 2}, "device": "cpu",
    }
    for model, out in ((name, "runs"), (name, "other"), (load_model(name), "third")):
        result = kvbench.run(model=model, out=tmp_path / out, **given)
        assert result.run_id == answer.json["run_id"]
        document = json.loads(result.model_dump_json())
        assert document["score"] == answer.json["score"]
        assert (tmp_path / out / result.run_id / "result.json").is_file()


@pytest.mark.parametrize(("given", "message"), [
    ({"samples": "x"}, "samples must be a whole number, got 'x'."),
    ({"samples": None}, "samples must be a whole number, got None."),
    ({"seed": True}, "seed must be a whole number, got True."),
    ({"length": 2.5}, "length must be None or a whole number, got 2.5."),
    ({"task": None}, "task must be text, got None."),
    ({"recompress": "no"}, "recompress must be True or False, got 'no'."),
    ({"method_settings": ["window=8"]}, r"method_settings must be a dict of settings by name, got \['window=8'\]."),
])
def test_an_argument_of_another_type_is_refused(given, message):
    """By name and value, before anything is loaded."""
    with pytest.raises(UserError, match=f"^{message}$"):
        kvbench.run(**{"method": LAST, "task": TOY, **given})


@pytest.mark.parametrize(("given", "message"), [
    ({"dtype": "bfloat16"}, r"dtype 'bfloat16' contradicts the loaded model \(float32\)"),
    ({"device": "cuda"}, r"device 'cuda' contradicts the loaded model \(cpu\)"),
    ({"device_map": "auto"}, "device_map 'auto' has no effect on a loaded model"),
])
def test_a_loaded_model_is_not_loaded_otherwise(model_folder, tmp_path, given, message):
    """A value that contradicts it is refused with the function that takes it; an equal one is not."""
    model = load_model(str(model_folder), dtype="float32")
    common = {"method": "full", "task": TOY, "model": model, "samples": 1, "out": tmp_path}
    with pytest.raises(UserError, match=f"^{message}. Give it to kvbench.load_model"):
        kvbench.run(**common, **given)
    assert kvbench.run(**common, dtype="float32", device="cpu").status == "ok"


def test_a_loaded_model_that_is_spread_runs_on_torch(model_folder, tmp_path, monkeypatch):
    """Triton launches on the current GPU, wherever the entries are, so it is refused as with --device-map."""
    pytest.importorskip("triton", reason="Triton is for Linux")
    model = load_model(str(model_folder), dtype="float32")
    monkeypatch.setattr(model.module, "hf_device_map", {"model": 0, "lm_head": 1}, raising=False)
    with pytest.raises(UserError, match="kernels 'triton' run on one GPU"):
        kvbench.run(method="full", task=TOY, model=model, samples=1, kernels="triton", out=tmp_path)


def test_ctrl_c_is_no_bad_input(model_folder, tmp_path, monkeypatch, capsys):
    """A loop that goes on after a UserError ends; the line says what is saved."""
    def press(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("kvbench.runs.runner.run_one", press)
    with pytest.raises(KeyboardInterrupt):
        kvbench.run(method="full", task=TOY, model=str(model_folder), samples=2, device="cpu", out=tmp_path)
    assert "interrupted: 0 of 2 samples are saved" in capsys.readouterr().err


def test_runs_are_compared_by_result_folder_and_id(model_folder, tmp_path, capsys):
    """As `kvbench compare` does, with its warnings on standard error."""
    given = {"task": TOY, "model": str(model_folder), "samples": 4, "device": "cpu", "out": tmp_path}
    full, last = (kvbench.run(method=x, **given) for x in ("full", LAST))
    found = [
        kvbench.compare(full, last, out=tmp_path), kvbench.compare(full.run_id, tmp_path / last.run_id, out=tmp_path),
    ]
    assert found[0] == found[1]
    assert found[0][0].n == 4
    assert "warning" not in capsys.readouterr().err
    with pytest.raises(UserError, match="two or more runs"):
        kvbench.compare(full)


@pytest.mark.slow
def test_the_documented_example_runs(tmp_path, monkeypatch):
    """Every Python block of docs/python.md, with the names of those before it."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 3
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/python.md", "exec"), names)
