"""Tables of several runs side by side: scores, costs, and answers that are worse than the full cache's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from kvbench.analysis.doubts import find_strict
from kvbench.analysis.formatting import format_bytes, format_difference, format_seconds, format_share, print_table
from kvbench.analysis.metrics import Metric
from kvbench.analysis.shares import conversation_share, cut_share, distinct_read_share, read_share, stored_share
from kvbench.cli.output import echo

if TYPE_CHECKING:
    from kvbench.analysis.compare import Difference, Regressions
    from kvbench.analysis.recovery import Recovery
    from kvbench.report.group import GroupedRun
    from kvbench.runs.results import Result

COSTS = "shares of the full cache: stored after the context, at the end of the conversation, and read per step"
LEGENDS = {
    "distinct": "distinct: reads with every entry counted once", "cut": "cut: answers that the length limit ended",
    "strict": "strict: score if the first value named counts",
}
"""Titles of the table of costs: the sentence for all its columns, and one for each of these."""
LISTED = 3
"""Regressions shown per run; `kvbench answers` shows all, and --json lists them."""


def score_cells(
    results: Sequence[Result], labels: Sequence[str], ranks: Sequence[int | None],
    differences: Sequence[Difference | None],
) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the table of scores, one run per row; None in `differences` marks the baseline."""
    columns = ["method", "rank", "score", "difference", "p (Holm)", "verdict"]
    rows = []
    for result, label, rank, difference in zip(results, labels, ranks, differences, strict=True):
        mean, ends, p, verdict = format_difference(difference, result.score)
        rows.append([
            label, "-" if rank is None else str(rank), _score_cell(result),
            *(("baseline", "", "") if difference is None else (mean if ends == "-" else f"{mean}\n{ends}", p, verdict)),
        ])
    return columns, rows


def group_cells(entries: Sequence[GroupedRun]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the table of a report's group: score, difference to the baseline, stored and read bytes."""
    baseline = entries[0].baseline
    versus = [] if baseline is None else [f"vs. {baseline}", "verdict"]
    rows = []
    for x in entries:
        mean, _, _, verdict = format_difference(x.difference, x.result.score)
        rows.append([
            "-" if x.rank is None else str(x.rank), x.label,
            f"FAILED: {x.result.error}" if x.result.error else _score_cell(x.result),
            *([mean, verdict] if versus else []),
            format_share(stored_share(x.result)), format_share(read_share(x.result)),
        ])
    return ["rank", "method", "score", *versus, "stored", "reads"], rows


def _score_cell(result: Result) -> str:
    score, metric = result.score, Metric.of(result.score)
    if result.status == "failed" or score.mean is None:
        return "failed" if result.status == "failed" else "-"
    return metric.write(score.mean) if score.ci95 is None else (
        f"{metric.write(score.mean)}\n{metric.write_interval(score.ci95)}"
    )


def recovery_cells(
    recoveries: Sequence[Recovery], results: Sequence[Result], labels: Sequence[str]
) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the table of runs that reuse entries across prompts."""
    named = {x.run_id: (x, label) for x, label in zip(results, labels, strict=True)}
    rows = []
    for x in recoveries:
        result, label = named[x.run_id]
        full = named[x.full][0].latency.ttft_s
        reuse = result.reuse
        assert reuse is not None, "only such runs have a recovery"
        ends = "" if x.ci95 is None else f"\n[{x.ci95[0]:.2f}, {x.ci95[1]:.2f}]"
        times = (reuse.ttft_in_hand_s, None if reuse.loaded else result.latency.ttft_s)
        rows.append([
            label, "no gap" if x.share is None else f"{x.share:.2f}{ends}", f"{reuse.computed_share:.1%}",
            format_bytes(reuse.chunk_bytes), format_bytes(reuse.moved_bytes),
            *("-" if t is None or not full else f"{t / full:.2f}" for t in times),
        ])
    return ["method", "recovered", "computed", "chunks", "moved", "in hand", "with building"], rows


def cost_cells(results: Sequence[Result], labels: Sequence[str]) -> tuple[str, list[str], list[list[str]]]:
    """Legend, columns and rows of the table of costs: shares of the full cache, agreement, cut answers and times.

    Columns that say nothing new are left out: distinct reads that all equal the reads, strict scores that all equal the
    scores, and cut answers where there are none.
    """
    columns: dict[str, Callable[[Result], str]] = {}
    if any(find_strict(x) not in (None, x.score.mean) for x in results):
        columns["strict"] = lambda x: _dash(find_strict(x))
    columns |= {"stored": _share(stored_share), "at end": _share(conversation_share), "reads": _share(read_share)}
    if any(read_share(x) != distinct_read_share(x) is not None for x in results):
        columns["distinct"] = _share(distinct_read_share)
    columns["top-1"] = lambda x: _dash(None if x.agreement is None else x.agreement.top1)
    if any(cut_share(x) for x in results):
        columns["cut"] = _share(cut_share)
    columns["per token"] = lambda x: format_seconds(x.latency.tpot_s)
    legend = "; ".join([COSTS, *(text for name, text in LEGENDS.items() if name in columns)])
    rows = [[label, *(write(x) for write in columns.values())] for x, label in zip(results, labels, strict=True)]
    return legend, ["method", *columns], rows


def _share(find: Callable[[Result], float | None]) -> Callable[[Result], str]:
    return lambda result: format_share(find(result))


def _dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def print_regressions(
    found: Sequence[Regressions], metric: Metric, labels: Mapping[str, str], names: Mapping[str, str]
) -> None:
    """Print how many answers of each run are worse than the full cache's, and the worst of them.

    labels, names: by run id; a command line takes the latter.
    """
    rows = []
    if not any(x.count for x in found):
        echo("No answer is worse than the full cache's.")
        return
    for run in found:
        worst = [
            f"{x.sample}, question {x.turn + 1}: {metric.write(x.full)} -> {metric.write(x.score)}"
            for x in run.samples[:LISTED]
        ]
        if run.count > LISTED:
            worst.append(f"{run.count - LISTED} more: kvbench answers {names[run.full]} {names[run.run_id]}")
        rows.append([labels[run.run_id], f"{run.count} of {run.n}", "\n".join(worst)])
    print_table("answers worse than the full cache's", ("method", "worse", "largest losses"), rows)
