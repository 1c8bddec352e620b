"""The command on a run's page reproduces that run."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench import cli
from kvbench.runs.command import write_command, write_request
from kvbench.runs.files import read_file
from kvbench.runs.results import Result
from kvbench.sweep.file import make_request

CURATED = sorted((Path(__file__).parents[2] / "results" / "cpu-2-cores").glob("*/result.json"))


@pytest.fixture
def asked(monkeypatch):
    """Requests made by the command line, which are not run."""
    found = []
    monkeypatch.setattr(cli.run, "_run_task", lambda given, *_, **__: found.append(given) or 0)
    return found


@pytest.mark.parametrize("path", CURATED[::25], ids=lambda x: x.parent.name)
def test_the_command_reproduces_the_spec(asked, path):
    """Typed into a shell, on any machine; reference history is the default and is omitted."""
    spec = read_file(path, Result).spec
    assert cli.call(shlex.split(write_command(spec))[1:]) == 0
    wanted = replace(write_request(spec), history=None, suite=None, device=spec.device)
    assert make_request(asked[0], Path("runs")) == wanted


@pytest.mark.parametrize("text", ["a b", "'", '"$(touch x)"', "`id`", "a;b", "ä\u202e", "--json"])
def test_names_are_quoted_for_the_shell(asked, text):
    """Names are never parsed as options."""
    spec = read_file(CURATED[0], Result).spec
    spec = spec.model_copy(update={"method": spec.method.model_copy(update={"name": text, "settings": {"a": text}})})
    assert cli.call(shlex.split(write_command(spec))[1:]) == 0
    assert (asked[0]["method"], asked[0]["set"]) == (text, {"a": text})
