"""`kvbench list` and `kvbench show`."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import MISSING
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvbench.cli.options import Json, Out
from kvbench.cli.output import echo, print_json
from kvbench.errors import UserError, unknown
from kvbench.log import say

if TYPE_CHECKING:
    from kvbench.method import Method
    from kvbench.runs.spec import RunSpec
    from kvbench.sweep.suite import Suite
    from kvbench.task import Task

WHAT = ("methods", "tasks", "models", "suites")
RUN = re.compile(r"(?:^|[^-]-[^/]+-)[0-9a-f]{12}/?$")
"""Ids of runs, which end with a hash, and such hashes."""


def list_command(
    what: Annotated[str, typer.Argument(help="One of: methods, tasks, models, suites.")], *, as_json: Json = False
) -> None:
    """List the available methods, tasks, models or suites."""
    from kvbench.analysis.formatting import print_list

    if what not in WHAT:
        raise unknown("list", what, WHAT)
    found = _find(what)
    groups: dict[str, list[tuple[str, ...]]] = {}
    columns, heading, cells = LAYOUTS[what]
    for x in found if what == "models" else sorted(found, key=heading):
        groups.setdefault(heading(x), []).append(cells(x))
    print_list(columns, groups, cut=what == "methods")
    if what == "methods":
        say("\nbudget: what --budget limits; *: calibrated on the model; **: with trained parameters, see its card.")
        say("kvbench show NAME: its card.")
    if as_json:
        print_json(found)


def show_command(
    name: Annotated[str, typer.Argument(
        help="A method, task, suite or model: its name, path/to/file.py:Class, or path/to/task.toml. Or the folder or "
        "id of a run."
    )],
    *,
    out: Out = Path("runs"),
    as_json: Json = False,
) -> None:
    """Show a run, method, task, model or suite.

    It prints the card and settings of a method, task or model, and the runs of a suite.
    """
    from kvbench.analysis.formatting import print_table
    from kvbench.analysis.load import find_run, locate_run

    missing_run = RUN.search(name) and not Path(name).exists()  # or the hash of a run in `out`
    if (folder := (find_run if missing_run else locate_run)(name, out)) is not None:
        _show_run(folder, as_json=as_json)
        return
    document = _describe(name)
    rows = [
        (key.replace("_", " "), _text(value)) for key, value in document.items()
        if key not in ("kind", "name", "settings", "runs")
    ]
    print_table("", (str(document["kind"]), str(document["name"])), rows)
    if runs := document.get("runs"):
        columns = list(dict.fromkeys(key for x in runs for key in x))
        print_table("", columns, [[_text(x.get(key)) for key in columns] for x in runs])
    settings = document.get("settings", [])
    if settings:
        option = "--set" if document["kind"] == "method" else "--task-set"
        print_table(f"settings ({option} key=value)", ("key", "type", "default"), [
            (x["name"], x["type"], _text(x["default"])) for x in settings
        ])
    if as_json:
        print_json(document)


def _show_run(folder: Path, *, as_json: bool) -> None:
    """Show a finished run as `kvbench run` does; of another, how far it is."""
    from kvbench.analysis.formatting import print_table
    from kvbench.analysis.load import load_run
    from kvbench.cli.results import print_result
    from kvbench.runs.command import write_command
    from kvbench.runs.files import finished_samples, has_journal, read_file, read_lines
    from kvbench.runs.spec import RunSpec

    spec = read_file(folder / "spec.json", RunSpec)
    finished = (folder / "result.json").is_file()
    if finished:
        result = load_run(folder).result
        print_result(result, folder)
    journal = folder / "samples.jsonl"
    done = len(finished_samples(read_lines(journal))) if has_journal(journal) and not finished else 0
    if not finished:
        print_table("", (spec.run_id, "not finished"), [("samples", f"{done} of {spec.samples}")])
    own = _list_own(spec)
    file = f" (put the path of its file for {' and '.join(own)})" if own else ""
    command, label = write_command(spec), "made by"
    if not finished:
        command, label = f"{command} --out {shlex.quote(str(folder.parent))}", "continue it with"
    echo(f"{label}{file}: {command}\nanswers: kvbench answers {shlex.quote(str(folder))}")
    if as_json:
        print_json(
            result.model_dump(mode="json") if finished
            else {"kind": "run", "run_id": spec.run_id, "samples": done, "spec": spec.model_dump(mode="json")}
        )


def _list_own(spec: RunSpec) -> list[str]:
    """The names in a run's command that `kvbench run` does not take, because a file of the user's defines them."""
    from kvbench.registry import is_registered

    own = []
    if spec.method.code is not None or not is_registered("method", spec.method.name):
        own.append(spec.method.name)
    task = spec.task.name
    if spec.task.code is not None or not (is_registered("task", task) or task.startswith("lm-eval:")):
        own.append(task)
    return own


def _suite_heading(task: dict[str, Any]) -> str:
    """Heading of a group of tasks: their suite and the data they need."""
    return f"{task['suite']}: needs {task['needs']}" if task["needs"] else str(task["suite"])


def _family(method: dict[str, Any]) -> str:
    """Heading of a group of methods: their family, and the kind of model where it is not autoregressive."""
    family = str(method["family"])
    return family if method["models"] in ("autoregressive", family) else f"{family} ({method['models']} models)"


MARKS = {"": "", "calibrated": "*", "trained": "**"}
"""Marks of methods that measure something on the model before a run, and of those that train parameters."""


def _budget(method: dict[str, Any]) -> str:
    """The kind of a method's budget, and a mark of what happens before a run."""
    from kvbench.method import name_preparation

    return f"{method['budget']}{MARKS[name_preparation(method['calibration'])]}"


