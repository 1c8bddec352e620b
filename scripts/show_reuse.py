"""Writes the tables of reuse across prompts into docs/tasks.md (`mini`) and docs/results-smollm2.md.

The command line makes the results:

    kvbench sweep scripts/sweeps/reuse.toml
    kvbench sweep scripts/sweeps/reuse-smollm2.toml --share-prefill
    python scripts/bench.py reuse
    python scripts/show_reuse.py
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from curated import score
from pages import DOCS, RESULTS, SMOLLM2_PAGE, table, take_no_arguments, write

from kvbench.analysis.compare import compare_runs
from kvbench.analysis.load import FinishedRun, load_run
from kvbench.analysis.recovery import find_recoveries
from kvbench.registry import find_task

MINI, SMOLLM2 = RESULTS / "cpu-2-cores-reuse", RESULTS / "smollm2-135m-reuse"
BENCH = RESULTS / "bench" / "cpu-2-cores.json"
PAGE = DOCS / "tasks.md"


def read_runs(folder: Path, task: str, visibility: str) -> list[FinishedRun]:
    """Every run of the task's present version: full prefill and no context first, then by falling score."""
    runs = [load_run(x.parent) for x in folder.glob(f"*-{task}-*/result.json")]
    chosen = [
        x for x in runs
        if (x.result.spec.task.version, x.result.visibility) == (find_task(task).version, visibility)
    ]
    first = ["full", "no-context"]
    return sorted(
        chosen, key=lambda x: (x.result.method.name not in first, -(x.result.score.mean or 0), x.result.method.name)
    )


def reuse_table(runs: list[FinishedRun], plain_name: str = "concat") -> str:
    """Score, recovered share, the difference to plain concatenation, KL, and the share of a prefill computed."""
    shares = {x.run_id: x for x in find_recoveries(runs)}
    plain = next(x for x in runs if x.result.method.name == plain_name)
    others = [x for x in runs if x.result.method.name not in ("full", "no-context", plain_name)]
    over = {x.run_id: x for x in compare_runs(plain, others)}
    rows = []
    for result in (x.result for x in runs):
        found, gain = shares.get(result.run_id), over.get(result.run_id)
        recovered = difference = "-"
        if found is not None:
            assert found.share is not None, result.run_id
            ends = "" if found.ci95 is None else f" [{found.ci95[0]:.2f}, {found.ci95[1]:.2f}]"
            recovered = f"{found.share:.2f}{ends}"
        if gain is not None:
            assert gain.mean is not None, result.run_id
            assert gain.p_adjusted is not None, result.run_id
            difference = f"{gain.mean:+.2f} (p = {gain.p_adjusted:.3f})"
        rows.append((
            f"`{result.method.name}`", score(result), recovered, difference,
            "-" if result.agreement is None else f"{result.agreement.kl:.3f}",
            "-" if result.reuse is None else f"{result.reuse.computed_share:.1%}",
        ))
    return table(("method", "score", "recovered", f"over `{plain_name}`", "KL", "computed"), rows)


def times_table(lengths: dict[str, dict[str, list[dict[str, Any]]]]) -> str:
    """Share computed and times to first token over full prefill's, by length; rows by share at the greatest length."""
    names = sorted(lengths, key=int)
    cells: dict[str, dict[str, tuple[float, ...]]] = {}
    for length in names:
        measured = lengths[length]["rows"]
        counts = Counter(x["method"] for x in measured)
        for x in measured:  # settings tell rows of one method apart
            settings = [f"{k}={v}" for k, v in x["settings"].items()] if counts[x["method"]] > 1 else []
            name = ", ".join((f"`{x['method']}`", *settings))
            cells.setdefault(name, {})[length] = (x["computed"], x["in_hand"], x["building"])
    header = ["method"]
    for length in names:
        header += [f"computed at {int(length):,}", "in hand", "with building"]
    rows = []
    for name, found in sorted(cells.items(), key=lambda x: (x[1].get(names[-1], (2.0,)), x[0])):
        row = [name]
        for length in names:
            share, *times = found.get(length, (None, None, None))
            row += ["-" if share is None else f"{share:.1%}", *("-" if x is None else f"{x:.2f}" for x in times)]
        rows.append(row)
    return table(header, rows)


def make_texts() -> dict[Path, dict[str, str]]:
    """The text between the markers of each file."""
    return {
        PAGE: {
            "reuse-hops": reuse_table(read_runs(MINI, "reuse-hops", "hidden")),
            "reuse-times": times_table(json.loads(BENCH.read_text(encoding="utf-8"))["reuse"]["lengths"]),
        },
        SMOLLM2_PAGE: {
            "reuse-order": reuse_table(read_runs(SMOLLM2, "reuse-order", "hidden")),
            "reuse-order-visible": reuse_table(read_runs(SMOLLM2, "reuse-order", "visible")),
            "reuse-hops": reuse_table(read_runs(SMOLLM2, "reuse-hops", "hidden")),
            "reuse-edit": reuse_table(read_runs(SMOLLM2, "reuse-edit", "hidden"), "concat-aligned"),
        },
    }


if __name__ == "__main__":
    take_no_arguments(__doc__)
    write(make_texts())
