"""The sections of a report: groups with protocol, charts and table; grids with heat map and table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from html import escape

from kvbench.analysis.columns import find_columns, flatten, write_csv
from kvbench.analysis.doubts import find_strict, group_doubts
from kvbench.analysis.formatting import explain_no_score, format_p, format_settings
from kvbench.analysis.metrics import Metric
from kvbench.analysis.shares import (
    bytes_per_token,
    conversation_share,
    cut_share,
    distinct_read_share,
    read_share,
    stored_share,
)
from kvbench.analysis.significance import ALPHA, UNADJUSTED
from kvbench.log import count
from kvbench.report.charts import COSTS, draw_cost, draw_distances, draw_quarters, draw_turns
from kvbench.report.grid import Grid, draw_grid, list_scores
from kvbench.report.group import VISIBILITIES, GroupedRun
from kvbench.report.page import write_chart, write_download, write_page
from kvbench.report.table import NONE, TableCell, milliseconds, number, write_table
from kvbench.runs.results import Result

ABOUT = f"""
<p>Each table holds runs of one task, model, protocol and machine; only these are ranked against each other. Intervals
are 95 %, by context.</p>
<ul>
<li>Ranks: the best run leads the first rank, and every run that a paired test by context does not distinguish from it
(p of {ALPHA:g} or more, Holm-adjusted over all runs below) shares its rank; the first run that differs leads the next
rank. "Too few to tell": no difference of so few contexts could be significant, and there are no ranks. Failed runs have
no rank and no score.</li>
<li>Differences to the full cache are on the same questions, with p-values adjusted over the runs of the table.
{UNADJUSTED}</li>
<li>Bytes are measured: stored and bytes/token at the end of the context, conversation at the end of the last answer,
read per decode step, each as a share of the full cache at that moment; distinct counts an entry once that several query
heads read.</li>
<li>Strict: the score if the first value named counts. Cut: answers that the length limit ended.</li>
<li>Charts: the solid line joins the results that no other beats in both score and size (or time), the dashed line is
the full cache (for a diffusion model, decoding without a cache), and the dotted line is the method random, if it was
run. Click a family in a legend to show only that family.</li>
</ul>
"""
HEAD = (
    TableCell("rank"), TableCell("method", kind="text"), TableCell("family", kind="pick text"), TableCell("score"),
    TableCell("95 %"), TableCell("vs. full"), TableCell("95 %"), TableCell("p (Holm)"),
    TableCell("verdict", kind="text"), TableCell("budget", kind="pick"),
    TableCell("stored"), TableCell("conversation"), TableCell("bytes/token"),
    TableCell("read"), TableCell("distinct"), TableCell("strict"), TableCell("cut"), TableCell("per token"),
    TableCell("first token"), TableCell("top-1"), TableCell("KL, nats"), TableCell("effect in"),
    TableCell("run", kind="text"),
)
RUN_HEAD = (
    "run", "settings", "budget", "kernels", "kvbench", "torch", "transformers", "commit", "started",
    "seconds",
)


def write_report(groups: Sequence[Sequence[GroupedRun]], grids: Sequence[Grid]) -> bytes:
    """Write the report as one HTML page.

    Raises:
        UserError: a package of the extra is not installed.
    """
    results = [x.result for entries in groups for x in entries]
    rows = [flatten(x) for x in results]
    names = [x.name for x in find_columns(Result)]
    files = [
        write_download("runs.csv", "text/csv", write_csv(rows, names)),
        write_download("runs.json", "application/json", json.dumps([
            {key: value for key, value in row.items() if value is not None} for row in rows
        ])),
    ]
    titles = name_groups([x[0].result for x in groups])
    links = "".join(
        f'<li><a href="#group-{i}">{escape(title)}</a>: {len(entries)}</li>\n'
        for i, (title, entries) in enumerate(zip(titles, groups, strict=True))
    )
    parts = [
        f"<p>{count(len(results), 'run')}. Data: {', '.join(files)}</p>\n<nav><ul>\n{links}</ul></nav>\n{ABOUT}",
        *(
            write_group(entries, f"group-{i}", title)
            for i, (title, entries) in enumerate(zip(titles, groups, strict=True))
        ),
        *(write_grid(x, f"grid-{i}", list_scores(grids)) for i, x in enumerate(grids)),
    ]
    return write_page("kvbench report", "".join(parts))


def name_group(result: Result) -> str:
    """One line about the protocol of a run's group."""
    turns = result.spec.turns
    return ", ".join([
        result.task.name, f"{result.task.length:,} tokens", str(result.mode), VISIBILITIES[result.visibility],
        *([f"{turns} turns, {result.history} history"] if turns > 1 else []), result.model.id, result.spec.device,
    ])