LAYOUTS: dict[str, tuple[tuple[str, ...], Callable[[dict[str, Any]], str], Callable[[dict[str, Any]], tuple[str, ...]]]]
LAYOUTS = {
    "methods": (("name", "budget", "year", "arXiv", "title"), _family, lambda x: (
        x["name"], _budget(x), _text(x["year"]), _text(x["arxiv"]), str(x["title"]),
    )),
    "tasks": (("name", "summary"), _suite_heading, lambda x: (
        ", ".join([x["name"], *x["aliases"]]), _text(x["summary"]),
    )),
    "models": (("name",), lambda x: f"weights: {x['weights']}", lambda x: (x["name"],)),
    "suites": (("name", "tasks", "summary"), lambda x: f"needs {_text(x['needs'])}" if x["needs"] else "", lambda x: (
        x["name"], str(len(x["tasks"])), x["summary"],
    )),
}
"""By list: its columns, the heading that an item stands under, and its cells."""


def _find(what: str) -> list[dict[str, Any]]:
    from kvbench.models.sources import list_added
    from kvbench.registry import list_architectures, list_entries, list_models

    if what == "methods":
        return [
            {"name": x.name, "family": x.facts.get("family"), "models": x.models,
             "budget": x.facts.get("budget"), "calibration": x.facts.get("calibration"), "year": x.facts.get("year"),
             "arxiv": x.facts.get("arxiv"), "title": x.facts.get("title")}
            for x in list_entries("method")
        ]
    if what == "tasks":
        return [
            {"name": x.name, "suite": x.facts.get("family"), "aliases": list(x.aliases),
             "needs": x.facts.get("needs"), "summary": x.facts.get("summary")}
            for x in list_entries("task")
        ]
    if what == "models":
        shapes = [f"random:{x}" for x in list_architectures()]
        return [{"name": x, "weights": "trained"} for x in [*list_models(), *list_added()]] + [
            {"name": x, "weights": "random, for timing"} for x in shapes
        ]
    from kvbench.sweep.suite import list_suites  # imports all that runs need

    needs = {y: x.facts["needs"] for x in list_entries("task") if "needs" in x.facts for y in x.names}
    return [
        {"name": x.name, "version": x.version, "tasks": x.tasks, "summary": x.summary,
         "needs": list(dict.fromkeys(part for y in x.tasks if y in needs for part in needs[y].split(", ")))}
        for x in list_suites()
    ]


