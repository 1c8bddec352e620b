"""Writes the tables and charts of the curated results into the pages docs/results*.md and README.md.

Only the text between the markers `<!-- begin NAME -->` and `<!-- end NAME -->` is replaced. The command line makes the
results, and does not repeat finished runs:

    kvbench sweep scripts/sweeps/curated.toml --workers 2
    kvbench sweep scripts/sweeps/curated-more.toml --share-prefill
    kvbench sweep scripts/sweeps/smollm2.toml --workers 2 --share-prefill
    kvbench sweep scripts/sweeps/smollm2_tasks.toml --workers 2
    kvbench sweep scripts/sweeps/smollm2_lossless.toml --share-prefill
    kvbench sweep scripts/sweeps/smollm2_text.toml --share-prefill
    kvbench sweep scripts/sweeps/qwen.toml --share-prefill
    python scripts/show_results.py
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import torch
import vl_convert

from kvbench.analysis.load import load_run
from kvbench.analysis.metrics import Metric
from kvbench.analysis.shares import fill_full_reads, read_share, stored_share
from kvbench.registry import find_method
from kvbench.report.charts import COLORS, COSTS, Cost, draw_cost
from kvbench.report.group import GroupedRun, label_results
from kvbench.reproduce.findings.numbers import spearman
from kvbench.runs.files import read_file, read_lines
from kvbench.runs.journal import Line
from kvbench.runs.results import Result

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
MINI, SMOLLM2, SMOLLM2_TASKS = (RESULTS / x for x in ("cpu-2-cores", "smollm2-135m", "smollm2-135m-tasks"))
LOSSLESS, TEXT, QWEN = (
    RESULTS / x for x in ("smollm2-135m-lossless", "smollm2-135m-text", "qwen2.5-coder-1.5b")
)
PICTURES = ROOT / "docs"
MINI_PAGE, SMOLLM2_PAGE, QWEN_PAGE = (PICTURES / f"results{x}.md" for x in ("", "-smollm2", "-qwen"))
README = ROOT / "README.md"
ANCHORS = ("full", "full-int8")
SEEN = {"hidden": "question hidden", "first-turn": "first of five questions visible"}
QUARTER, HALF = "25%", "50%"
NEEDLES = "niah_multikey_1"
"""The task that the methods are compared on."""
Cell = tuple[str, int, str]
"""Task, length in tokens, visibility."""
IN_README = ("full", "random", "h2o", "snapkv", "kvzip", "shadowkv", "kivi, 4/4 bits", "kivi, 2/2 bits")
IN_ONE_BLOCK = ("0b8334c74ef9", "a731f91b7a14")
"""Commits at which reference answers were forced in one block, also where methods drop or round rows in every step."""


@functools.cache
def read_results(folder: Path) -> list[Result]:
    """Every result of the folder: anchors first, then by method, length, visibility, stored bytes and bytes read."""
    runs = fill_full_reads([load_run(x.parent) for x in folder.glob("*/result.json")])
    results = [x.result for x in runs]
    names = {x.method.name for x in results}
    order = [*ANCHORS, *sorted(names - set(ANCHORS))]
    return sorted(
        results, key=lambda x: (order.index(x.method.name), x.task.length, x.visibility, ratio(x), float(read(x)[:-1]))
    )


def ratio(result: Result) -> float:
    """Stored bytes as a share of the full cache's, host memory included."""
    share = stored_share(result)
    assert share is not None, result.run_id
    return share


def read(result: Result) -> str:
    """Bytes that a decode step reads, as a share of those that the full cache reads."""
    share = read_share(result)
    assert share is not None, result.run_id
    return f"{share:.1%}"


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
    header = ("method", "budget", "stored", "read", "accuracy", "first turn, then others", "top-1", "KL, nats")
    return table(header, rows)


def group_cells(results: Sequence[Result], budget: str = QUARTER) -> dict[str, dict[Cell, Result]]:
    """Runs with this budget or at the method's fixed size, by method and cell."""
    groups: dict[str, dict[Cell, Result]] = {}
    for x in results:
        if x.budget.asked in (None, budget):
            groups.setdefault(name_method(x), {})[cell_of(x)] = x
    return groups


