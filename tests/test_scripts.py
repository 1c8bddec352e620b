"""Programs of scripts/ refuse wrong arguments in one line, with code 2."""

from __future__ import annotations

import importlib.util
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
])
def test_a_wrong_argument_is_named(command, words, monkeypatch, capsys):
    name, *arguments = command.split()
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
