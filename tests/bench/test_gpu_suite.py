"""scripts/gpu_suite.sh: stages run independently, finished ones are not repeated, and missing packages are named."""

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
    """With the list of stages."""
    done = suite("--dry", "speed")
    assert done.returncode == 2
    stages = "probe methods core tests all answers lengths largest long models diffusion"
    assert f"unknown 'speed'. Stages: {stages}." in done.stderr


def test_missing_packages_are_named_at_once(tmp_path):
    """With the command that downloads them; nothing runs before."""
    python = tmp_path / "python3"
    python.write_text('#!/bin/sh\ncase "$2" in *pydantic_core*) exit 1;; *) exit 0;; esac\n')
    python.chmod(0o755)
    done = suite("--dry", "--wheels", tmp_path / "none", "--out", tmp_path / "out", path=tmp_path)
    assert done.returncode == 2
    assert "Python lacks pydantic_core, and" in done.stderr
    assert f"-d {tmp_path / 'none'} pydantic" in done.stderr
    assert not (tmp_path / "out").exists()


def test_failed_tests_do_not_keep_stages_from_running(tmp_path):
    """The suite goes on and ends with code 1."""
    python = tmp_path / "python3"
    python.write_text('#!/bin/sh\ncase "$*" in *pytest*) echo one failed; exit 1;; *) exit 0;; esac\n')
    python.chmod(0o755)
    done = suite("--dry", "--out", tmp_path / "out", "tests", "core", path=tmp_path)
    assert done.returncode == 1
    assert "one failed" in done.stderr and "tests failed" in done.stderr
    assert "gpu_suite: core took" in done.stderr


def test_an_interrupted_stage_of_an_earlier_call_is_continued(tmp_path):
    """--from copies its file to the new folder; a stage that is done is not run again."""
    earlier = tmp_path / "earlier"
    earlier.mkdir()
    (earlier / "core.json").write_text('{"status": "done", "cells": [{"outcome": "skipped"}]}')
    (earlier / "probe.json").write_text("{}")
    python = tmp_path / "python3"
    python.write_text("#!/bin/sh\nexit 0\n")
    python.chmod(0o755)
    done = suite("--dry", "--from", earlier, "--out", tmp_path / "out", "probe", "core", path=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "probe is done" in done.stderr and "core took" in done.stderr
    assert (tmp_path / "out" / "core.json").read_text() == (earlier / "core.json").read_text()


def test_a_stage_whose_gpu_is_lost_is_tried_again(tmp_path):
    """kvbench bench ends with code 3 and continues in a new process, three times at most."""
    python = tmp_path / "python3"
    calls = tmp_path / "calls"
    lost = f'echo call >>{calls}; echo "{{}}" >{tmp_path}/core.json; exit 3'
    python.write_text(f'#!/bin/sh\ncase "$*" in *--seconds*) {lost};; esac\n')
    python.chmod(0o755)
    done = suite("--dry", "--out", tmp_path, "core", path=tmp_path)
    assert done.returncode == 1
    assert calls.read_text().split() == ["call"] * 3


@pytest.mark.slow
def test_every_kind_of_stage_runs_on_a_cpu_and_is_not_run_again(tmp_path):
    """Each writes a complete file; a second call prints the same table and runs nothing.

    `methods` and `core` are `lengths` with more methods, and `all`, `long` and `models` are one of these at full size.
    """
    stages = ["probe", "tests", "lengths", "largest", "answers"]
    first = suite("--dry", "--out", tmp_path, *stages)
    assert first.returncode == 0, first.stderr
    assert {x.name for x in tmp_path.iterdir()} == {"tests.txt", *(f"{x}.json" for x in stages if x != "tests")}
    for stage in stages[2:]:
        bench = Bench.model_validate_json((tmp_path / f"{stage}.json").read_text())
        assert bench.status == "done"
        assert {x.outcome for x in bench.cells} == {"ok"}
    again = suite("--dry", "--out", tmp_path, *stages)
    assert again.stdout == first.stdout
    assert again.stderr.count(" is done: ") == len(stages)