def name_groups(results: Sequence[Result]) -> list[str]:
    """The lines of several groups, given a run of each. Groups of the same line also show where they differ."""
    lines = [name_group(x) for x in results]
    protocols = [dict(list_protocol(x)) for x in results]
    named = []
    for line, protocol in zip(lines, protocols, strict=True):
        others = [x for other, x in zip(lines, protocols, strict=True) if other == line]
        differing = (text for key, text in protocol.items() if any(x[key] != text for x in others))
        named.append("; ".join([line, *differing]))
    return named


def list_protocol(result: Result) -> list[tuple[str, str]]:
    """The fields that all runs of a group share, as text."""
    task, model, spec, where = result.task, result.model, result.spec, result.environment
    generation = spec.generation.model_dump(mode="json", exclude_none=True)
    machine = ", ".join(filter(None, [
        where.gpu, where.cpu, count(where.threads, "thread"), f"{result.latency.timing} timing",
    ]))
    code = "" if task.code is None else f", code {task.code[:12]}"
    parts = "" if spec.parts is None else f", cut into parts of {spec.parts} tokens"
    prefill = "the whole prompt at once" if spec.chunk is None else f"{spec.chunk:,} tokens at a time"
    return [
        ("task", f"{task.name} {task.version} ({task.suite}{code}) {format_settings(task.settings)}".strip()),
        ("prompts", (
            f"{task.prompt_id}, {task.length:,} tokens, chat template {task.chat_template_sha or 'none'}, "
            f"BOS token from {task.bos}, truncation {task.truncation}, data {task.dataset_revision or 'generated'}"
            f"{parts}"
        )),
        ("scorer", f"{task.scorer}: {Metric.of(result.score).title}"),
        ("samples", (
            f"{count(spec.samples, 'context')} x {count(spec.turns, 'question')}, split {spec.split}, seed {spec.seed}"
        )),
        ("mode", ", ".join([
            str(result.mode), VISIBILITIES[result.visibility], f"{result.history} history",
            *(["recompressed each turn"] if spec.recompress else []),
        ])),
        ("model", (
            f"{model.id} ({model.kind}, {model.params:,} parameters, {model.dtype}), files {model.sha256[:12]}, "
            f"tokenizer {model.tokenizer_sha256[:12]}"
        )),
        ("prefill", f"{prefill}, kernels {spec.kernels}"),
        ("answers", ", ".join([
            *(f"{key}: {json.dumps(value)}" for key, value in generation.items()),
            f"stop tokens: {', '.join(map(str, task.stop))}",
        ])),
        ("machine", machine if where.device_map is None else f"{machine}, spread as {json.dumps(where.device_map)}"),
    ]


def write_group(entries: Sequence[GroupedRun], name: str, title: str) -> str:
    """Write the section of a group; `name` is its anchor."""
    result = entries[0].result
    costs = "".join(
        write_chart(draw_cost(entries, cost), f"{name}-cost-{i}", f"Score against {cost.name}")
        for i, cost in enumerate(COSTS)
    )
    cells = "".join(
        write_chart(draw(entries), f"{name}-{key}", caption) for draw, key, caption in (
            (draw_turns, "turns", "Score by turn"), (draw_quarters, "quarters", "Score by quarter of the answer"),
            (draw_distances, "distances", "Top-1 agreement with the full cache, by position in the answer"),
        )
    )
    slow = "" if result.spec.device != "cpu" else (
        '<p class="note">Times on a shared CPU are not comparable between runs.</p>\n'
    )
    doubts = "".join(
        f'<p class="note">Warning: {escape(x)}</p>\n' for x in group_doubts((x.label, x.result) for x in entries)
    )
    terms = "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>\n" for key, value in list_protocol(result))
    ranks = sorted({x.rank for x in entries if x.rank is not None})
    rows = write_table(
        "Runs, best first; runs of one rank share a background", _name_columns(entries),
        [list_cells(x) for x in entries], named_by=1,
        shaded=[x.rank is not None and ranks.index(x.rank) % 2 == 0 for x in entries], sortable=True,
    )
    runs = write_table("Runs", [TableCell(x, kind="text") for x in RUN_HEAD],
                       [_describe_run(x.result) for x in entries])
    return (
        f'<section id="{name}">\n<h2>{escape(title)}</h2>\n'
        f"<details><summary>Protocol of these runs</summary>\n<dl>{terms}</dl></details>\n"
        f'{doubts}<div class="charts">\n{costs}</div>\n{slow}{rows}<div class="narrow">{cells}</div>\n'
        f"<details><summary>Settings, versions and commits of these runs</summary>\n{runs}</details>\n</section>\n"
    )


