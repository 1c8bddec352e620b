"""Writes the sections on eviction while decoding into docs/results.md, with a chart, and docs/results-smollm2.md.

The command line makes the results:

    kvbench sweep scripts/sweeps/decode.toml
    kvbench sweep scripts/sweeps/smollm2_decode.toml
    python scripts/show_decode.py
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import vl_convert
from curated import SMOLLM2_TASKS
from pages import DOCS, MINI_PAGE, RESULTS, SMOLLM2_PAGE, table, take_no_arguments, write

from kvbench.analysis.load import load_run
from kvbench.runs.results import Result

FOLDER = RESULTS / "cpu-2-cores-decode"
PICTURE = DOCS / "results-decode.png"
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
    parts = () if result.agreement is None else result.agreement.by_distance[:3]
    return [*(f"{x.top1:.2f}" for x in parts), *["-"] * (3 - len(parts))]


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


def make_texts() -> dict[Path, dict[str, str]]:
    """The tables of `mini` and of the real model."""
    mini, real = read_results(FOLDER), [x for x in read_results(SMOLLM2_TASKS) if x.task.length == 512]
    return {
        MINI_PAGE: {"decode-list-copy": copy_table(mini), "decode-recurrence": recurrence_table(mini)},
        SMOLLM2_PAGE: {"decode-list-copy": copy_table(real)},
    }


if __name__ == "__main__":
    take_no_arguments(__doc__)
    PICTURE.write_bytes(vl_convert.vegalite_to_png(make_chart(read_results(FOLDER)), scale=1.5))
    write(make_texts())