def name_method(result: Result) -> str:
    """The method, with the bits that come to its size and other settings that are not its defaults."""
    kind, settings = find_method(result.method.name), result.method.settings
    changed = [f"{x} {y}" for x, y in settings.items() if not x.endswith("_bits") and getattr(kind, x) != y]
    bits = [] if result.budget.asked or setting(result) == "-" else [setting(result)]
    return ", ".join([result.method.name, *bits, *changed])


def cell_of(result: Result) -> Cell:
    """Where a run stands in a table."""
    return result.task.name, result.task.length, result.visibility


def order_cell(cell: Cell) -> tuple[bool, Cell]:
    """The needle task first."""
    return cell[0] != NEEDLES, cell


def list_cells(groups: Mapping[str, Mapping[Cell, Result]]) -> list[Cell]:
    """The cells that more than one method has, the needle task first."""
    counts = Counter(x for cells in groups.values() for x in cells)
    return sorted((x for x, count in counts.items() if count > 1), key=order_cell)


def mini_table(results: Sequence[Result]) -> str:
    """One line per method of the bundled model, at 25 % or at its fixed size."""
    shown = []
    (task,) = {x.task.name for x in results}
    for name, cells in group_cells(results).items():
        short, long, seen = (
            cells.get((task, *x)) for x in ((1024, "hidden"), (2048, "hidden"), (2048, "first-turn"))
        )
        sized = long or short
        assert sized is not None, name
        turns = "not run" if seen is None else by_turn(seen)
        scores = ("not run" if x is None else score(x) for x in (short, long))
        shown.append((name, f"{ratio(sized):.1%}", read(sized), *scores, turns))
    header = ("method", "stored", "read", "hidden, 1,024", "hidden, 2,048", "first-turn, 2,048: first, then others")
    return table(header, shown)


def real_table(results: Sequence[Result], names: Sequence[str] | None = None) -> str:
    """One line per method of a real model, one column per cell that methods share; with names, these in their order."""
    groups = group_cells(results)
    columns = list_cells(groups)
    titles = [f"question {x[2]}" if len({y[0] for y in columns}) == 1 else f"{x[0]}, {x[2]}" for x in columns]
    shown = []
    for name in names or groups:
        cells = groups[name]
        first = cells[min(cells, key=order_cell)]
        agreement = "-" if first.agreement is None else f"{first.agreement.top1:.2f}"
        scores = (score(cells[x]) if x in cells else "not run" for x in columns)
        shown.append((name, f"{ratio(first):.1%}", read(first), *scores, agreement))
    return table(("method", "stored", "read", *titles, "top-1"), shown)


def condition_table(results: Sequence[Result]) -> str:
    """Accuracy by budget and visibility of the methods that have such runs; a dash where a method takes no budget."""
    quarter, half = group_cells(results), group_cells([x for x in results if x.budget.asked == HALF], HALF)
    rows = []
    for name, runs in quarter.items():
        seen, larger = ({cell[2]: score(x) for cell, x in y.items()} for y in (runs, half.get(name, {})))
        if "visible" in seen:
            none = "not run" if "hidden" not in seen else "-"
            rows.append((name, seen.get("hidden", none), larger.get("hidden", none), seen["visible"]))
    return table(("method", "hidden, 25%", "hidden, 50%", "visible, 25%"), rows)


def text_table(results: Sequence[Result]) -> str:
    """One line per method on real text: the closest to the full cache first."""
    rows = []
    for x in sorted(results, key=lambda x: 0.0 if x.agreement is None else x.agreement.kl):
        metric = Metric.of(x.score)
        assert x.score.mean is not None, x.run_id
        assert x.score.ci95 is not None, x.run_id
        shown = f"{metric.write(x.score.mean)} {metric.write_interval(x.score.ci95)}"
        agreement = ("-", "-") if x.agreement is None else (f"{x.agreement.top1:.3f}", f"{x.agreement.kl:.3f}")
        rows.append((x.method.name, f"{ratio(x):.1%}", read(x), shown, *agreement))
    return table(("method", "stored", "read", "perplexity", "top-1", "KL, nats"), rows)


