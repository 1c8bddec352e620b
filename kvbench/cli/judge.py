"""`kvbench check`, `score` and `compare`: what to think of a method, an answer, a difference."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kvbench.cli.output import print_json
from kvbench.errors import UserError

Json = Annotated[bool, typer.Option("--json", help="End standard output with one JSON line.")]
Out = Annotated[Path, typer.Option(help="Folder of runs, where a run is given by its id.")]


def check_command(
    name: Annotated[str, typer.Argument(help="A method, or path/to/file.py:Class.")],
    *,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of the method; repeatable.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Try on a method what every method must do; exit code 1 where a claim fails."""
    from kvbench.registry import find_method
    from kvbench.settings import configure, parse_pairs
    from kvbench.table import print_rows

    method = find_method(name)
    made = configure(method, parse_pairs(settings or (), "--set"), "--set", name)
    from kvbench.conformance import check

    claims = check(method, made.settings)
    print_rows("", (method.card.name, "", "found", "seconds"), [
        (x.name, "ok" if x.passed else "FAILED", x.detail, f"{x.seconds:.2f}") for x in claims
    ])
    if as_json:
        print_json([asdict(x) for x in claims])
    return 0 if all(x.passed for x in claims) else 1


def score_command(
    run: Annotated[str, typer.Argument(help="The folder or id of a run.")],
    *,
    scorer: Annotated[str | None, typer.Option(help="A scorer of the task; default: the run's.")] = None,
    task: Annotated[
        str | None, typer.Option(help="path/to/file.py:Class, where the run's task came from a file.")
    ] = None,
    out: Out = Path("runs"),
    as_json: Json = False,
) -> None:
    """Score the answers of a run again, without a model; the run stays as it is."""
    from kvbench.compare import find_run
    from kvbench.rescore import rescore
    from kvbench.table import print_rows

    record, path = rescore(find_run(run, out), scorer, task)
    mean, interval = record.score.mean, record.score.ci95
    print_rows("", (record.scorer, record.run_id), [
        (record.score.metric, "none: samples failed" if mean is None else f"{mean:.3f}"),
        ("95%", "-" if interval is None else f"[{interval[0]:.3f}, {interval[1]:.3f}]"),
        ("samples", f"{record.n_scored} of {record.n_samples}"),
        ("file", str(path)),
    ])
    if as_json:
        print_json(record.model_dump(mode="json"))


def compare_command(
    runs: Annotated[list[str], typer.Argument(help="Folders or ids of runs; the first is the one compared with.")],
    *,
    out: Out = Path("runs"),
    as_json: Json = False,
) -> None:
    """Put runs side by side: paired differences, which of them are noise, and what became worse than the full cache."""
    from kvbench.compare import compare_pair, find_conflicts, find_regressions, load_run
    from kvbench.log import say
    from kvbench.table import print_regressions, print_rows, score_cells

    if len(runs) < 2:
        raise UserError("compare needs two runs or more. Give their folders or ids, the baseline first.")
    loaded = [load_run(x, out) for x in runs]
    conflicts = find_conflicts(loaded)
    for conflict in conflicts:
        say(f"warning: {conflict}")
    if conflicts:
        say("warning: a difference of scores may come from these and not from the methods.")
    differences = [compare_pair(loaded[0], x) for x in loaded[1:]]
    columns, rows = score_cells([x.result for x in loaded], [None, *differences])
    print_rows("", columns, rows)
    regressions = find_regressions(loaded)
    if regressions:
        print_regressions(regressions)
    if as_json:
        shown = {"run_id", "status", "method", "score", "output", "memory", "latency"}
        print_json({
            "runs": [x.result.model_dump(mode="json", include=shown) for x in loaded],
            "differences": [asdict(x) for x in differences], "regressions": [asdict(x) for x in regressions],
            "warnings": conflicts,
        })
