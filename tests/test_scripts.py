"""Programs of scripts/ refuse wrong arguments in one line, with code 2."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"


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
    path = SCRIPTS / f"{name}.py"
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    spec = importlib.util.spec_from_file_location(f"script_{name}", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
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
