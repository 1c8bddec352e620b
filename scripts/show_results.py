"""Writes the tables and charts of the curated results into the pages docs/results*.md and README.md.

The command line makes the results, and does not repeat finished runs:

    kvbench sweep scripts/sweeps/curated.toml --workers 2
    kvbench sweep scripts/sweeps/curated-more.toml --share-prefill
    kvbench sweep scripts/sweeps/smollm2.toml --workers 2 --share-prefill
    kvbench sweep scripts/sweeps/smollm2_pooling.toml --share-prefill
    kvbench sweep scripts/sweeps/smollm2_tasks.toml --workers 2
    kvbench sweep scripts/sweeps/smollm2_lossless.toml --share-prefill
    kvbench sweep scripts/sweeps/smollm2_text.toml --share-prefill
    kvbench sweep scripts/sweeps/qwen.toml --share-prefill
    python scripts/show_results.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

import torch
from chart_results import draw_pictures
from curated import (
    HALF,
    LOSSLESS,
    MINI,
    NEEDLES,
    QUARTER,
    QWEN,
    SEEN,
    SMOLLM2,
    SMOLLM2_TASKS,
    TEXT,
    cell_of,
    find_full,
    group_cells,
    list_cells,
    mark_cells,
    mark_scores,
    name_method,
    order_cell,
    ratio,
    read,
    read_results,
    read_runs,
    score,
    setting,
)
from pages import MINI_PAGE, NEEDLES_PAGE, QWEN_PAGE, README, SMOLLM2_PAGE, table, take_no_arguments, write

from kvbench.analysis.load import FinishedRun
from kvbench.analysis.metrics import Metric
from kvbench.analysis.power import find_detectable_between
from kvbench.log import count
from kvbench.registry import find_method
from kvbench.reproduce.findings.numbers import spearman
from kvbench.runs.files import read_file, read_lines
from kvbench.runs.journal import Line
from kvbench.runs.results import Result

MOST_NAMED = 4
"""Commits that a page names; of more it has the number."""
NEAR = 0.15
"""A score this close to the full cache's is near it."""
IN_README = ("full", "random", "h2o", "snapkv", "kvzip", "shadowkv", "kivi, 4/4 bits", "kivi, 2/2 bits")


def by_turn(result: Result) -> str:
    """The first turn, and the mean of those after it."""
    means = [x.mean for x in result.score.by_turn if x.mean is not None]
    assert len(means) == len(result.score.by_turn), result.run_id
    return f"{means[0]:.2f}, then {fmean(means[1:]):.2f}"


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


def mini_table(results: Sequence[Result]) -> str:
    """One line per method of the bundled model, at 25 % or at its fixed size."""
    shown = []
    (task,) = {x.task.name for x in results}
    for name, cells in group_cells(results).items():
        short, long, seen = (
            cells.get((task, *x)) for x in ((1024, "hidden"), (2048, "hidden"), (2048, "first-turn"))
        )
        sized = short or long
        assert sized is not None, name
        turns = "not run" if seen is None else by_turn(seen)
        scores = ("not run" if x is None else score(x) for x in (short, long))
        shown.append((name, f"{ratio(sized):.1%}", read(sized), *scores, turns))
    header = ("method", "stored", "read", "hidden, 1,024", "hidden, 2,048", "first-turn, 2,048: first, then others")
    return table(header, shown)


def real_table(runs: Sequence[FinishedRun], names: Sequence[str] | None = None) -> str:
    """One line per method of a real model, one column per cell that methods share; with names, these in their order."""
    groups = group_cells([x.result for x in runs])
    columns = list_cells(groups)
    marked = mark_cells(runs, columns)
    titles = [f"question {x[2]}" if len({y[0] for y in columns}) == 1 else f"{x[0]}, {x[2]}" for x in columns]
    shown = []
    for name in names or groups:
        cells = groups[name]
        first = cells[min(cells, key=order_cell)]
        agreement = "-" if first.agreement is None else f"{first.agreement.top1:.2f}"
        scores = (marked[cells[x].run_id] if x in cells else "not run" for x in columns)
        shown.append((name, f"{ratio(first):.1%}", read(first), *scores, agreement))
    return table(("method", "stored", "read", *titles, "top-1"), shown)


def condition_table(runs: Sequence[FinishedRun]) -> str:
    """Accuracy on one task by visibility and budget; a dash where a method takes no budget."""
    groups: dict[str, dict[tuple[str, str], str]] = {}
    columns = sorted({(x.result.visibility, x.result.budget.asked or QUARTER) for x in runs})
    takes_budget = {name_method(x.result) for x in runs if x.result.budget.asked}
    for seen, budget in columns:
        same = [x for x in runs if x.result.visibility == seen]
        column = [x for x in same if (x.result.budget.asked or QUARTER) == budget]
        texts = mark_scores(column, find_full(same))
        for x in column:
            groups.setdefault(name_method(x.result), {})[seen, budget] = texts[x.result.run_id]
    rows = []
    for name in dict.fromkeys(name_method(x.result) for x in runs):
        missing = {QUARTER: "not run", HALF: "not run" if name in takes_budget else "-"}
        rows.append((name, *(groups[name].get(x, missing[x[1]]) for x in columns)))
    return table(("method", *(f"{seen}, {budget}" for seen, budget in columns)), rows)


