"""`kvbench compare`: runs of one task side by side."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kvbench.cli.options import Json, Out
from kvbench.cli.output import print_json
from kvbench.errors import UserError


def compare_command(
    runs: Annotated[list[str], typer.Argument(help="Folders or ids of runs; the first is the one compared with.")],
    *,
    out: Out = Path("runs"),
    as_json: Json = False,
) -> None:
    """Put runs side by side: paired differences, which of them are noise, and what became worse than the full cache."""
    from kvbench.analysis.compare import (
        compare_runs,
        describe_code,
        find_conflicts,
        find_regressions,
        name_questions,
        rank_runs,
    )
    from kvbench.analysis.formatting import print_table
    from kvbench.analysis.load import find_run, load_run
    from kvbench.cli.results import print_regressions, score_cells
    from kvbench.log import say

    if len(runs) < 2:
        raise UserError("compare needs two runs or more. Give their folders or ids, the baseline first.")
    loaded = [load_run(find_run(x, out)) for x in runs]
    conflicts = find_conflicts(loaded)
    for conflict in conflicts:
        say(f"warning: {conflict}")
    if conflicts:
        say("warning: a difference of scores may come from these and not from the methods.")
    if (code := describe_code(loaded)) is not None:
        say(f"warning: {code}. `result.json` of each run has the details.")
    results = [x.result for x in loaded]
    ranks: list[int | None] = [None] * len(loaded)
    if len({name_questions(x.spec) for x in results}) == 1:
        ranks = rank_runs(loaded)
    differences = compare_runs(loaded[0], loaded[1:])
    columns, rows = score_cells(results, ranks, [None, *differences])
    print_table("", columns, rows)
    regressions = find_regressions(loaded)
    if regressions:
        print_regressions(regressions)
    if as_json:
        shown = {"run_id", "status", "method", "score", "output", "memory", "latency"}
        print_json({
            "runs": [
                run.model_dump(mode="json", include=shown) | {"rank": rank}
                for run, rank in zip(results, ranks, strict=True)
            ],
            "differences": [asdict(x) | {"within_noise": x.within_noise} for x in differences],
            "regressions": [asdict(x) for x in regressions], "warnings": conflicts,
        })
