"""`kvbench check`: test a method or the examples of a task."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvbench.cli.options import Json
from kvbench.cli.output import print_json
from kvbench.errors import MOST_SAMPLES, UserError, check_number
from kvbench.log import count

if TYPE_CHECKING:
    from kvbench.check.audit import Audit
    from kvbench.task import Task


MODEL, SAMPLES = "mini", 20
"""Defaults for tasks."""


def check_command(
    name: Annotated[
        str, typer.Argument(help="A method or task: its name, path/to/file.py:Class, or path/to/task.toml.")
    ],
    *,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of the method; repeatable.")
    ] = None,
    task_settings: Annotated[
        list[str] | None, typer.Option("--task-set", metavar="KEY=VALUE", help="A setting of the task; repeatable.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model whose tokenizer counts the lengths of a task's prompts; default: mini.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(help="Examples of a task to check; default: 20; a .toml is checked whole.")
    ] = None,
    device: Annotated[
        str, typer.Option(help="Where a method is tested: cpu (models in float32) or cuda (models in bfloat16).")
    ] = "cpu",
    as_json: Json = False,
) -> int:
    """Test a method's invariants, or a task's examples. Exit code 1 if a check fails."""
    from kvbench.registry import find_either
    from kvbench.settings import configure, parse_pairs
    from kvbench.task import Task

    if name.endswith(".toml"):
        if settings or task_settings:
            raise UserError(f"{name} has no settings. Leave out --set and --task-set.")
        if samples is not None:
            raise UserError(f"{name} is checked whole. Leave out --samples.")
        _refuse_device(name, device)
        return _check_records(Path(name), model or MODEL, as_json=as_json)
    found = find_either(name)
    if issubclass(found, Task):
        _refuse_device(name, device)
        if settings:
            raise UserError(f"--set is for methods, and {name} is a task. Use --task-set.")
        task = configure(found, parse_pairs(task_settings or (), "--task-set"), "--task-set", name)
        return _check_task(task, model or MODEL, SAMPLES if samples is None else samples, as_json=as_json)
    if task_settings:
        raise UserError(f"--task-set is for tasks, and {name} is a method. Use --set.")
    for flag, value in (("--model", model), ("--samples", samples)):
        if value is not None:
            raise UserError(f"{flag} is for tasks, and {name} is a method, which needs none. Leave it out.")
    made = configure(found, parse_pairs(settings or (), "--set"), "--set", name)
    from kvbench.analysis.formatting import print_table
    from kvbench.check import check
    from kvbench.hf import check_device

    check_device(device)
    results = check(found, made.settings, device)
    first = {x.detail: x.name for x in reversed(results) if not x.passed}
    print_table("", (found.card.name, "", "detail", "seconds"), [
        (x.name, "ok" if x.passed else "FAILED",
         f"as in '{first[x.detail]}'" if first.get(x.detail, x.name) != x.name else x.detail, f"{x.seconds:.2f}")
        for x in results
    ])
    if as_json:
        print_json([asdict(x) for x in results])
    return 0 if all(x.passed for x in results) else 1


def _refuse_device(name: str, device: str) -> None:
    if device != "cpu":
        raise UserError(f"--device is for methods, and {name} is a task, which needs none. Leave it out.")


def _check_records(path: Path, model: str, *, as_json: bool) -> int:
    from kvbench.check.audit import audit_rows
    from kvbench.custom.files import read_parts
    from kvbench.hf import load_tokenizer
    from kvbench.registry import refuse_taken_name

    table, rows = read_parts(path)
    refuse_taken_name("task", table.name, path)
    return _print_audit(table.name, audit_rows(table, rows, load_tokenizer(model)), model, as_json=as_json)


def _check_task(task: Task, model: str, samples: int, *, as_json: bool) -> int:
    from kvbench.check.audit import audit_task
    from kvbench.hf import load_tokenizer

    check_number("samples", samples, most=MOST_SAMPLES)
    return _print_audit(task.name, audit_task(task, load_tokenizer(model), samples), model, as_json=as_json)


def _print_audit(name: str, audit: Audit, model: str, *, as_json: bool) -> int:
    from kvbench.analysis.formatting import print_table

    least, most = audit.tokens or (0, 0)
    print_table("", (name, "ok" if not audit.findings else "FAILED"), [
        ("examples", f"{audit.examples} with {count(audit.turns, 'question')}"),
        ("first prompt and answer", f"{f'{least:,} to ' if least < most else ''}{most:,} tokens of {model}"),
        ("truncated in the middle", str(audit.cut)),
    ])
    if audit.findings:
        print_table("", ("line", "record", "turn", "problem"), [
            ("-" if x.line is None else str(x.line), x.row or "-", "-" if x.turn is None else str(x.turn), x.what)
            for x in audit.findings
        ])
    if as_json:
        print_json({"name": name, "model": model, **asdict(audit)})
    return 1 if audit.findings else 0
