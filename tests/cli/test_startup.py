"""Start-up: commands that run no model do not import the heavy packages. `make bench` measures the seconds."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"numpy", "scipy", "tokenizers", "torch", "transformers"}
SCRIPT = "import sys; {}; print(*sys.modules, file=sys.stderr)"


def imported(statement: str) -> set[str]:
    """Top-level names of the modules that a new process has imported after a statement."""
    command = [sys.executable, "-c", SCRIPT.format(statement)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)  # this interpreter
    return {x.partition(".")[0] for x in done.stderr.split()}


@pytest.mark.parametrize("statement", [
    "import kvbench",
    "from kvbench.cli import call; call(['--help'])",
    "from kvbench.cli import call; call(['--version'])",
])
def test_help_needs_no_package_but_typer(statement):
    """Neither pydantic nor rich, which take longer to import than the rest of the command line."""
    assert not imported(statement) & (HEAVY | {"pydantic", "rich"})


@pytest.mark.parametrize("what", ["methods", "tasks", "models", "suites"])
def test_lists_import_no_heavy_package(what):
    """Methods and tasks are listed from the syntax trees of their files."""
    assert not imported(f"from kvbench.cli import call; call(['list', '{what}'])") & HEAVY
