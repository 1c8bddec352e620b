"""`kvbench run`: run a method on a task or a suite."""

from __future__ import annotations

import inspect
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvbench.cli.options import RunsOut
from kvbench.cli.output import print_json
from kvbench.cli.sweep import run_cells
from kvbench.errors import UserError
from kvbench.runs.options import list_options

if TYPE_CHECKING:
    from kvbench.sweep.cell import CellReport
    from kvbench.sweep.suite import SuiteMean

TRACKERS = {"wandb": "Weights & Biases", "trackio": "Trackio"}
"""Packages that `--<name>` logs a result with."""

def run_command(**given: Any) -> int:
    """Run a method on a task or a suite. The same command resumes an interrupted run."""
    from kvbench.settings import parse_pairs

    suite, out, as_json = given["suite"], given["out"], given["as_json"]
    trackers = tuple(name for name in TRACKERS if given[name])
    options: dict[str, Any] = {}
    for option in list_options():
        value = given[option.name]
        if option.repeatable:
            value = parse_pairs(value or (), option.flag) or None
        if value is not None and value is not False:
            options[option.key] = value
    if "task" in options and suite is not None:
        raise UserError("--task and --suite were both given. Give one.")
    if "task" not in options and suite is None:
        raise UserError("run takes a --task or a --suite. See `kvbench list tasks` and `kvbench list suites`.")
    if suite is None:
        return _run_task(options, trackers, out, as_json=as_json)
    return _run_suite(suite, options, trackers, out, as_json=as_json)


def _make_signature() -> inspect.Signature:
    """The options of the table, and those of the command alone, as typer reads them."""
    found = []

    def add(name: str, kind: Any, default: Any, *flags: str, text: str, metavar: str | None = None) -> None:
        hint = Annotated[kind, typer.Option(*flags, help=text, metavar=metavar)]
        found.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint))

    for option in list_options():
        if option.name == "method":
            add(option.name, option.kind, inspect.Parameter.empty, option.flag, text=option.help)
        elif option.repeatable:
            add(option.name, list[str] | None, None, option.flag, text=option.help, metavar="KEY=VALUE")
        elif option.kind is bool:
            add(option.name, bool, False, option.flag, text=option.help)
        else:
            add(option.name, option.kind | None, None, option.flag, text=option.help)
        if option.name == "task":
            text = "Instead of a task, a name of `kvbench list suites`, or path/to/suite.toml."
            add("suite", str | None, None, "--suite", text=text)
    for name, title in TRACKERS.items():
        add(name, bool, False, f"--{name}", text=f"Log the result to {title}.")
    found.append(inspect.Parameter("out", inspect.Parameter.KEYWORD_ONLY, default=Path("runs"), annotation=RunsOut))
    add("as_json", bool, False, "--json", text="End standard output with the result as one JSON line.")
    return inspect.Signature(found)


run_command.__signature__ = _make_signature()  # type: ignore[attr-defined]  # what inspect.signature returns


def _run_task(given: dict[str, Any], trackers: tuple[str, ...], out: Path, *, as_json: bool) -> int:
    from kvbench.analysis.compare import find_full
    from kvbench.analysis.power import describe_power
    from kvbench.cli.results import print_result
    from kvbench.integrations.trackers import log_result
    from kvbench.log import say
    from kvbench.runs.prepare import prepare
    from kvbench.sweep.file import make_request

    job = prepare(replace(make_request(given, out), trackers=trackers))
    if job.scorer.higher_is_better and not job.model.random:
        say(describe_power(job.spec.samples, job.spec.turns, find_full(job.spec, out)))
    from kvbench.runs.progress import show_progress  # imports torch; requests are checked first
    from kvbench.runs.runner import run

    with show_progress(job.spec.samples) as progress:
        outcome = run(job, progress)
    if outcome.existing:
        say(outcome.describe_existing())
    print_result(outcome.result, outcome.folder)
    refused = [x for x in trackers if not log_result(x, outcome.result)]
    if as_json:
        print_json(outcome.result.model_dump(mode="json"))
    return 0 if outcome.result.status == "ok" and not refused else 1


def _run_suite(name: str, given: dict[str, Any], trackers: tuple[str, ...], out: Path, *, as_json: bool) -> int:
    from kvbench.integrations.trackers import log_result
    from kvbench.log import say
    from kvbench.sweep.check import check_cells
    from kvbench.sweep.suite import average, find_suite, save_suite

    suite = find_suite(name)
    cells = [replace(x, request=replace(x.request, trackers=trackers)) for x in suite.cells(given, out)]
    check_cells(cells)
    reports = run_cells(cells)
    results = [x.result for x in reports if x.result is not None]
    means = list(average(reports))
    _print(reports, means)
    path, whole = None, len(suite.cells({"method": given["method"]}, out))
    if len(results) == whole:
        path = save_suite(suite, results[0].method.name, [x.run_id for x in results], out)
        say(f"{suite.label}: {path}")
    else:
        part = f"this command selects {len(cells)} of {whole} runs of the suite"
        part = part if len(cells) < whole else f"{len(results)} of {whole} runs have a result"
        say(f"{suite.label}: {part}, so suite.json was not written.")
    refused = [x for x in trackers for result in results if not log_result(x, result)]
    if as_json:
        print_json({
            "name": suite.name, "version": suite.version, "file": None if path is None else str(path),
            "runs": [x.document for x in reports], "means": [asdict(x) for x in means],
        })
    return 0 if all(x.status == "ok" for x in reports) and not refused else 1


def _print(reports: list[CellReport], means: list[SuiteMean]) -> None:
    """Print one row per run with the options in which the runs differ, then the means."""
    from kvbench.analysis.formatting import format_score, format_share, print_table
    from kvbench.analysis.shares import stored_share
    from kvbench.runs.spec import shorten
    from kvbench.sweep.file import as_text

    keys = list(dict.fromkeys(["task", *(key for x in reports for key in x.cell.options)]))
    rows = []
    for report in reports:
        result, request = report.result, report.cell.request
        own = [request.task, *(report.cell.options.get(key, "") for key in keys[1:])]
        where = "-" if report.folder is None else shorten(report.folder.name)
        measured = ["-", "-", "-"]
        if result is not None:
            measured[0] = format_score(result)
            measured[1] = format_share(stored_share(result))
            if result.agreement is not None:
                measured[2] = f"{result.agreement.top1:.3f}"
        rows.append([
            *own, report.status, *measured, where if report.error is None else f"{where}: {report.error}"
        ])
    for mean in means:
        group = {key: as_text(value) for key, value in asdict(mean).items() if value is not None}
        alike = [group.get(key, "") for key in keys[1:]]
        rows.append([f"mean of {mean.runs}", *alike, "", f"{mean.mean:.3f}", "", "", ""])
    print_table("", (*keys, "", "score", "stored", "top-1", "run"), rows)
