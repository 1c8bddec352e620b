"""Start-up: commands that run no model do not import the heavy packages. `make bench` measures the seconds."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvbench.cli import AGAIN

HERE = Path(__file__).parents[2]
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


def test_lists_import_no_heavy_package():
    """Methods and tasks are listed from the syntax trees of their files."""
    lists = "[call(['list', x]) for x in ('methods', 'tasks', 'models', 'suites')]"
    assert not imported(f"from kvbench.cli import call; {lists}") & HEAVY


def test_the_package_is_a_command():
    """`python -m kvbench` works where the script is not on the path."""
    command = [sys.executable, "-m", "kvbench", "--version"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.startswith("kvbench ")


@pytest.mark.few(2)
@pytest.mark.parametrize("line", [
    "check snapkv", "check niah", "plan --method snapkv --model mini", "bench --method snapkv",
    "run --method snapkv --task niah",
])
def test_a_line_is_printed_before_torch_is_imported(tmp_path, line):
    """Here the import ends the process."""
    (tmp_path / "torch.py").write_text("import os; os._exit(7)")
    code = "import sys; sys.argv[1:] = sys.argv[1].split(); from kvbench.cli import main; main()"
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code, line], env={**os.environ, "PYTHONPATH": path}, capture_output=True,
        text=True, check=False,
    )
    assert (done.returncode, done.stderr) == (7, "importing torch and transformers, which takes seconds ...\n")


def test_a_terminated_run_says_how_it_continues(tmp_path):
    """And ends by the signal; here the import of torch sends it."""
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n")
    done = subprocess.run(
        [sys.executable, "-m", "kvbench", "run", "--method", "snapkv", "--task", "niah"], text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}, capture_output=True,
    )
    assert done.returncode == -signal.SIGTERM
    assert done.stderr.endswith(f"\nkvbench: terminated. {AGAIN}\n")


def test_characters_that_the_locale_lacks_are_replaced_in_tables_and_escaped_in_json(tmp_path):
    """As the arrow next to a metric's name, and those of an answer."""
    shutil.copytree(next((HERE / "results" / "cpu-2-cores").glob("snapkv-niah*")), tmp_path / "run")
    path = tmp_path / "run" / "result.json"
    path.write_text(path.read_text().replace('"string_match_all"', '"string_match_all_\N{EURO SIGN}"'))
    done = subprocess.run(
        [sys.executable, "-m", "kvbench", "show", str(tmp_path / "run"), "--json"], capture_output=True, check=False,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(HERE)},
    )
    table, _, document = done.stdout.decode("ascii").rpartition("\n{")
    assert done.returncode == 0, done.stderr
    assert "string_match_all_? ? (0 to 1)" in table
    assert json.loads("{" + document)["score"]["metric"] == "string_match_all_\N{EURO SIGN}"


@pytest.mark.few
@pytest.mark.parametrize(("line", "said"), [
    ("suggest --model mini --memory 25% --mode single --results .", "reading runs ..."),
    ("report . -o page.html", "reading runs ..."), ("reproduce --list", "reading the claims of papers ..."),
])
def test_a_line_is_printed_before_files_are_read(tmp_path, line, said):
    """Here the import of the module that reads them ends the process."""
    code = (
        "import sys; sys.argv[1:] = sys.argv[1].split(); from kvbench.cli import main; "
        "sys.modules |= dict.fromkeys(('kvbench.analysis.doubts', 'kvbench.analysis.load', 'kvbench.reproduce.claims'))"
        "; main()"
    )
    done = subprocess.run([sys.executable, "-c", code, line], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "halted; None in sys.modules" in done.stderr
    assert done.stderr.startswith(f"{said}\n")


def test_the_collector_works_as_usual_after_the_imports():
    """It is rare during them only; garbage of a run may hold tensors."""
    script = """import gc; usual = gc.get_threshold(); import kvbench.cli as cli; cli.collect_rarely()
assert gc.get_threshold() != usual; from kvbench.collector import collect_as_usual; collect_as_usual()
assert gc.get_threshold() == usual and gc.isenabled() and gc.get_freeze_count()"""
    subprocess.run([sys.executable, "-c", script], check=True)