def compare_text(text: Sequence[Result], needles: Sequence[Result]) -> str:
    """The rank correlation of agreement on text with accuracy, over methods under the same settings."""
    def key(x: Result) -> tuple[str, str, str | None]:
        return x.method.name, str(x.method.settings), x.budget.asked

    scores = {key(x): x.score.mean for x in needles if x.visibility == "hidden"}
    pairs = [(x.agreement.kl, scores[key(x)]) for x in text if x.agreement is not None]
    return (
        f"\nOver {len(pairs)} methods, Spearman's rank correlation of this KL and the accuracy above is "
        f"{float(spearman(*torch.tensor(pairs).T)):.2f}.\n"
    )


def lossless_table() -> str:
    """Drafted and accepted tokens of each lossless method, and its answers next to the full cache's."""
    runs = [(read_file(x, Result), read_lines(x.with_name("samples.jsonl"))) for x in LOSSLESS.glob("*/result.json")]
    (wanted,) = (lines for x, lines in runs if x.method.name == "full")
    return table(
        ("method", "accepted per round", "of drafted", "resident", "read", "tokens that differ", "answers of `full`"),
        sorted(lossless_row(x, lines, wanted) for x, lines in runs if x.lossless),
    )


def lossless_row(result: Result, lines: Sequence[Line], wanted: Sequence[Line]) -> tuple[str, ...]:
    """One method; tokens differ from greedy decoding with the cache that verifies. wanted: the full cache's answers."""
    found = result.lossless
    assert found is not None, result.run_id
    assert found.acceptance is not None, result.run_id
    assert result.memory is not None, result.run_id
    answers = {(x.sample, x.turn): x.ids for x in wanted}
    same = sum(x.ids == answers[x.sample, x.turn] for x in lines)
    return (
        f"`{result.method.name}`{f', {result.budget.asked}' if result.budget.asked else ''}",
        f"{found.accepted_per_round:.2f} of {result.method.settings['draft_length']}", f"{found.acceptance:.2f}",
        f"{found.resident_bytes / result.memory.full_bytes:.1%}", read(result),
        f"{found.different} of {found.tokens:,}", f"{same} of {len(lines)}",
    )


def task_table(results: Sequence[Result]) -> str:
    """The full cache's score on every task by length."""
    groups: dict[str, dict[int, Result]] = {}
    for x in sorted(results, key=lambda x: x.task.name):
        groups.setdefault(x.task.name, {})[x.task.length] = x
    lengths = sorted({x.task.length for x in results})
    rows = [
        (name, *(score(cells[length]) if length in cells else "not run" for length in lengths))
        for name, cells in groups.items()
    ]
    return table(("task", *(f"{x:,} tokens" for x in lengths)), rows)


def list_pictures() -> list[tuple[Path, str, Cost]]:
    """The charts: by what may be seen, stored bytes apart from those read; the README's first."""
    return [
        (PICTURES / f"results{'' if visibility == 'hidden' else f'-{visibility}'}{suffix}.png", visibility, cost)
        for cost, suffix in zip(COSTS[:2], ("", "-read"), strict=True) for visibility in SEEN
    ]


def draw_picture(path: Path, results: Sequence[Result], cost: Cost, title: str) -> None:
    """A chart of `kvbench report`."""
    spec = draw_cost([GroupedRun(*x) for x in zip(results, label_results(results), strict=True)], cost)
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
    path.write_bytes(vl_convert.vegalite_to_png({
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json", "title": title, "data": {"values": values},
        "facet": {"column": facet},
        "spec": {"width": 330, "height": {"step": 13}, "encoding": {"y": y, "x": x}, "layer": [
            {"mark": {"type": "line", "color": "#bbbbbb"}, "encoding": {"detail": {"field": "method"}}},
            {"mark": {"type": "point", "filled": True, "size": 60, "opacity": 0.9}, "encoding": {"color": color}},
        ]},
    }))


def draw_pictures(mini: Sequence[Result], smollm2: Sequence[Result], qwen: Sequence[Result]) -> None:
    """The bundled model at the greatest length, and the real ones."""
    draw_visibility(PICTURES / "results-qwen.png", qwen, "Qwen2.5-Coder-1.5B, 2,048 tokens")
    longest = max(x.task.length for x in mini)
    for path, visibility, cost in list_pictures():
        chosen = [x for x in mini if (x.task.length, x.visibility) == (longest, visibility)]
        draw_picture(path, chosen, cost, f"mini, {SEEN[visibility]}, {longest:,} tokens")
    hidden = [x for x in smollm2 if x.visibility == "hidden"]
    for suffix, cost in zip(("", "-read"), COSTS[:2], strict=True):
        draw_picture(
            PICTURES / f"results-smollm2{suffix}.png", hidden, cost, "SmolLM2-135M, question hidden, 1,024 tokens"
        )


