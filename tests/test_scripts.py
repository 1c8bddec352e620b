"""Programs of scripts/ refuse wrong arguments in one line, with code 2."""

from __future__ import annotations

import importlib.util
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parent.parent / "scripts"


def load(name, arguments, monkeypatch):
    """A program as a module, with these arguments."""
    path = SCRIPTS / f"{name}.py"
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    spec = importlib.util.spec_from_file_location(f"script_{name}", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("command", "words"), [
    ("explain_results nope", "unknown model 'nope'"),
    ("explain_results mini:nope", "unknown task 'nope'"),
    ("measure_window nope --length 384 --contexts 1", "unknown model 'nope'"),
    ("measure_rounding nope", "unknown model 'nope'"),
    ("measure_rounding", "the following arguments are required: model"),
    ("gpu_probe", "the following arguments are required: file"),
    ("mini_gate", "the following arguments are required: folder"),
    ("mini_gate nope", "no model folder nope"),
    ("train_part ftp --work WORK --model nope", "unknown model 'nope'"),
    ("bench peak", "unknown bench peak. Allowed: startup"),
])
def test_a_wrong_argument_is_named(command, words, monkeypatch, capsys, tmp_path):
    name, *arguments = command.replace("WORK", str(tmp_path)).split()
    module = load(name, arguments, monkeypatch)
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 2
    assert words in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("show_*.py")), ids=lambda x: x.stem)
def test_a_script_without_arguments_takes_none(path, monkeypatch, capsys):
    """It would write its pages for `--help`."""
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    monkeypatch.setattr(Path, "write_text", lambda *_, **__: pytest.fail("a page was written"))
    monkeypatch.setattr(Path, "write_bytes", lambda *_: pytest.fail("a picture was drawn"))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert ended.value.code == 0 and "Writes" in capsys.readouterr().out


def test_a_continued_part_keeps_the_place_of_its_rows(monkeypatch, tmp_path):
    """A row that was in the file was not measured by the newest commit and machine."""
    bench, drafted = load("bench", ["lossless"], monkeypatch), sys.modules["bench_reuse"]
    bench.OUT = tmp_path / "cpu.json"
    old = {"method": "prompt-lookup", "settings": {}, "speed": 1.0}
    bench.OUT.write_text(json.dumps({"lossless": {"measured": {"git": "old"}, "rows": [old]}}))
    for name in ("load_model", "calibration_ids", "record"):
        monkeypatch.setattr(drafted, name, lambda *_, **__: torch.zeros(1, 9))
    monkeypatch.setattr(drafted, "bench_draft", lambda _, name, settings, *__: {"method": name, "settings": settings})
    bench.main()
    part = json.loads(bench.OUT.read_text())["lossless"]
    assert part["measured"] == {"git": "old"} and part["rows"][0] == old
    assert all("machine" in x["measured"] for x in part["rows"][1:]) and len(part["rows"]) == len(drafted.DRAFTED)
