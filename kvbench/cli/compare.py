"""`kvbench compare`: compare runs of one task."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kvbench.cli.options import Baseline, Json, Out
from kvbench.cli.output import echo, print_json
from kvbench.errors import UserError

RECOVERED = (
    "recovered: (score - no context) / (full prefill - no context); computed: tokens times layers of a full prefill; "
    "time to first token relative to the full prefill's, with the chunks in hand and with building them"
)


def compare_command(
    runs: Annotated[list[str], typer.Argument(
        help="Folders or ids of two or more runs. The baseline is the first run of the full cache, else the first run."
    )],
    *,
    baseline: Baseline = None,
    out: Out = Path("runs"),
    as_json: Json = False,
) -> None:
    """Compare runs of one task with paired tests.

    It prints differences from a baseline with p-values, ranks, and answers that became worse.
    """
    from kvbench.analysis.compare import (
        compare_runs,
        describe_code,
        find_baseline,
        find_conflicts,
        find_regressions,
        name_questions,
        rank_runs,
    )
    from kvbench.analysis.doubts import group_doubts
    from kvbench.analysis.formatting import print_table
    from kvbench.analysis.load import find_run, load_found, refer_to
    from kvbench.analysis.metrics import Metric
    from kvbench.analysis.recovery import find_recoveries
    from kvbench.analysis.shares import fill_full_reads
    from kvbench.analysis.significance import UNADJUSTED, describe_too_few
    from kvbench.cli.tables import cost_cells, print_regressions, recovery_cells, score_cells
    from kvbench.log import say
    from kvbench.report.group import label_results

    if len(runs) < 2:
        raise UserError("compare needs two or more runs. Give their folders or ids.")
    loaded = load_found([find_run(x, out) for x in runs], runs)
    if len(loaded) < 2:
        raise UserError("compare needs two or more runs, and these are copies of one. Give another run.")
    conflicts = find_conflicts(loaded)
    for conflict in conflicts:
        say(f"warning: {conflict}")
    if conflicts:
        say("warning: differences are over the common questions. They may be due to these and not to the methods.")
    if (code := describe_code(loaded)) is not None:
        say(f"warning: {code}. See result.json of each run for details.")
    loaded = fill_full_reads(loaded, loaded)
    results = [x.result for x in loaded]
    ranks: list[int | None] = [None] * len(loaded)
    if len({name_questions(x.spec) for x in results}) == 1:
        ranks = rank_runs(loaded)
    base = find_baseline(loaded, baseline)
    differences = compare_runs(loaded[base], [*loaded[:base], *loaded[base + 1 :]])
    labels = label_results(results)
    for doubt in group_doubts(zip(labels, results, strict=True)):
        say(f"warning: {doubt}")
    others = [*labels[:base], *labels[base + 1 :]]
    for label in (x for x, difference in zip(others, differences, strict=True) if not difference.n):
        say(f"warning: {label} and {labels[base]} share no question, so they are not compared.")
    columns, rows = score_cells(results, labels, ranks, [*differences[:base], None, *differences[base:]])
    print_table(f"{Metric.of(results[base].score).title}; baseline: {labels[base]}", columns, rows)
    if any(x.p_adjusted is not None for x in differences):
        echo(UNADJUSTED)
    if any(x.too_few for x in differences):
        contexts = min(x.contexts for x in differences if x.too_few)
        say(describe_too_few(contexts, sum(x.p is not None for x in differences)))
    print_table(*cost_cells(results, labels))
    if recoveries := find_recoveries(loaded):
        print_table(RECOVERED, *recovery_cells(recoveries, results, labels))
    regressions = find_regressions(loaded)
    if regressions:
        print_regressions(
            regressions, Metric.of(results[base].score),
            {x.run_id: label for x, label in zip(results, labels, strict=True)},
            {x.result.run_id: refer_to(x.folder) for x in loaded},
        )
    if as_json:
        shown = {"run_id", "status", "method", "score", "output", "memory", "latency"}
        print_json({
            "baseline": results[base].run_id,
            "runs": [
                run.model_dump(mode="json", include=shown) | {"rank": rank}
                for run, rank in zip(results, ranks, strict=True)
            ],
            "differences": [
                asdict(x) | {
                    "within_noise": x.within_noise,
                    "verdict": x.judge(higher_is_better=results[base].score.higher_is_better) or None,
                }
                for x in differences
            ],
            "recoveries": [asdict(x) for x in recoveries], "regressions": [asdict(x) for x in regressions],
            "warnings": conflicts,
        })
