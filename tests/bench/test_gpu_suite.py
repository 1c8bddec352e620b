"""scripts/gpu_suite.sh: stages run from beginning to end, one that is done is left, and what is missing is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvbench.bench.records import Bench

ROOT = Path(__file__).parents[2]
BIN = str(Path(sys.executable).parent)


def suite(*arguments, path=BIN):
    """Run the script with a folder in front of the PATH."""
    return subprocess.run(
        [ROOT / "scripts" / "gpu_suite.sh", *map(str, arguments)], capture_output=True, text=True, check=False,
        env={**os.environ, "PATH": f"{path}:{os.environ['PATH']}"},
    )


def test_unknown_stages_are_refused():
    """With those that there are."""
    done = suite("--dry", "speed")
    assert done.returncode == 2
    assert "unknown 'speed'. Stages: tests kernels steps lengths answers long models diffusion." in done.stderr


def test_what_python_lacks_is_named_at_once(tmp_path):
    """With the command that fetches it; nothing is run before."""
    python = tmp_path / "python3"
    python.write_text('#!/bin/sh\ncase "$2" in *pydantic_core*) exit 1;; *) exit 0;; esac\n')
    python.chmod(0o755)
    done = suite("--dry", "--wheels", tmp_path / "none", "--out", tmp_path / "out", path=tmp_path)
    assert done.returncode == 2
    assert "Python lacks pydantic_core, and" in done.stderr
    assert f"-d {tmp_path / 'none'} pydantic" in done.stderr
    assert not (tmp_path / "out").exists()


def test_red_tests_end_the_suite(tmp_path):
    """Nothing is timed after them."""
    python = tmp_path / "python3"
    python.write_text('#!/bin/sh\ncase "$*" in *pytest*) echo one failed; exit 1;; *) exit 0;; esac\n')
    python.chmod(0o755)
    done = suite("--dry", "--out", tmp_path / "out", "tests", "kernels", path=tmp_path)
    assert done.returncode == 1
    assert "one failed" in done.stderr and "tests are red, so nothing is timed" in done.stderr
    assert not (tmp_path / "out" / "kernels.json").exists()


@pytest.mark.slow
def test_every_stage_runs_on_a_cpu_and_is_not_run_again(tmp_path):
    """A file for each, whole; a second call prints the same table and runs nothing."""
    stages = ["tests", "kernels", "steps", "lengths", "answers"]
    first = suite("--dry", "--out", tmp_path, *stages)
    assert first.returncode == 0, first.stderr
    assert {x.name for x in tmp_path.iterdir()} == {"tests.txt", *(f"{x}.json" for x in stages[1:])}
    for stage in stages[1:]:
        bench = Bench.model_validate_json((tmp_path / f"{stage}.json").read_text())
        assert bench.status == "done"
        assert {x.outcome for x in bench.cells} == {"ok"}
    again = suite("--dry", "--out", tmp_path, *stages)
    assert again.stdout == first.stdout
    assert again.stderr.count(" is done: ") == len(stages)
