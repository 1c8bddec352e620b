"""The curated results under results/cpu-2-cores, their table and their plot, as the README shows them.

Every row is made by the command line, so that anybody can make it again:

    python scripts/first_results.py run     # about half an hour on 2 cores; finished runs are not repeated
    python scripts/first_results.py show    # the README's table on standard output, docs/first_results.png
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt  # after the backend is chosen

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results" / "cpu-2-cores"
PLOT = ROOT / "docs" / "first_results.png"
SAMPLES = 50
ANCHORS = ("full", "full-int8")
EVICTION = ("random", "streaming-llm", "h2o", "snapkv")
BUDGETS = ("5%", "10%", "25%", "50%")
CELLS: dict[str, tuple[str, ...]] = {
    "question visible": ("--mode", "single", "--visibility", "visible"),
    "question hidden": ("--mode", "multi-request", "--turns", "5"),
}
COLOURS = {
    "full": "black", "full-int8": "tab:gray", "random": "tab:brown", "streaming-llm": "tab:blue", "h2o": "tab:orange",
    "snapkv": "tab:red",
}


def run_grid() -> None:
    """Every method, budget and visibility, one `kvbench run` each."""
    rows = [(method, None) for method in ANCHORS] + list(itertools.product(EVICTION, BUDGETS))
    for (method, budget), cell in itertools.product(rows, CELLS.values()):
        command = [
            str(Path(sys.executable).parent / "kvbench"), "run", "--method", method, "--task", "niah", *cell,
            "--samples", str(SAMPLES), "--out", str(RESULTS), *(("--budget", budget) if budget else ()),
        ]
        print(" ".join(command[1:]), flush=True)
        done = subprocess.run(command, check=False, stdout=subprocess.DEVNULL)  # noqa: S603  # our own command line
        if done.returncode not in (0, 1):
            raise SystemExit(done.returncode)


def read_cell(cell: str) -> list[dict[str, Any]]:
    """The results of one panel."""
    results = [json.loads(x.read_text()) for x in sorted(RESULTS.glob("*/result.json"))]
    mode = CELLS[cell][1]
    return [x for x in results if x["mode"] == mode and x["n_samples"] == SAMPLES]


def print_table() -> None:
    """Score and measured bytes of every row, by method."""
    print(f"| method | budget | {' | '.join(f'bytes held | {cell}' for cell in CELLS)} |")
    print("| --- | --- | --- | --- | --- | --- |")
    cells = {cell: {(x["method"]["name"], x["budget"]["asked"]): x for x in read_cell(cell)} for cell in CELLS}
    order = [*((m, None) for m in ANCHORS), *itertools.product(EVICTION, BUDGETS)]
    for method, budget in order:
        shown = [_shown(rows.get((method, budget))) for rows in cells.values()]
        print(f"| {method} | {budget or '-'} | {' | '.join(shown)} |")


def _shown(result: dict[str, Any] | None) -> str:
    if result is None or result["score"] is None or result["score"]["mean"] is None:
        return "- | -"
    low, high = result["score"]["ci95"]
    return f"{result['memory']['ratio']:.1%} | {result['score']['mean']:.2f} [{low:.2f}, {high:.2f}]"


def draw_plot() -> None:
    """Accuracy against measured bytes, one panel per visibility."""
    figure, panels = plt.subplots(1, len(CELLS), figsize=(10, 4), sharey=True)
    for panel, cell in zip(panels, CELLS, strict=True):
        rows = read_cell(cell)
        for method, colour in COLOURS.items():
            points = sorted(
                (x["memory"]["ratio"] * 100, x["score"]["mean"], x["score"]["ci95"]) for x in rows
                if x["method"]["name"] == method and x["score"]["mean"] is not None
            )
            if not points:
                continue
            held = [x for x, _, _ in points]
            below = [mean - low for _, mean, (low, _) in points]
            above = [high - mean for _, mean, (_, high) in points]
            panel.errorbar(
                held, [mean for _, mean, _ in points], yerr=[below, above], marker="o", capsize=3, color=colour,
                label=method, linestyle="none" if method in ANCHORS else "-",
            )
        panel.set(title=cell, xlabel="bytes held, % of the dense cache", ylim=(-0.03, 1.05), xlim=(0, 105))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("niah accuracy")
    panels[-1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    machine = json.loads(next(RESULTS.glob("*/result.json")).read_text())["environment"]["cpu"]
    figure.suptitle(f"mini, 1,024 tokens, {SAMPLES} contexts, 95 % intervals ({machine}, 2 cores)", fontsize=10)
    figure.tight_layout()
    figure.savefig(PLOT, dpi=120)


if __name__ == "__main__":
    if sys.argv[1:] == ["run"]:
        run_grid()
    elif sys.argv[1:] == ["show"]:
        print_table()
        draw_plot()
    else:
        raise SystemExit(__doc__)
