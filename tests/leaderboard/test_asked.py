"""The command that a run's page shows makes that run."""

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
    """Requests of the command line, which go no further."""
    found = []
    monkeypatch.setattr(cli.run, "_run_task", lambda given, *_, **__: found.append(given) or 0)
    return found


@pytest.mark.parametrize("path", CURATED[::25], ids=lambda x: x.parent.name)
def test_a_command_asks_for_its_spec(asked, path):
    """Typed into a shell, option by option; reference history goes without saying."""
    spec = read_file(path, Result).spec
    assert cli.call(shlex.split(write_command(spec))[1:]) == 0
    assert make_request(asked[0], Path("runs")) == replace(write_request(spec), history=None, suite=None)


@pytest.mark.parametrize("text", ["a b", "'", '"$(touch x)"', "`id`", "a;b", "ä\u202e", "--json"])
def test_whatever_a_name_holds_is_one_word_of_the_shell(asked, text):
    """And no option."""
    spec = read_file(CURATED[0], Result).spec
    spec = spec.model_copy(update={"method": spec.method.model_copy(update={"name": text, "settings": {"a": text}})})
    assert cli.call(shlex.split(write_command(spec))[1:]) == 0
    assert (asked[0]["method"], asked[0]["set"]) == (text, {"a": text})