def _describe(name: str) -> dict[str, Any]:
    from kvbench.models.sources import list_added
    from kvbench.registry import find_either, list_entries, list_models
    from kvbench.sweep.suite import find_suite, list_suites
    from kvbench.task import Task

    names = {alias for kind in ("method", "task") for x in list_entries(kind) for alias in x.names}
    suites, models = {x.name for x in list_suites()}, [*list_models(), *list_added()]
    if name in suites:
        return _describe_suite(find_suite(name))
    if name in names or any(x in name for x in (".py", "+", ".toml", "lm-eval:")):
        found = find_either(name)
        if issubclass(found, Task):
            return _describe_task(found)
        card = found.card.model_dump(mode="json")
        # Diffusion methods do not declare their bytes.
        stored = {} if found.card.models == "diffusion" else {"stored": _describe_bytes(found)}
        return {"kind": "method", **card, **stored, "settings": _settings(found)}
    if name in models or "/" in name or name.endswith(".gguf"):
        return {"kind": "model", "name": name, **_describe_model(name)}
    hint = "See `kvbench list methods`, `tasks`, `suites` or `models`."
    raise unknown("name", name, names | suites | {*models}, hint)


def _describe_suite(suite: Suite) -> dict[str, Any]:
    """A suite, with the options of each run except the method."""
    cells = suite.cells({"method": "METHOD"}, Path("runs"))
    return {
        "kind": "suite", "name": suite.name, "version": suite.version, "summary": suite.summary,
        "runs": [{"task": x.request.task, **suite.run, **x.options} for x in cells],
    }


def _describe_task(task: type[Task]) -> dict[str, Any]:
    return {
        "kind": "task", "name": task.name, "version": task.version, "suite": task.suite, "summary": task.summary,
        "aliases": list(task.aliases), "modes": [str(x) for x in task.modes], "scorers": [x.id for x in task.scorers],
        "default_length": task.default_length, "default_turns": task.default_turns, "truncation": task.truncation,
        "needs": task.needs, "settings": _settings(task),
    }


def _describe_bytes(kind: type[Method]) -> str:
    """Bytes per token that a method with default settings declares for a Llama-3.1-8B cache of 8,192 tokens."""
    from kvbench.budget import LayerShape, Shape

    shape = Shape(length=8192, layers=(LayerShape(8, 32, 128, 128, None),) * 32, itemsize=2)
    full = shape.full_bytes // shape.length
    try:
        method = kind().fit(None, shape)
        stored, host = method.declared_bytes(shape), method.declared_host_bytes(shape)
        files = method.declared_file_bytes(shape)
    except (TypeError, UserError) as error:
        return f"depends on its settings: {error}"
    extra = f" and {host / shape.length:,.0f} in host memory" if host else ""
    extra += f" and {files / shape.length:,.0f} in a file" if files else ""
    share = (stored + host + files) / full / shape.length
    return (
        f"{stored / shape.length:,.0f} bytes per token{extra}, {share:.1%} of the full "
        f"cache's {full:,} (32 layers, 8 KV heads of 128, 16 bits, 8,192 tokens, default budget)"
    )


def _describe_model(name: str) -> dict[str, Any]:
    from kvbench.hf import find_folder, predict_memory

    folder = find_folder(name)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"model '{name}' has no readable config.json: {error}.") from error
    need = predict_memory(name)
    keys = (
        "architectures", "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
        "max_position_embeddings", "vocab_size", "dtype",
    )
    facts = {key: config[key] for key in keys if key in config}
    return {
        **facts, "params": need.params, "weight_bytes": need.weight_bytes, "stored_bytes_at_1024": need.stored_bytes,
    }


def _settings(kind: Any) -> list[dict[str, Any]]:
    from pydantic_core import to_jsonable_python

    from kvbench.constraints import describe, setting_fields, setting_types

    types = setting_types(kind)
    return [
        {"name": name, "type": describe(types[name]),
         "default": "required" if field.default is MISSING else to_jsonable_python(field.default)}
        for name, field in setting_fields(kind).items()
    ]


def _text(value: Any) -> str:
    """A JSON value as text for a table."""
    if value is None or value == []:
        return "-"
    if isinstance(value, list | tuple):
        return "\n".join(map(str, value)) if any(len(str(x)) > 40 for x in value) else ", ".join(map(str, value))
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(x)}" for key, x in value.items())
    return str(value)
