"""Writes the section on numbers in the observation window into docs/results-qwen.md.

The answers are those of the curated runs (scripts/curated.py), and scripts/measure_window.py measures which entries
SnapKV keeps:

    python scripts/show_window.py
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from curated import NEEDLES, QWEN, SMOLLM2, group_cells, read_results
from pages import QWEN_PAGE, RESULTS, table, take_no_arguments, write

from kvbench.runs.files import read_lines
from kvbench.runs.results import Result

WINDOW = 32
"""Tokens of SnapKV's observation window, and of most of METHODS with their default settings."""
METHODS = (
    "snapkv", "snapkv+adakv", "pyramidkv", "cake", "criticalkv", "dapq", "defensivekv", "finch", "r-kv", "chunkkv",
    "compresskv", "windowkv", "layer-defensivekv", "keydiff", "random",
)
"""Evictions that score entries by the attention of the last tokens, or of pseudo tokens after them (DapQ); the last
three are for comparison."""


def window_table(runs: Mapping[Path, Sequence[Result]]) -> str:
    """Right answers about contexts with a number in the observation window, and about the others."""
    header, rows = ["method"], [[name] for name in METHODS]
    for folder, results in runs.items():
        header += [f"{folder.name}, in the window", "not in the window"]
        near = [in_window(x) for x in read_contexts(folder)]
        asked = [x for x in results if (x.task.name, x.visibility) == (NEEDLES, "hidden")]
        groups = group_cells(asked)
        for row in rows:
            (result,) = groups[row[0]].values()
            lines = read_lines(folder / result.run_id / "samples.jsonl")
            for side in (True, False):
                scores = [x.score for x in lines if near[x.index] == side]
                row.append(f"{sum(x == 1 for x in scores)} of {len(scores)}")
    return table(header, rows)


def kept_table(folders: Iterable[Path]) -> str:
    """Shares of entries before the window that SnapKV keeps: mean and range over contexts."""
    rows = []
    for folder, side in itertools.product(folders, (True, False)):
        found = [x for x in read_contexts(folder) if in_window(x) == side]
        shares = [[x[name] for x in found] for name in ("numbers", "others")]
        shown = (f"{fmean(x):.2f} ({min(x):.2f} to {max(x):.2f})" for x in shares)
        rows.append((f"{folder.name}, {'in' if side else 'not in'} the window", str(len(found)), *shown))
    return table(("last number", "contexts", "numbers before the window", "other entries before it"), rows)


def read_contexts(folder: Path) -> list[dict[str, float]]:
    """The contexts of a folder's runs, as scripts/measure_window.py measured them."""
    found: list[dict[str, float]] = json.loads((RESULTS / "window" / f"{folder.name}.json").read_text(encoding="utf-8"))
    return found


def in_window(context: Mapping[str, float]) -> bool:
    """Whether a part of a number stands in the observation window."""
    return context["last_number"] < WINDOW


def make_texts() -> dict[Path, dict[str, str]]:
    """The text between the markers of each file."""
    runs = {x: read_results(x) for x in (QWEN, SMOLLM2)}
    return {QWEN_PAGE: {"window": window_table(runs), "kept": kept_table(runs)}}


if __name__ == "__main__":
    take_no_arguments(__doc__)
    write(make_texts())