def _name_commits(results: Sequence[Result]) -> str:
    """Every commit that runs are of, the one with the most first."""
    found = Counter(x.environment.git.commit[:12] for x in results if x.environment.git is not None)
    if len(found) == 1:
        return f"commit `{next(iter(found))}`"
    return f"commits {', '.join(f'`{name}` ({count} runs)' for name, count in found.most_common())}"


def describe(results: Sequence[Result]) -> str:
    """Where the numbers come from."""
    first = results[0]
    old = sorted({
        x.method.name for x in results
        if x.environment.git is not None and x.environment.git.commit[:12] in IN_ONE_BLOCK
        and find_method(x.method.name).graphable is not None
    })
    changed = sorted({
        x.method.name for x in results if x.spec.method.version != find_method(x.method.name).card.version
    })
    versions = f"Runs of {', '.join(changed)} are of an earlier version of these methods.\n" if changed else ""
    early = f" For {', '.join(old)} it is from before they were forced token by token." if old else ""
    return (
        f"Model `mini`, task `{first.task.name}`, `multi-turn`, {first.n_samples} contexts with {first.spec.turns} "
        f"questions each, reference history, seed {first.spec.seed}, on {first.environment.cpu} (2 cores), "
        f"{_name_commits(results)}.\n"
        "Top-1 agreement and KL divergence compare with the full cache, teacher-forced on the reference answers."
        f"{early}\n{versions}"
    )


def describe_real(results: Sequence[Result]) -> str:
    """Where the numbers of a real model come from."""
    first = results[0]
    cells = [
        f"Task `{task}`, {length:,} tokens, question {seen}: `{x.mode}`, {x.n_samples} contexts, "
        f"{x.n_samples * x.spec.turns} questions.\n"
        for (task, length, seen), x in sorted({cell_of(x): x for x in results}.items())
    ]
    return (
        f"Model `{first.model.id}` in {first.model.dtype}, seed {first.spec.seed}, on {first.environment.cpu} "
        f"(2 cores), {_name_commits(results)}.\n{''.join(cells)}"
    )


def all_tables(results: Sequence[Result]) -> str:
    """A table for each length and visibility."""
    parts = []
    for length in sorted({x.task.length for x in results}):
        for visibility, title in SEEN.items():
            chosen = [x for x in results if (x.task.length, x.visibility) == (length, visibility)]
            parts.append(f"### {length:,} tokens, {title}\n\n{page_table(chosen)}")
    return "\n".join(parts)


def make_texts() -> dict[Path, dict[str, str]]:
    """The text between the markers of each file."""
    mini, smollm2, tasks, text, qwen = (read_results(x) for x in (MINI, SMOLLM2, SMOLLM2_TASKS, TEXT, QWEN))
    hidden = [x for x in smollm2 if x.visibility == "hidden"]
    return {
        README: {"table": real_table(smollm2, IN_README)},
        MINI_PAGE: {"source": describe(mini), "quarter": mini_table(mini), "tables": all_tables(mini)},
        SMOLLM2_PAGE: {
            "source": describe_real(smollm2), "methods": real_table(hidden), "conditions": condition_table(smollm2),
            "text": text_table(text) + compare_text(text, smollm2), "lossless": lossless_table(),
            "tasks": task_table([x for x in tasks if x.method.name == "full"]),
        },
        QWEN_PAGE: {"source": describe_real(qwen), "methods": real_table(qwen)},
    }


def fill(page: str, texts: Mapping[str, str]) -> str:
    """A page with new text between its markers, each of which it must have once."""
    for name, text in texts.items():
        begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
        page, count = re.subn(f"{begin}.*?{end}", lambda _, t=f"{begin}{text}{end}": t, page, flags=re.DOTALL)
        assert count == 1, name
    return page


if __name__ == "__main__":
    draw_pictures(*map(read_results, (MINI, SMOLLM2, QWEN)))
    for path, texts in make_texts().items():
        path.write_text(fill(path.read_text(encoding="utf-8"), texts), encoding="utf-8")
