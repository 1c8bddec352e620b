"""The tables and charts of the curated results: docs/results.md, its pictures, and the README's table.

The results are made by the command line, so that anybody can make them again; finished runs are not repeated:

    kvbench sweep scripts/sweeps/curated.toml --workers 2
    python scripts/show_results.py        # the README's table on standard output
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import vl_convert

from kvbench.registry import find_method
from kvbench.report.charts import COSTS, Cost, draw_cost
from kvbench.report.group import Entry, label_results
from kvbench.runs.files import read_file
from kvbench.runs.results import Result

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results" / "cpu-2-cores"
PICTURES = ROOT / "docs"
PAGE = PICTURES / "results.md"
ANCHORS = ("full", "full-int8")
SEEN = {"hidden": "no question seen", "first-turn": "first of five questions seen"}
IN_README = "25%"
IN_ONE_BLOCK = ("0b8334c74ef9", "a731f91b7a14")
"""Commits at which reference answers were forced in one block, also where methods drop or round rows in every step."""


def read_results() -> list[Result]:
    """Every result of the folder: anchors first, then by method, length, visibility and bytes."""
    results = [read_file(x, Result) for x in RESULTS.glob("*/result.json")]
    names = {x.method.name for x in results}
    order = [*ANCHORS, *sorted(names - set(ANCHORS))]
    return sorted(results, key=lambda x: (order.index(x.method.name), x.task.length, x.visibility, ratio(x)))


def ratio(result: Result) -> float:
    """Bytes that hold the context, by the dense cache's; host memory included."""
    assert result.memory is not None, result.run_id
    return result.memory.ratio_total


def read(result: Result) -> str:
    """Bytes that a decode step reads, by the dense cache's."""
    assert result.memory is not None, result.run_id
    return f"{result.memory.read_bytes_per_step / result.memory.full_bytes:.1%}"


def setting(result: Result) -> str:
    """The budget asked for, or the bits that come to one."""
    bits = [str(value) for name, value in result.method.settings.items() if name.endswith("_bits")]
    return result.budget.asked or (f"{'/'.join(bits)} bits" if bits else "-")


def score(result: Result) -> str:
    """Mean and interval."""
    assert result.score.mean is not None, result.run_id
    assert result.score.ci95 is not None, result.run_id
    low, high = result.score.ci95
    return f"{result.score.mean:.2f} [{low:.2f}, {high:.2f}]"


def by_turn(result: Result) -> str:
    """The first turn, and the mean of those after it."""
    first, *later = (x.mean for x in result.score.by_turn)
    return f"{first:.2f}, then {fmean(later):.2f}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, names to the left and numbers to the right."""
    rule = ["---", *("---:" for _ in header[1:])]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *rows)) + "\n"


def page_table(results: Sequence[Result]) -> str:
    """All runs of one length and visibility."""
    rows = [
        (
            x.method.name, setting(x), f"{ratio(x):.1%}", read(x), score(x), by_turn(x),
            "-" if x.agreement is None else f"{x.agreement.top1:.3f}",
            "-" if x.agreement is None else f"{x.agreement.kl:.3f}",
        )
        for x in results
    ]
    return table(("method", "budget", "held", "read", "score", "first turn, then others", "top-1", "KL, nats"), rows)


def readme_table(results: Sequence[Result]) -> str:
    """One row per method: at 25 %, or at the bytes it always has."""
    rows: dict[str, dict[tuple[str, int], Result]] = {}
    for x in results:
        if x.budget.asked in (None, IN_README):
            name = x.method.name if x.budget.asked or setting(x) == "-" else f"{x.method.name}, {setting(x)}"
            rows.setdefault(name, {})[x.visibility, x.task.length] = x
    shown = []
    for name, cells in rows.items():
        hidden = [cells["hidden", length] for length in (1024, 2048)]
        seen = cells.get(("first-turn", 2048))
        turns = "not run" if seen is None else by_turn(seen)
        shown.append((name, f"{ratio(hidden[1]):.1%}", read(hidden[1]), *(score(x) for x in hidden), turns))
    header = ("method", "held", "read", "hidden, 1,024", "hidden, 2,048", "first question seen, 2,048: it, then others")
    return table(header, shown)


def list_pictures() -> list[tuple[Path, str, Cost]]:
    """The charts: by what may be seen, held bytes apart from those read; the README's first."""
    return [
        (PICTURES / f"results{'' if visibility == 'hidden' else f'-{visibility}'}{suffix}.png", visibility, cost)
        for cost, suffix in zip(COSTS[:2], ("", "-read"), strict=True) for visibility in SEEN
    ]


def draw_pictures(results: Sequence[Result]) -> None:
    """At the greatest length; the charts are those of `kvbench report`."""
    longest = max(x.task.length for x in results)
    for path, visibility, cost in list_pictures():
        chosen = [x for x in results if (x.task.length, x.visibility) == (longest, visibility)]
        entries = [Entry(*x) for x in zip(chosen, label_results(chosen), strict=True)]
        spec = draw_cost(entries, cost)
        assert spec is not None, path
        title = f"{SEEN[visibility]}, {longest:,} tokens"
        path.write_bytes(vl_convert.vegalite_to_png(spec | {"width": 640, "height": 440, "title": title}))


def _name_commits(results: Sequence[Result]) -> str:
    """Every commit that runs are of, the one with the most first."""
    found = Counter(x.environment.git.commit[:12] for x in results if x.environment.git is not None)
    if len(found) == 1:
        return f"commit `{next(iter(found))}`"
    return f"commits {', '.join(f'`{name}` ({count} runs)' for name, count in found.most_common())}"


def write_page(results: Sequence[Result]) -> None:
    """docs/results.md: a table for each length and visibility."""
    first = results[0]
    old = sorted({
        x.method.name for x in results
        if x.environment.git is not None and x.environment.git.commit[:12] in IN_ONE_BLOCK
        and find_method(x.method.name).graphable is not None
    })
    early = f" That of {', '.join(old)} is from before they were forced token by token." if old else ""
    made = (
        "Written by `python scripts/show_results.py` from the runs under `results/cpu-2-cores`, which "
        "`kvbench sweep scripts/sweeps/curated.toml` makes.\n"
        f"Model `mini`, task `{first.task.name}`, {first.n_samples} contexts x {first.spec.turns} questions, reference "
        f"history, seed {first.spec.seed}, on {first.environment.cpu} (2 cores), {_name_commits(results)}.\n"
        "Bytes are measured, host memory included. Intervals are 95 %, by context. Agreement (top-1, KL) is with the "
        f"dense cache on the reference answers.{early}\n"
        "In the charts the solid line joins rows that no other beats in both, the dashed line is the full cache, the "
        "dotted one rows kept by chance.\n"
    )
    pictures = "\n".join(
        f"![Accuracy against {cost.name}, {SEEN[visibility]}]({path.name})"
        for path, visibility, cost in list_pictures()
    )
    parts = ["# Curated results\n", made, f"{pictures}\n"]
    for length in sorted({x.task.length for x in results}):
        for visibility, title in SEEN.items():
            chosen = [x for x in results if (x.task.length, x.visibility) == (length, visibility)]
            parts.append(f"## {length:,} tokens, {title}\n\n{page_table(chosen)}")
    PAGE.write_text("\n".join(parts))


if __name__ == "__main__":
    found = read_results()
    draw_pictures(found)
    write_page(found)
    print(readme_table(found), end="")