def power_note(runs: Sequence[FinishedRun]) -> str:
    """The difference that the questions can detect, by how many scores of a run near the full cache differ from its.

    runs: of one task and visibility, each with one question per context.
    """
    baseline = find_full(runs)
    full, wanted = baseline.result, baseline.lines
    assert full.score.mean is not None, full.run_id
    shares = []
    for x in runs:
        assert x.result.score.mean is not None, x.result.run_id
        if x is not baseline and abs(x.result.score.mean - full.score.mean) <= NEAR:
            shares.append(fmean(x.lines[key].score != line.score for key, line in wanted.items()))
    usual, most = (find_detectable_between(len(wanted), x) for x in (median(shares), max(shares)))
    assert usual is not None, full.run_id
    assert most is not None, full.run_id
    return (
        f"\nThe scores of {len(shares)} runs with a {full.visibility} question are within {100 * NEAR:.0f} points of "
        f"the full cache's. Their scores differ from its on {100 * median(shares):.0f} % of the {len(wanted)} "
        f"questions (median), and on {100 * max(shares):.0f} % at most: at these shares a difference of "
        f"{100 * usual:.0f} and of {100 * most:.0f} points can be detected (80 % power, p < 0.05 without adjustment).\n"
    )


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


def compare_text(text: Sequence[Result], answers: Sequence[Result]) -> str:
    """The rank correlation of agreement on text with accuracy, over methods under the same settings."""
    def key(x: Result) -> tuple[str, str | None]:
        return name_method(x), x.budget.asked

    scores = {key(x): x.score.mean for x in answers}
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


def _name_place(results: Sequence[Result]) -> str:
    """Every processor that runs are of, the one with the most first, and their commits, unless they are many."""
    processors = Counter(x.environment.cpu for x in results)
    commits = Counter(f"`{x.environment.git.commit[:12]}`" for x in results if x.environment.git is not None)
    named = f"{'commit' if len(commits) == 1 else 'commits'} {_name_each(commits)}"
    if len(commits) > MOST_NAMED:
        named = f"{len(commits)} commits, named in each result.json"
    return f"on {_name_each(processors)}, two cores, {named}"


def _name_each(found: Counter[str]) -> str:
    """Names with the runs that each has, or the only name."""
    if len(found) == 1:
        return next(iter(found))
    return ", ".join(f"{name} ({count(runs, 'run')})" for name, runs in found.most_common())


def _name_earlier(results: Sequence[Result]) -> str:
    """The methods whose version was raised after a run, in one line; empty where there are none."""
    names = sorted({
        x.method.name for x in results if x.spec.method.version != find_method(x.method.name).card.version
    })
    return f"Some runs of {', '.join(names)} are of an earlier version of these methods.\n" if names else ""


def describe(results: Sequence[Result]) -> str:
    """Where the numbers come from."""
    first = results[0]
    return (
        f"Model `mini`, task `{first.task.name}`, `multi-turn`, {first.n_samples} contexts with {first.spec.turns} "
        f"questions each, reference history, seed {first.spec.seed}, {_name_place(results)}.\n"
        "Top-1 agreement and KL divergence compare with the full cache, teacher-forced on the reference answers.\n"
        f"{_name_earlier(results)}"
    )


def describe_real(results: Sequence[Result], others: Sequence[Result] = ()) -> str:
    """Where the numbers of a real model come from. others: results of other tables of the page"""
    first = results[0]
    cells = [
        f"Task `{task}`, {length:,} tokens, question {seen}: `{x.mode}`, {x.n_samples} contexts, "
        f"{x.n_samples * x.spec.turns} questions.\n"
        for (task, length, seen), x in sorted({cell_of(x): x for x in results}.items())
    ]
    hours = sum(x.environment.seconds for x in results) / 3600
    return (
        f"Model `{first.model.id}` in {first.model.dtype}, seed {first.spec.seed}, {_name_place(results)}.\n"
        f"{''.join(cells)}"
        f"The {len(results)} runs took {hours:.0f} hours, each on one core that other work shared.\n"
        f"{_name_earlier([*results, *others])}"
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
    smollm2 = read_runs(SMOLLM2)
    mini, tasks, text = map(read_results, (MINI, SMOLLM2_TASKS, TEXT))
    tables: dict[str, list[FinishedRun]] = {}
    for x in smollm2:
        tables.setdefault(x.result.task.name, []).append(x)
    four = tables.pop(NEEDLES)
    hidden, visible = ([x for x in four if x.result.visibility == seen] for seen in ("hidden", "visible"))
    return {
        README: {"table": real_table(four, IN_README)},
        MINI_PAGE: {"source": describe(mini), "quarter": mini_table(mini), "tables": all_tables(mini)},
        SMOLLM2_PAGE: {
            "source": describe_real(read_results(SMOLLM2), text), "methods": real_table(hidden),
            "conditions": condition_table(four) + power_note(visible),
            "text": text_table(text) + compare_text(text, [x.result for x in hidden]), "lossless": lossless_table(),
            "tasks": task_table([x for x in tasks if x.method.name == "full"]),
        },
        NEEDLES_PAGE: {name: condition_table(x) for name, x in tables.items()},
        QWEN_PAGE: {"source": describe_real(read_results(QWEN)), "methods": real_table(read_runs(QWEN))},
    }


if __name__ == "__main__":
    take_no_arguments(__doc__)
    draw_pictures(*map(read_results, (MINI, SMOLLM2, QWEN)))
    write(make_texts())
