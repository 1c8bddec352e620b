"""The file that an earlier job has left: only the same job continues it, on the same machine, code and weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvbench.bench.records import Bench
from kvbench.errors import UserError
from kvbench.runs.files import read_file
from kvbench.runs.results import Environment
from kvbench.runs.spec import MethodSpec, ModelSpec, show_value

if TYPE_CHECKING:
    from pathlib import Path

    from kvbench.bench.run import BenchRequest

ANOTHER = "Give another --out, or delete the file to start again."
FREE = ("seconds",)
"""An option that may differ when a job goes on."""


def list_options(request: BenchRequest) -> dict[str, Any]:
    """The options as a file has them; it does not have its own name."""
    return {key: list(x) if isinstance(x, tuple) else x for key, x in asdict(request).items() if key != "out"}


def read_earlier(request: BenchRequest) -> Bench | None:
    """The file of a job with the same options, `--seconds` aside; None: there is no file yet.

    Raises:
        UserError: the file is of another job, or of no job.
    """
    path = request.out
    if path is None or not path.exists() or path.is_dir():
        return None
    try:
        found = read_file(path, Bench)
    except UserError as error:
        raise UserError(f"--out {path} exists and is no file of `kvbench bench`: {error} {ANOTHER}") from error
    changes = _compare(found.command, list_options(request), but=FREE)
    if changes:
        raise UserError(f"--out {path} holds another job ({'; '.join(changes)}). {ANOTHER}")
    return found


def is_finished(bench: Bench) -> bool:
    """Whether no cell is missing or was skipped for lack of time."""
    return bench.status == "done" and all(x.outcome != "skipped" for x in bench.cells)


def check_identity(path: Path, bench: Bench, model: ModelSpec, methods: Iterable[MethodSpec]) -> None:
    """Check that the file has cells of the same weights, and of the same versions of the methods.

    Raises:
        UserError: it has not.
    """
    now = {x.name: {"version": x.version, "code": x.code} for x in methods}
    held = {x.method.name: {"version": x.method.version, "code": x.method.code} for x in bench.cells}
    changes = [f"model {x}" for x in _compare(bench.model.model_dump(), model.model_dump())]
    for name in held.keys() & now.keys():
        changes += [f"{name} {x}" for x in _compare(held[name], now[name])]
    if changes:
        raise UserError(
            f"--out {path} holds cells of another model or method ({'; '.join(changes)}), and one job cannot mix them. "
            f"{ANOTHER}"
        )


def check_environment(path: Path, bench: Bench, now: Environment) -> None:
    """Check that the cells of a file were timed on this machine, by the same code and packages.

    Raises:
        UserError: they were not.
    """
    changes = find_changes(bench, now)
    if changes:
        raise UserError(
            f"--out {path} holds cells of another machine or other code ({'; '.join(changes)}), and one job cannot mix "
            f"them. Continue it there, give another --out, or delete the file to start again."
        )


def find_changes(bench: Bench, now: Environment) -> list[str]:
    """Differences between the machine, code and packages of a file and those of this process."""
    return _compare(_flatten(bench.environment), _flatten(now))


def _flatten(environment: Environment) -> dict[str, Any]:
    """An environment without its times, with git's commit as text."""
    git = environment.git
    found = environment.model_dump(exclude={"started", "seconds"})
    return {**found, "git": git and f"commit {git.commit[:12]}{' with changes' if git.dirty else ''}"}


def _compare(before: Mapping[str, Any], now: Mapping[str, Any], but: Iterable[str] = ()) -> list[str]:
    """Fields that differ, with both values."""
    return [
        f"{name} {_show(before.get(name))}, now {_show(now.get(name))}" for name in {**before, **now}
        if name not in but and before.get(name) != now.get(name)
    ]


def _show(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    return show_value(value)
