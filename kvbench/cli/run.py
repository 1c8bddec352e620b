"""`kvbench run`: run a method on a task or a suite."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvbench.cli.output import print_json
from kvbench.cli.sweep import run_cells
from kvbench.errors import UserError

if TYPE_CHECKING:
    from kvbench.sweep.cell import CellReport
    from kvbench.sweep.suite import Mean

Text = str | None
Pairs = list[str] | None


def run_command(
    *,
    method: Annotated[str, typer.Option(help="A name of `kvbench list methods`, or path/to/file.py:Class.")],
    task: Annotated[
        Text, typer.Option(help="A name of `kvbench list tasks`, path/to/file.py:Class, or path/to/task.toml.")
    ] = None,
    suite: Annotated[
        Text, typer.Option(help="In place of a task, a name of `kvbench list suites`, or path/to/suite.toml.")
    ] = None,
    model: Annotated[
        Text, typer.Option(help="A bundled model, a local folder, a hub id, or random: before one; default: mini.")
    ] = None,
    budget: Annotated[Text, typer.Option(help="A share such as 25%, rows per KV head such as 1024, or paper.")] = None,
    mode: Annotated[Text, typer.Option(help="single, multi-turn or multi-request; default: single.")] = None,
    visibility: Annotated[
        Text, typer.Option(help="What the method sees when it compresses: visible, hidden or first-turn.")
    ] = None,
    history: Annotated[Text, typer.Option(help="Earlier answers of multi-turn: reference or own.")] = None,
    recompress: Annotated[bool, typer.Option("--recompress", help="Compress again at every turn.")] = False,
    template: Annotated[
        Text, typer.Option(help="own: the tokenizer's chat template, where it has one; none: the text alone.")
    ] = None,
    scorer: Annotated[Text, typer.Option(help="A scorer of the task; see `kvbench show TASK`.")] = None,
    split: Annotated[Text, typer.Option(help="test, or dev to choose settings on; default: test.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens of prompt and answer; default: the task's.")] = None,
    samples: Annotated[int | None, typer.Option(help="Contexts; default: 20.")] = None,
    turns: Annotated[int | None, typer.Option(help="Questions per context; default: the task's.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the samples; default: 0.")] = None,
    settings: Annotated[
        Pairs, typer.Option("--set", metavar="KEY=VALUE", help="A setting of the method; repeatable.")
    ] = None,
    task_settings: Annotated[
        Pairs, typer.Option("--task-set", metavar="KEY=VALUE", help="A setting of the task; repeatable.")
    ] = None,
    gen: Annotated[
        Pairs,
        typer.Option("--gen", metavar="KEY=VALUE", help="limit=N caps new tokens per turn; see docs/diffusion.md."),
    ] = None,
    chunk: Annotated[int | None, typer.Option(help="Most prompt tokens per forward pass.")] = None,
    kernels: Annotated[
        Text, typer.Option(help="torch, triton, or flash: torch, and flash-attn for prompts; default: torch.")
    ] = None,
    device: Annotated[Text, typer.Option(help="cpu or cuda; default: cuda where there is one.")] = None,
    device_map: Annotated[
        Text, typer.Option(help="Spread a model over GPUs, memory and disk: auto, balanced, ... or a .json file.")
    ] = None,
    dtype: Annotated[Text, typer.Option(help="float32, bfloat16 or float16; default: the checkpoint's.")] = None,
    wandb: Annotated[bool, typer.Option("--wandb", help="Log the result to Weights & Biases.")] = False,
    trackio: Annotated[bool, typer.Option("--trackio", help="Log the result to Trackio.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of runs.")] = Path("runs"),
    as_json: Annotated[
        bool, typer.Option("--json", help="End standard output with the result as one JSON line.")
    ] = False,
) -> int:
    """Run a method on a task or a suite. The same command resumes an interrupted run."""
    from kvbench.settings import parse_pairs

    options = {
        "method": method, "task": task, "model": model, "budget": budget, "mode": mode, "visibility": visibility,
        "history": history, "recompress": recompress or None, "template": template, "scorer": scorer, "split": split,
        "length": length, "samples": samples, "turns": turns, "seed": seed, "chunk": chunk, "kernels": kernels,
        "device": device, "device-map": device_map, "dtype": dtype, "set": parse_pairs(settings or (), "--set") or None,
        "task-set": parse_pairs(task_settings or (), "--task-set") or None,
        "gen": parse_pairs(gen or (), "--gen") or None,
    }
    given = {key: value for key, value in options.items() if value is not None}
    trackers = tuple(name for name, wanted in (("wandb", wandb), ("trackio", trackio)) if wanted)
    if (task is None) == (suite is None):
        raise UserError("run takes a --task or a --suite. See `kvbench list tasks` and `kvbench list suites`.")
    if suite is None:
        return _run_task(given, trackers, out, as_json=as_json)
    return _run_suite(suite, given, trackers, out, as_json=as_json)


def _run_task(given: dict[str, Any], trackers: tuple[str, ...], out: Path, *, as_json: bool) -> int:
    from kvbench.analysis.compare import find_full
    from kvbench.analysis.power import describe_power
    from kvbench.cli.results import print_result
    from kvbench.integrations.trackers import log_result
    from kvbench.log import say
    from kvbench.runs.job import prepare
    from kvbench.sweep.file import Options

    job = prepare(replace(Options(**given).request(out), trackers=trackers))
    if job.scorer.higher_is_better and not job.model.random:
        say(describe_power(job.spec.samples, job.spec.turns, find_full(job.spec, out)))
    from kvbench.runs.progress import show_progress  # imports torch; requests are checked first
    from kvbench.runs.runner import run

    with show_progress(job.spec.samples) as progress:
        outcome = run(job, progress)
    if outcome.existing:
        changes = f" It was computed by other code ({'; '.join(outcome.code_changes)})." if outcome.code_changes else ""
        say(f"already finished: showing {outcome.folder}.{changes} Delete the folder to run it again.")
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
        say(f"{suite.label}: {len(results)} of {whole} runs have a result, so suite.json was not written.")
    refused = [x for x in trackers for result in results if not log_result(x, result)]
    if as_json:
        print_json({
            "name": suite.name, "version": suite.version, "file": None if path is None else str(path),
            "runs": [x.document for x in reports], "means": [asdict(x) for x in means],
        })
    return 0 if all(x.status == "ok" for x in reports) and not refused else 1


def _print(reports: list[CellReport], means: list[Mean]) -> None:
    """Print one row per run with the options in which the runs differ, then the means."""
    from kvbench.analysis.formatting import format_score, print_table
    from kvbench.sweep.file import as_text

    keys = list(dict.fromkeys(["task", *(key for x in reports for key in x.cell.options)]))
    rows = []
    for report in reports:
        result, request = report.result, report.cell.request
        own = [request.task, *(report.cell.options.get(key, "") for key in keys[1:])]
        where = "-" if report.folder is None else report.folder.name
        measured = ["-", "-", "-"]
        if result is not None:
            measured[0] = format_score(result)
            if result.memory is not None:
                measured[1] = f"{result.memory.ratio:.1%}"
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
