"""Charts of the curated results, drawn into docs/."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import vl_convert
from curated import HALF, NEEDLES, QUARTER, SEEN, group_cells, list_cells, name_method
from pages import DOCS

from kvbench.analysis.compare import is_full
from kvbench.report.charts import COLORS, COSTS, Cost, draw_cost
from kvbench.report.group import GroupedRun, label_results
from kvbench.runs.results import Result


def draw_pictures(mini: Sequence[Result], smollm2: Sequence[Result], qwen: Sequence[Result]) -> None:
    """The bundled model at the greatest length, and the real ones."""
    draw_visibility(DOCS / "results-qwen.png", qwen, "Qwen2.5-Coder-1.5B, 2,048 tokens")
    draw_grid(DOCS / "results-smollm2-needles.svg", smollm2, "Accuracy of SmolLM2-135M, 1,024 tokens")
    longest = max(x.task.length for x in mini)
    for path, visibility, cost in list_pictures():
        chosen = [x for x in mini if (x.task.length, x.visibility) == (longest, visibility)]
        draw_picture(path, chosen, cost, f"mini, {SEEN[visibility]}, {longest:,} tokens")
    hidden = [x for x in smollm2 if (x.task.name, x.visibility) == (NEEDLES, "hidden")]
    for suffix, cost in zip(("", "-read"), COSTS[:2], strict=True):
        draw_picture(
            DOCS / f"results-smollm2{suffix}.png", hidden, cost, "SmolLM2-135M, question hidden, 1,024 tokens"
        )


def list_pictures() -> list[tuple[Path, str, Cost]]:
    """The charts: by what may be seen, stored bytes apart from those read; the README's first."""
    return [
        (DOCS / f"results{'' if visibility == 'hidden' else f'-{visibility}'}{suffix}.png", visibility, cost)
        for cost, suffix in zip(COSTS[:2], ("", "-read"), strict=True) for visibility in SEEN
    ]


def draw_picture(path: Path, results: Sequence[Result], cost: Cost, title: str) -> None:
    """A chart of `kvbench report`."""
    labels = label_results(results)
    spec = draw_cost([GroupedRun(x, label, full=is_full(x)) for x, label in zip(results, labels, strict=True)], cost)
    assert spec is not None, path
    path.write_bytes(vl_convert.vegalite_to_png(spec | {"width": 640, "height": 440, "title": title}))


def draw_visibility(path: Path, results: Sequence[Result], title: str) -> None:
    """Accuracy of every method by task, with the question hidden and visible; the best in the first cell first."""
    groups = group_cells(results)
    shown = list_cells(groups)
    values, order = [], []
    for name, cells in groups.items():
        scores = [cells[x].score.mean if x in cells else None for x in shown]
        order.append(([1 if x is None else -x for x in scores], name))
        values += [
            {"method": name, "task": task, "question": seen, "score": x}
            for (task, _, seen), x in zip(shown, scores, strict=True) if x is not None
        ]
    y = {
        "field": "method", "type": "nominal", "title": None, "axis": {"grid": True},
        "sort": [name for _, name in sorted(order)],
    }
    x = {"field": "score", "type": "quantitative", "title": "accuracy", "scale": {"domain": [0, 1]}}
    color = {
        "field": "question", "type": "nominal", "scale": {"domain": ["hidden", "visible"], "range": COLORS[:2]},
        "legend": {"orient": "top", "title": "question"},
    }
    facet = {"field": "task", "type": "nominal", "title": None, "sort": list(dict.fromkeys(task for task, *_ in shown))}
    width = min(330, 1000 // len(facet["sort"]))
    path.write_bytes(vl_convert.vegalite_to_png({
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json", "data": {"values": values},
        "title": f"{title}: 25 % of the cache, or the method's own size",
        "facet": {"column": facet},
        "spec": {"width": width, "height": {"step": 13}, "encoding": {"y": y, "x": x}, "layer": [
            {"mark": {"type": "line", "color": "#bbbbbb"}, "encoding": {"detail": {"field": "method"}}},
            {"mark": {"type": "point", "filled": True, "size": 60, "opacity": 0.9}, "encoding": {"color": color}},
        ]},
    }))


def draw_grid(path: Path, results: Sequence[Result], title: str) -> None:
    """Accuracy by task, visibility and budget, of the methods that ran in the first cell.

    The first rows have the best mean with a quarter of the cache, or at the method's own size.
    """
    groups = group_cells(results)
    shown = list_cells(groups)
    means = {
        name: fmean(x.score.mean for x in cells.values() if x.score.mean is not None)
        for name, cells in groups.items() if shown[0] in cells
    }
    values = [
        {
            "method": name_method(x), "task": x.task.name, "column": f"{x.visibility}, {x.budget.asked or QUARTER}",
            "score": x.score.mean,
        }
        for x in results if name_method(x) in means
    ]
    y = {
        "field": "method", "type": "nominal", "title": None,
        "sort": sorted(means, key=means.__getitem__, reverse=True),
    }
    x = {
        "field": "column", "type": "nominal", "title": None, "axis": {"orient": "top", "labelAngle": -90},
        "sort": [f"{seen}, {budget}" for seen in ("hidden", "visible") for budget in (QUARTER, HALF)],
    }
    color = {
        "field": "score", "type": "quantitative", "title": "accuracy", "scale": {"scheme": "blues", "domain": [0, 1]},
    }
    number = {
        "text": {"field": "score", "format": ".2f"},
        "color": {"condition": {"test": "datum.score > 0.5", "value": "white"}, "value": "black"},
    }
    path.write_text(vl_convert.vegalite_to_svg({
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json", "data": {"values": values}, "title": title,
        "facet": {"column": {
            "field": "task", "type": "nominal", "title": None, "sort": list(dict.fromkeys(task for task, *_ in shown)),
        }},
        "spec": {"width": {"step": 27}, "height": {"step": 14}, "encoding": {"y": y, "x": x}, "layer": [
            {"mark": "rect", "encoding": {"color": color}},
            {"mark": {"type": "text", "fontSize": 9}, "encoding": number},
        ]},
        "spacing": 8,
    }), encoding="utf-8")
