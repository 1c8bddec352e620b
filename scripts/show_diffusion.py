"""Writes the tables of docs/diffusion.md: scores, steps, positions, bytes and times of every policy.

The command line makes the results:

    kvbench sweep scripts/sweeps/curated-diffusion.toml --workers 2
    kvbench sweep scripts/sweeps/prefix.toml
    python scripts/show_diffusion.py
"""

from __future__ import annotations

from pathlib import Path

from pages import DOCS, RESULTS, table, take_no_arguments, write

from kvbench.analysis.load import load_run
from kvbench.runs.results import Result

FOLDERS, PAGE = ("cpu-2-cores-diffusion", "mini-diffusion-prefix"), DOCS / "diffusion.md"
TASKS = ("niah_multikey_1", "list-copy")
COLUMNS = (
    "policy", "score", "steps", "positions per step", "of all", "MB read per step", "s per answer",
    "speed-up over no cache", "over half the steps",
)


def name(result: Result) -> str:
    """The policy with what its run sets."""
    how = result.diffusion
    assert how is not None
    notes = [
        *([f"blocks of {how.block:.0f}"] if how.block < how.response_length else []),
        *(["random remasking"] if how.remasking == "random" else []),
        *([f"threshold {how.threshold}"] if how.threshold is not None else []),
    ]
    where = "" if result.model.id == "mini-diffusion" else f" on `{result.model.id}`"
    return ", ".join([f"`{result.method.name}`{where}", *notes])


def row(result: Result) -> list[str]:
    """The numbers of a run; no cache and half the steps were timed in the same job."""
    how = result.diffusion
    assert how is not None
    assert result.latency is not None
    assert result.latency.tokens_per_s is not None
    assert result.memory is not None
    assert result.n_questions is not None
    none, half = how.baselines["none"], how.baselines.get("half-steps")
    return [
        name(result), f"{result.score.mean:.2f}", f"{how.nfe:.1f}", f"{how.computed_tokens_per_step:.0f}",
        f"{how.computed_share:.0%}", f"{result.memory.read_bytes_per_step / 1e6:.1f}",
        f"{result.output.tokens / result.latency.tokens_per_s / result.n_questions:.2f}", f"{none.speedup:.2f}",
        "-" if half is None else f"{half.speedup:.2f}",
    ]


def make_texts() -> dict[Path, dict[str, str]]:
    """The tables by their markers, the fastest policy first."""
    results = [load_run(x.parent).result for folder in FOLDERS for x in (RESULTS / folder).glob("*/result.json")]
    return {PAGE: {
        f"diffusion-{task}": table(COLUMNS, sorted(
            (row(x) for x in results if x.task.name == task), key=lambda x: (-float(x[-2]), x[0])
        )) for task in TASKS
    }}


if __name__ == "__main__":
    take_no_arguments(__doc__)
    write(make_texts())
