"""Writes the sections on eviction while decoding into docs/results.md, with a chart, and docs/results-smollm2.md.

Only the text between their markers is replaced. The command line makes the results:

    kvbench sweep scripts/sweeps/decode.toml
    kvbench sweep scripts/sweeps/smollm2_decode.toml
    python scripts/show_decode.py
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import vl_convert
from show_results import MINI_PAGE, PICTURES, RESULTS, ROOT, SMOLLM2_PAGE, SMOLLM2_TASKS, fill, table

from kvbench.analysis.load import load_run
from kvbench.runs.results import Result

FOLDER = RESULTS / "cpu-2-cores-decode"
PICTURE = PICTURES / "results-decode.png"
QUARTERS = tuple(f"growth-lines-q{x}@1" for x in range(1, 5))


def read_results(folder: Path) -> list[Result]:
    """Every run: by task, budget and falling score, the full cache first."""
    found = [load_run(x.parent).result for x in folder.glob("*/result.json")]
    return sorted(found, key=lambda x: (x.task.name, budget(x), -x.score.mean, x.method.name))


def budget(result: Result) -> int:
    """Tokens per KV head; 0 for the full cache, which has no budget."""
    return 0 if result.spec.budget is None else int(result.spec.budget)


def name(result: Result) -> str:
    """The method and its budget."""
    return result.method.name if result.spec.budget is None else f"{result.method.name}, {result.spec.budget}"


def by_distance(result: Result) -> list[str]:
    """Top-1 agreement by position in the answer."""
    agreement = result.agreement
    return ["-"] * 3 if agreement is None else [f"{x.top1:.2f}" for x in agreement.by_distance][:3]


def copy_table(results: Sequence[Result]) -> str:
    """The score of list-copy by quarter of the answer, and the agreement by position."""
    rows = [
        [name(x), f"{x.score.mean:.2f}", *(f"{x.scores[q]:.2f}" for q in QUARTERS), *by_distance(x)]
        for x in results if x.task.name == "list-copy"
    ]
    return table(
        ("method, budget", "lines", "first quarter", "second", "third", "last", "top-1 from 0", "from 64", "from 128"),
        rows,
    )


def recurrence_table(results: Sequence[Result]) -> str:
    """The agreement of recurrence by position."""
    rows = [
        [name(x), *by_distance(x), "-" if x.agreement is None else f"{x.agreement.kl:.2f}"]
        for x in sorted(results, key=lambda x: -1 if x.agreement is None else x.agreement.kl)
        if x.task.name == "recurrence" and x.agreement is not None
    ]
    return table(("method, budget", "top-1 from 0", "from 64", "from 128", "KL, nats"), rows)


def make_chart(results: Sequence[Result]) -> dict[str, Any]:
    """Lines of list-copy by quarter of the answer, one line per run of the largest budget."""
    chosen = [x for x in results if x.task.name == "list-copy"]
    most = max(budget(x) for x in chosen)
    values = [
        {"method": name(x), "quarter": number, "lines": x.scores[q]}
        for x in chosen if budget(x) in (0, most) for number, q in enumerate(QUARTERS, 1)
    ]
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json", "width": 560, "height": 320,
        "title": f"mini, list-copy: correct lines by quarter of the answer, {most} tokens per KV head",
        "data": {"values": values}, "mark": {"type": "line", "point": True},
        "encoding": {
            "x": {"field": "quarter", "type": "ordinal", "title": "quarter of the answer"},
            "y": {
                "field": "lines", "type": "quantitative", "title": "share of correct lines",
                "scale": {"domain": [0, 1]},
            },
            "color": {"field": "method", "type": "nominal", "title": None, "scale": {"scheme": "tableau10"}},
            "strokeDash": {"condition": {"test": "datum.method == 'full'", "value": [6, 4]}, "value": [1, 0]},
        },
    }


def main() -> None:
    """Write the tables and the chart."""
    results = read_results(FOLDER)
    PICTURE.write_bytes(vl_convert.vegalite_to_png(make_chart(results), scale=1.5))
    texts = {"decode-list-copy": copy_table(results), "decode-recurrence": recurrence_table(results)}
    MINI_PAGE.write_text(fill(MINI_PAGE.read_text(encoding="utf-8"), texts), encoding="utf-8")
    real = [x for x in read_results(SMOLLM2_TASKS) if x.task.length == 512]
    texts = {"decode-list-copy": copy_table(real)}
    SMOLLM2_PAGE.write_text(fill(SMOLLM2_PAGE.read_text(encoding="utf-8"), texts), encoding="utf-8")
    print(f"written to {MINI_PAGE.relative_to(ROOT)}, {SMOLLM2_PAGE.relative_to(ROOT)} and {PICTURE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
