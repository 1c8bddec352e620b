"""Suites: named sweeps without a method, as TOML files in tasks/suites/ or elsewhere."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import BaseModel, Field

from kvbench.errors import UserError, unknown
from kvbench.registry import HERE
from kvbench.runs.files import saving, write_record
from kvbench.runs.results import Result, SuiteRecord
from kvbench.sweep.cell import CellReport, SweepCell
from kvbench.sweep.file import SweepFile, as_text, check_table, expand, flatten, merge
from kvbench.toml import STRICT, read_toml

FOLDER = HERE / "tasks" / "suites"


class Suite(BaseModel):
    """A suite file: name, version, and the tables of a sweep without a method."""

    model_config = STRICT

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    version: str = Field(pattern=r"^[A-Za-z0-9.]+$")
    summary: str
    run: dict[str, Any] = {}
    grid: list[dict[str, Any]] = Field(min_length=1)

    @property
    def label(self) -> str:
        """Name and version, as recorded in the suite's runs."""
        return f"{self.name}@{self.version}"

    @property
    def tasks(self) -> list[str]:
        """Its tasks, without duplicates."""
        return list(dict.fromkeys(x.request.task for x in self.cells({"method": "full"}, Path("runs"))))

    def cells(self, given: Mapping[str, Any], out: Path) -> list[SweepCell]:
        """The runs of the suite with the options of a command.

        An option selects the runs that have its value, and is added to runs that do not set it.

        Raises:
            UserError: no run matches the options, or the suite's tables are not a valid sweep.
        """
        grid = [merge(self.run, table) for table in self.grid]
        for key, value in flatten(given):
            found = [x for x in (_narrow(table, key, value) for table in grid) if x is not None]
            if not found:
                values = {as_text(x): None for table in grid for x in _listed(dict(flatten(table))[key])}
                bundled = FOLDER / f"{self.name}.toml"
                hint = f"copy {bundled} and use --suite path/to/copy.toml" if bundled.exists() else "edit its file"
                raise UserError(
                    f"suite {self.name} has no run with {key} = {value}, only with {', '.join(values)}. To change it, "
                    f"{hint}."
                )
            grid = found
        cells = expand(SweepFile(out=str(out), grid=grid))
        return [replace(x, request=replace(x.request, suite=self.label)) for x in cells]


@dataclass(frozen=True)
class SuiteMean:
    """Mean score of runs with the same protocol, over tasks."""

    mode: str
    visibility: str
    history: str
    recompress: bool
    template: str
    budget: str | None
    length: int
    runs: int
    mean: float


def list_suites() -> list[Suite]:
    """The bundled suites, by name.

    Raises:
        UserError: a file is not a valid suite.
    """
    return sorted((read_suite(path) for path in FOLDER.glob("*.toml")), key=lambda x: x.name)


def find_suite(name: str) -> Suite:
    """A suite by its name or the path of its file.

    Raises:
        UserError: no such suite, the file is not valid, or it uses the name of a bundled suite.
    """
    known = {x.stem: x for x in FOLDER.glob("*.toml")}
    if not name.endswith(".toml"):
        if name not in known:
            raise unknown("suite", name, known, "See `kvbench list suites`, or give path/to/file.toml.")
        return read_suite(known[name])
    path = Path(name).expanduser()
    suite = read_suite(path)
    if suite.name in known and not path.samefile(known[suite.name]):
        raise UserError(f"{path}: '{suite.name}' is the name of a bundled suite. Choose another name.")
    return suite


def read_suite(path: Path) -> Suite:
    """Read a suite file.

    Raises:
        UserError: the file cannot be read, names a method, or is not a valid suite.
    """
    suite = read_toml(path, Suite, "suite file", "See docs/suites.md.")
    if any("method" in table for table in (suite.run, *suite.grid)):
        raise UserError(f"{path}: a suite must not name a method. Remove it, and use --method.")
    check_table(suite.run, f"{path}: [run]")
    for number, table in enumerate(suite.grid, 1):
        check_table(table, f"{path}: [[grid]] {number}")
    return suite


def _narrow(table: Mapping[str, Any], key: str, value: Any) -> dict[str, Any] | None:
    """A grid restricted to one value of an option; None if it has only other values."""
    own = [x for x in _listed(dict(flatten(table)).get(key, value)) if as_text(x) == as_text(value)]
    option, _, setting = key.partition(".")
    if not own:
        return None
    return {**table, option: {**table.get(option, {}), setting: own[0]} if setting else own[0]}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def save_suite(suite: Suite, method: str, runs: Sequence[str], out: Path) -> Path:
    """Write suite.json into a folder whose name is derived from the run ids.

    Raises:
        SaveError: the file cannot be written.
    """
    name = re.sub(r"[^a-z0-9_.+-]+", "-", method.lower()).strip("-.")
    digest = hashlib.sha256("\n".join(runs).encode()).hexdigest()[:12]
    path = out / "suites" / f"{suite.name}-{name[:80]}-{digest}" / "suite.json"
    with saving(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_record(path, SuiteRecord(name=suite.name, version=suite.version, runs=tuple(runs)))
    return path


def average(reports: Sequence[CellReport]) -> Iterator[SuiteMean]:
    """Mean scores over tasks, of runs with the same protocol.

    A group with a failed run, or with a score of which lower is better, has no mean; none has one where a run has no
    result, which could belong to any. The template is taken from the request, because some tasks never use one.
    """
    if any(x.result is None for x in reports):
        return
    groups: dict[tuple[str, str, str, bool, str, str | None, int], list[Result]] = {}
    for report in reports:
        if (x := report.result) is not None:
            key = (
                str(x.mode), x.visibility, x.history, x.spec.recompress, report.cell.request.template, x.budget.asked,
                x.task.length,
            )
            groups.setdefault(key, []).append(x)
    for protocol, runs in groups.items():
        means = [
            x.score.mean for x in runs if x.status == "ok" and x.score.mean is not None and x.score.higher_is_better
        ]
        if len(means) == len(runs) > 1:
            yield SuiteMean(*protocol, len(means), fmean(means))
