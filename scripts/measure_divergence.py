"""Measures how often greedy answers of the same run diverge between processors: `python scripts/measure_divergence.py`.

Runs the same samples in processes that are limited to older instruction sets, which compute in another order, and
counts the first other token of each answer. The limit in kvbench/leaderboard/verification/rerun.py rests on this table.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from kvbench.leaderboard.verification.rerun import count_divergences
from kvbench.runs.files import read_lines
from kvbench.runs.journal import Line
from kvbench.runs.options import Request
from kvbench.runs.prepare import prepare
from kvbench.runs.runner import run

PROCESSORS = {
    "this": {},
    "this, 2 threads": {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"},
    "AVX-512 without bfloat16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "MKL_ENABLE_INSTRUCTIONS": "AVX512"},
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "AVX": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "AVX", "MKL_ENABLE_INSTRUCTIONS": "AVX"},
    "SSE": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
}
"""Environment variables that limit torch and its libraries to the instructions of a processor."""
METHODS = ("snapkv", "kivi")
TASKS = ("niah_multikey_1", "list-copy")
DTYPES = ("bfloat16", "float32")
SAMPLES, LENGTH = 5, 384


def run_all(out: Path) -> None:
    """Run everything on this processor."""
    for dtype in DTYPES:
        model = None
        for task, method in itertools.product(TASKS, METHODS):
            asked = Request(
                method, task, samples=SAMPLES, length=LENGTH, device="cpu", dtype=dtype, out=out / dtype,
            )
            job = prepare(asked, model)
            model = job.loaded
            run(job)


def read_journals(out: Path, dtype: str) -> dict[tuple[str, int, int], Line]:
    """The answers of all runs of one element type, by run, sample and turn."""
    journals = sorted((out / dtype).glob("*/samples.jsonl"))
    return {(path.parent.name, x.index, x.turn): x for path in journals for x in read_lines(path)}


def main() -> None:
    """Run in one process per processor, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="run everything on this processor, into this folder")
    out = parser.parse_args().out
    if out is not None:
        run_all(out)
        return
    with tempfile.TemporaryDirectory() as folder:
        for name, variables in PROCESSORS.items():
            command = [sys.executable, __file__, "--out", str(Path(folder) / name)]
            subprocess.run(command, check=True, env={**os.environ, **variables})  # noqa: S603  # this file
        print("| element type | processors | answers | tokens compared | divergences | per token |")
        print("| --- | --- | --- | --- | --- | --- |")
        for dtype in DTYPES:
            ours = read_journals(Path(folder) / "this", dtype)
            for name in list(PROCESSORS)[1:]:
                theirs = read_journals(Path(folder) / name, dtype)
                pairs = [(ours[x], theirs[x]) for x in sorted(ours)]
                divergences, compared = count_divergences(pairs)
                print(f"| {dtype} | this, {name} | {len(pairs)} | {compared} | {divergences} | "
                      f"{divergences / compared:.2%} |")


if __name__ == "__main__":
    main()
