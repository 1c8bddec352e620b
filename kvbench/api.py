"""The Python entry point: `kvbench.run` and `kvbench.compare`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.analysis.compare import Difference, compare_runs, describe_code, find_baseline, find_conflicts
from kvbench.analysis.load import find_run, load_run
from kvbench.errors import InterruptionError, UserError
from kvbench.log import say
from kvbench.runs.command import write_settings
from kvbench.runs.options import Option, Request, list_options
from kvbench.runs.prepare import prepare
from kvbench.runs.results import Result
from kvbench.runs.runner import run as run_job

if TYPE_CHECKING:
    from kvbench.hf import Model

Settings = Mapping[str, object]
NONE: Settings = {}
KINDS = {str: "text", int: "a whole number", bool: "True or False", Mapping: "a dict of settings by name"}


def run(
    *, method: str, task: str, model: str | Model = "mini", budget: str | int | None = None, mode: str = "single",
    visibility: str | None = None, history: str | None = None, recompress: bool = False, template: str = "own",
    scorer: str | None = None, split: str = "test", length: int | None = None, samples: int = 20,
    parts: int | None = None, turns: int | None = None, seed: int = 0, method_settings: Settings = NONE,
    task_settings: Settings = NONE, generation: Settings = NONE, chunk: int | None = None,
    batch: str | int | None = None, kernels: str = "torch", chunk_store: str | None = None, device: str | None = None,
    device_map: str | None = None, dtype: str | None = None, out: str | Path = "runs",
) -> Result:
    """Run a method on a task, as `kvbench run` does: resume an interrupted run, or return a finished one.

    `kvbench run --help` describes each option; method_settings, task_settings and generation are its `--set`,
    `--task-set` and `--gen`. `model` is a name or a loaded model. Files are written to `out/<run_id>/`.

    Raises:
        UserError: bad input, or a file cannot be written.
        KeyboardInterrupt: Ctrl-C; a line on standard error says what is saved.
    """
    given = dict(locals())
    loaded = None if isinstance(model, str) else model
    if loaded is not None:
        given["model"] = loaded.id
    request = _make_request(given, Path(out).expanduser())
    if loaded is not None:
        _check_loaded(request, loaded)
    try:
        outcome = run_job(prepare(request, loaded))
    except InterruptionError as stop:  # a caller that goes on after a UserError must not go on after Ctrl-C
        say(str(stop))
        raise KeyboardInterrupt from None
    if outcome.existing:
        say(outcome.describe_existing())
    return outcome.result


def _make_request(given: Mapping[str, Any], out: Path) -> Request:
    values: dict[str, Any] = {}
    for option in list_options():
        value = given[option.name]
        if option.numeric and isinstance(value, int | float):
            value = str(value)
        _check_type(option, value)
        if option.repeatable:
            value = write_settings(value)
        values[option.name] = value
    return Request(**values, out=out)


def _check_loaded(request: Request, model: Model) -> None:
    """Refuse options of loading that a loaded model contradicts."""
    from kvbench.hf.config import AUTO

    given = {
        "device": (request.device, str(model.device), model.device.type), "dtype": (request.dtype, model.dtype, AUTO),
    }
    for name, (asked, *allowed) in given.items():
        if asked not in (None, *allowed):
            raise UserError(
                f"{name} '{asked}' contradicts the loaded model ({allowed[0]}). Give it to kvbench.load_model."
            )
    if request.device_map is not None:
        raise UserError(
            f"device_map '{request.device_map}' has no effect on a loaded model. Give it to kvbench.load_model alone."
        )


def _check_type(option: Option, value: object) -> None:
    wanted: type = Mapping if option.repeatable else option.kind
    optional = not option.required and option.default is None
    fits = isinstance(value, wanted) and not (wanted is int and isinstance(value, bool))
    if not fits and not (value is None and optional):
        raise UserError(f"{option.name} must be {'None or ' if optional else ''}{KINDS[wanted]}, got {value!r}.")


def compare(*runs: Result | str | Path, out: str | Path = "runs") -> list[Difference]:
    """Paired differences of scores to the baseline: the full cache, or the first run if there is none.

    Args:
        runs: two or more results of `kvbench.run`, folders of runs, or run ids.
        out: the folder that results and ids are looked up in.

    Raises:
        UserError: fewer than two runs, a missing or unfinished run, or runs of different tasks.
    """
    if len(runs) < 2:
        raise UserError(f"compare needs two or more runs, got {len(runs)}. Give results, folders or ids.")
    names = [x.run_id if isinstance(x, Result) else str(x) for x in runs]
    loaded = [load_run(find_run(x, Path(out).expanduser())) for x in names]
    for warning in [*find_conflicts(loaded), describe_code(loaded)]:
        if warning is not None:
            say(f"warning: {warning}")
    baseline = loaded.pop(find_baseline(loaded))
    return compare_runs(baseline, loaded)
