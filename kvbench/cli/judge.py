"""`kvbench check`, `score` and `compare`: what to think of a method, a task, an answer, a difference."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvbench.cli.output import print_json
from kvbench.errors import UserError

if TYPE_CHECKING:
    from kvbench.check.audit import Audit
    from kvbench.task import Task

Json = Annotated[bool, typer.Option("--json", help="End standard output with one JSON line.")]
Out = Annotated[Path, typer.Option(help="Folder of runs, where a run is given by its id.")]


def check_command(
    name: Annotated[
        str, typer.Argument(help="A method or task, path/to/file.py:Class of one, or path/to/task.toml.")
    ],
    *,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of the method; repeatable.")
    ] = None,
    task_settings: Annotated[
        list[str] | None, typer.Option("--task-set", metavar="KEY=VALUE", help="A setting of the task; repeatable.")
    ] = None,
    model: Annotated[str, typer.Option(help="Whose tokenizer counts a task's lengths.")] = "mini",
    samples: Annotated[int, typer.Option(help="Examples of a task to look at; of a .toml, all are.")] = 20,
    as_json: Json = False,
) -> int:
    """Try on a method what every method must do, or look through a task's examples; exit code 1 where a claim fails."""
    from kvbench.registry import find_either
    from kvbench.settings import configure, parse_pairs
    from kvbench.task import Task

    if name.endswith(".toml"):
        if settings or task_settings:
            raise UserError(f"{name} has no settings: leave --set and --task-set out.")
        return _check_rows(Path(name), model, as_json=as_json)
    found = find_either(name)
    if issubclass(found, Task):
        if settings:
            raise UserError(f"--set is for methods, and {name} is a task. Use --task-set.")
        task = configure(found, parse_pairs(task_settings or (), "--task-set"), "--task-set", name)
        return _check_task(task, model, samples, as_json=as_json)
    if task_settings:
        raise UserError(f"--task-set is for tasks, and {name} is a method. Use --set.")
    made = configure(found, parse_pairs(settings or (), "--set"), "--set", name)
    from kvbench.analysis.format import print_rows
    from kvbench.check import check

    claims = check(found, made.settings)
    print_rows("", (found.card.name, "", "found", "seconds"), [
        (x.name, "ok" if x.passed else "FAILED", x.detail, f"{x.seconds:.2f}") for x in claims
    ])
    if as_json:
        print_json([asdict(x) for x in claims])
    return 0 if all(x.passed for x in claims) else 1


def _check_rows(path: Path, model: str, *, as_json: bool) -> int:
    from kvbench.check.audit import audit_rows
    from kvbench.custom import read_parts
    from kvbench.hf import load_tokenizer

    table, rows = read_parts(path)
    return _print_audit(table.name, audit_rows(table, rows, load_tokenizer(model)), model, as_json=as_json)


def _check_task(task: Task, model: str, samples: int, *, as_json: bool) -> int:
    from kvbench.check.audit import audit_task
    from kvbench.hf import load_tokenizer

    if samples < 1:
        raise UserError(f"samples {samples} must be 1 or more.")
    return _print_audit(task.name, audit_task(task, load_tokenizer(model), samples), model, as_json=as_json)


def _print_audit(name: str, audit: Audit, model: str, *, as_json: bool) -> int:
    from kvbench.analysis.format import print_rows

    least, most = audit.tokens or (0, 0)
    print_rows("", (name, "ok" if not audit.findings else "WRONG"), [
        ("examples", f"{audit.examples} with {audit.turns} questions"),
        ("first prompt and answer", f"{least:,} to {most:,} tokens of {model}"),
        ("cut in the middle", str(audit.cut)),
    ])
    if audit.findings:
        print_rows("", ("line", "row", "turn", "what is wrong"), [
            ("-" if x.line is None else str(x.line), x.row or "-", "-" if x.turn is None else str(x.turn), x.what)
            for x in audit.findings
        ])
    if as_json:
        print_json({"name": name, "model": model, **asdict(audit)})
    return 1 if audit.findings else 0


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
    from kvbench.analysis.finished import find_run
    from kvbench.analysis.format import print_rows
    from kvbench.analysis.rescore import rescore

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
    from kvbench.analysis.compare import compare_runs, find_conflicts, find_regressions, name_questions, rank_runs
    from kvbench.analysis.finished import find_run, load_run
    from kvbench.analysis.format import print_regressions, print_rows, score_cells
    from kvbench.log import say

    if len(runs) < 2:
        raise UserError("compare needs two runs or more. Give their folders or ids, the baseline first.")
    loaded = [load_run(find_run(x, out)) for x in runs]
    conflicts = find_conflicts(loaded)
    for conflict in conflicts:
        say(f"warning: {conflict}")
    if conflicts:
        say("warning: a difference of scores may come from these and not from the methods.")
    results = [x.result for x in loaded]
    ranks: list[int | None] = [None] * len(loaded)
    if len({name_questions(x.spec) for x in results}) == 1:
        ranks = rank_runs(loaded)
    differences = compare_runs(loaded[0], loaded[1:])
    columns, rows = score_cells(results, ranks, [None, *differences])
    print_rows("", columns, rows)
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