def _name_columns(entries: Sequence[GroupedRun]) -> list[TableCell]:
    """HEAD with the metric and the baseline of the group."""
    names = {"score": Metric.of(entries[0].result.score).title, "vs. full": f"vs. {entries[0].baseline or 'full'}"}
    return [replace(x, text=names.get(x.text, x.text)) for x in HEAD]


def list_cells(entry: GroupedRun) -> list[TableCell]:
    """The cells of a row, in the order of HEAD."""
    result, difference = entry.result, entry.difference
    score, latency, effect = result.score, result.latency, result.effect
    metric = Metric.of(score)
    shown = NONE if score.mean is None else TableCell(metric.write(score.mean), metric.scale(score.mean))
    if not entry.measured:
        shown = TableCell(result.error or f"no score: {explain_no_score(result)}", kind="text failed")
    p, mean, ends, verdict = None, None, None, ""
    if difference is not None:
        p, mean, ends = difference.p_adjusted, difference.mean, difference.ci95
        verdict = difference.judge(higher_is_better=score.higher_is_better)
    return [
        number(entry.rank, "d"), TableCell(entry.label), TableCell(result.method.family, kind="text"), shown,
        NONE if score.ci95 is None else TableCell(metric.write_interval(score.ci95), score.ci95[0]),
        NONE if mean is None else TableCell(metric.write_difference(mean), mean),
        NONE if ends is None else TableCell(metric.write_difference_interval(ends), ends[0]),
        NONE if p is None else TableCell(format_p(p), p), TableCell(verdict, kind="text"),
        TableCell(result.budget.asked or "-"), number(stored_share(result), ".1%"),
        number(conversation_share(result), ".1%"), number(bytes_per_token(result), ",.0f"),
        number(read_share(result), ".1%"), number(distinct_read_share(result), ".1%"),
        number(find_strict(result), ".3f"), number(cut_share(result), ".1%"),
        milliseconds(latency.tpot_s), milliseconds(latency.ttft_s),
        number(None if result.agreement is None else result.agreement.top1, ".3f"),
        number(None if result.agreement is None else result.agreement.kl, ".3g"),
        NONE if effect is None else TableCell(f"{effect.n_acted} of {effect.n}"),
        TableCell(result.run_id, kind="text"),
    ]


def _describe_run(result: Result) -> list[TableCell]:
    where = result.environment
    commit = "-" if where.git is None else f"{where.git.commit[:12]}{' (uncommitted)' if where.git.dirty else ''}"
    texts = (
        result.run_id, format_settings(result.method.settings) or "-",
        f"{result.budget.asked or '-'} {format_settings(result.budget.resolved)}",
        " ".join([result.kernels.implementation, *result.kernels.ops]), where.kvbench, where.torch,
        where.transformers, commit, where.started, f"{where.seconds:,.0f}",
    )
    return [TableCell(x, kind="text") for x in texts]


def write_grid(grid: Grid, name: str, scores: Sequence[float]) -> str:
    """Write the section of a run over lengths and depths; `scores` share its color scale."""
    result = grid.result
    lines = (f"{result.task.name} on {result.model.id}, scored by {result.score.metric}", grid.size, grid.summary)
    said = "".join(f"<p>{escape(x)}</p>\n" for x in lines)
    failure = f'<p class="failed">Failed: {escape(result.error)}</p>\n' if result.error else ""
    numbers = write_table(
        "Mean score by depth of the needle (rows) and tokens (columns)",
        [TableCell(""), *(TableCell(f"{x:,}") for x in grid.lengths)],
        [[TableCell(f"{depth:.0f} %"), *(number(x, ".3f") for x in row)]
         for depth, row in zip(grid.depths, grid.cells, strict=True)],
    )
    return (
        f'<section id="{name}">\n<h2>{escape(grid.name)}</h2>\n{said}{failure}'
        f'<div class="narrow">{write_chart(draw_grid(grid, scores), f"{name}-cells")}</div>\n{numbers}</section>\n'
    )
