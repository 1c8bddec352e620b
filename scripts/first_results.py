"""The table and the plot of the first results, as the README shows them.

The results are made by the command line, so that anybody can make them again; finished runs are not repeated:

    kvbench sweep scripts/sweeps/first.toml
    python scripts/first_results.py        # the README's table on standard output, and docs/first_results.png
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results" / "cpu-2-cores"
PLOT = ROOT / "docs" / "first_results.png"
CELLS = {"single": "question visible", "multi-request": "question hidden"}
ANCHORS = ("full", "full-int8")


def read_results() -> list[dict[str, Any]]:
    """Every result of the folder, anchors first, then by method and bytes."""
    results = [json.loads(x.read_text()) for x in RESULTS.glob("*/result.json")]
    names = [x["method"]["name"] for x in results]
    order = [*ANCHORS, *sorted(set(names) - set(ANCHORS))]
    return sorted(results, key=lambda x: (order.index(x["method"]["name"]), x["memory"]["ratio"]))


def print_table(results: list[dict[str, Any]]) -> None:
    """Bytes, score and agreement of every row, by method and budget."""
    rows: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for x in results:
        rows.setdefault((x["method"]["name"], x["budget"]["asked"] or "-"), {})[x["mode"]] = x
    print("| method | budget | bytes | visible: score | agreement | hidden: score | agreement |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for (method, budget), cells in rows.items():
        bytes_held = next(iter(cells.values()))["memory"]["ratio"]
        shown = " | ".join(_shown(cells.get(mode)) for mode in CELLS)
        print(f"| {method} | {budget} | {bytes_held:.1%} | {shown} |")


def _shown(result: dict[str, Any] | None) -> str:
    if result is None or result["score"]["mean"] is None:
        return "- | -"
    low, high = result["score"]["ci95"]
    near = result["agreement"]
    top1 = "-" if near is None else f"{near['top1']:.2f}"
    return f"{result['score']['mean']:.2f} [{low:.2f}, {high:.2f}] | {top1}"


def draw_plot(results: list[dict[str, Any]]) -> None:
    """Accuracy against measured bytes, one panel for visible and one for hidden questions."""
    methods = list(dict.fromkeys(x["method"]["name"] for x in results))
    colours = dict(zip(methods, ["black", "dimgray", *plt.get_cmap("tab20").colors], strict=False))
    figure, panels = plt.subplots(1, len(CELLS), figsize=(11, 4.5), sharey=True)
    for panel, (mode, title) in zip(panels, CELLS.items(), strict=True):
        for method in methods:
            points = [
                (x["memory"]["ratio"] * 100, x["score"]["mean"], *x["score"]["ci95"]) for x in results
                if x["mode"] == mode and x["method"]["name"] == method and x["score"]["mean"] is not None
            ]
            if points:
                held, means, low, high = zip(*points, strict=True)
                below = [a - b for a, b in zip(means, low, strict=True)]
                above = [a - b for a, b in zip(high, means, strict=True)]
                panel.errorbar(
                    held, means, yerr=[below, above], marker="s" if method in ANCHORS else "o", capsize=2, label=method,
                    color=colours[method], linewidth=1.2, linestyle="none" if method in ANCHORS else "-",
                )
        panel.set(title=title, xlabel="bytes held, % of the dense cache", ylim=(-0.03, 1.05), xlim=(0, 105))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("niah accuracy, 95 % intervals")
    panels[-1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    first = results[0]
    machine = f"{first['environment']['cpu']}, 2 cores"
    figure.suptitle(f"mini, {first['task']['length']:,} tokens, {first['n_samples']} contexts, {machine}", fontsize=10)
    figure.tight_layout()
    figure.savefig(PLOT, dpi=120)


if __name__ == "__main__":
    found = read_results()
    print_table(found)
    draw_plot(found)
