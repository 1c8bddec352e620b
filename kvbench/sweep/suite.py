"""Suites: named lists of runs that lack a method only, as TOML files in tasks/suites/ or of a user's own."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from pydantic import BaseModel, Field

from kvbench.errors import UserError, unknown
from kvbench.registry import HERE
from kvbench.runs.files import saving, write_record
from kvbench.runs.results import Result
from kvbench.runs.schema import SCHEMA_VERSION
from kvbench.runs.spec import Record
from kvbench.sweep.cell import CellReport, SweepCell
from kvbench.sweep.file import File, as_text, expand, flatten
from kvbench.toml import STRICT, read_toml

FOLDER = HERE / "tasks" / "suites"


class Suite(BaseModel):
    """A suite's file: what it is called, and a sweep without a method."""

    model_config = STRICT

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    version: str = Field(pattern=r"^[A-Za-z0-9.]+$")
    summary: str
    run: dict[str, Any] = {}
    grid: list[dict[str, Any]] = Field(min_length=1)

    @property
    def label(self) -> str:
        """What the rows of its runs carry."""
        return f"{self.name}@{self.version}"

    @property
    def tasks(self) -> list[str]:
        """Every task of it once."""
        return list(dict.fromkeys(x.request.task for x in self.cells({"method": "full"}, Path("runs"))))

    def cells(self, given: Mapping[str, Any], out: Path) -> list[SweepCell]:
        """Its runs under a method. An option picks the runs that have it, and is added where the suite does not say.

        Raises:
            UserError: no run has one of the options, or the suite's tables are no sweep.
        """
        grid = [_merge(self.run, table) for table in self.grid]
        for key, value in flatten(given):
            found = [x for x in (_narrow(table, key, value) for table in grid) if x is not None]
            if not found:
                values = {as_text(x): None for table in grid for x in _listed(dict(flatten(table))[key])}
                raise UserError(
                    f"suite {self.name} has no run with {key} = {value}, only with {', '.join(values)}. Copy its file, "
                    "change that, and give --suite path/to/file.toml."
                )
            grid = found
        cells = expand(File(out=str(out), grid=grid))
        return [replace(x, request=replace(x.request, suite=self.label)) for x in cells]


class SuiteRecord(Record):
    """suite.json"""

    schema_version: Literal[2] = SCHEMA_VERSION
    name: str
    version: str
    runs: tuple[str, ...]
    """Ids, in the order of the suite."""


@dataclass(frozen=True)
class Mean:
    """The mean score of runs that are asked alike."""

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
    """Those that come with kvbench, by name.

    Raises:
        UserError: a file is not one.
    """
    return sorted((read_suite(path) for path in FOLDER.glob("*.toml")), key=lambda x: x.name)


def find_suite(name: str) -> Suite:
    """A suite by its name or by the path of its file.

    Raises:
        UserError: there is none, the file cannot be used, or it has the name of one that comes with kvbench.
    """
    known = {x.stem: x for x in FOLDER.glob("*.toml")}
    if not name.endswith(".toml"):
        if name not in known:
            raise unknown("suite", name, known, "See `kvbench list suites`, or give path/to/file.toml.")
        return read_suite(known[name])
    path = Path(name).expanduser()
    suite = read_suite(path)
    if suite.name in known and not path.samefile(known[suite.name]):
        raise UserError(f"{path}: suite '{suite.name}' comes with kvbench. Give yours another name.")
    return suite


def read_suite(path: Path) -> Suite:
    """The suite of a file.

    Raises:
        UserError: it cannot be read, names a method, or says something that no suite can mean.
    """
    suite = read_toml(path, Suite, "suite file", "See docs/suites.md.")
    for key, value in flatten(suite.run):
        if isinstance(value, list):
            raise UserError(f"{path}: {key} in [run] is a list. Put it into a [[grid]].")
    if any("method" in table for table in (suite.run, *suite.grid)):
        raise UserError(f"{path}: a suite names no method, it is given with --method. Leave it out.")
    return suite


def _merge(common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """A grid with the options of [run] before its own."""
    tables = {key: {**common[key], **value} for key, value in own.items()
              if isinstance(value, dict) and isinstance(common.get(key), dict)}
    return {**common, **own, **tables}


def _narrow(table: Mapping[str, Any], key: str, value: Any) -> dict[str, Any] | None:
    """A grid with one value of an option; None: it has others."""
    own = [x for x in _listed(dict(flatten(table)).get(key, value)) if as_text(x) == as_text(value)]
    option, _, setting = key.partition(".")
    if not own:
        return None
    return {**table, option: {**table.get(option, {}), setting: own[0]} if setting else own[0]}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def save_suite(suite: Suite, method: str, runs: Sequence[str], out: Path) -> Path:
    """Write suite.json into a folder of its own, which is the same one for the same runs.

    Raises:
        SaveError: it cannot be written.
    """
    name = re.sub(r"[^a-z0-9_.+-]+", "-", method.lower()).strip("-.")
    digest = hashlib.sha256("\n".join(runs).encode()).hexdigest()[:12]
    path = out / "suites" / f"{suite.name}-{name[:80]}-{digest}" / "suite.json"
    with saving(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_record(path, SuiteRecord(name=suite.name, version=suite.version, runs=tuple(runs)))
    return path


def average(reports: Sequence[CellReport]) -> Iterator[Mean]:
    """The mean score of runs that are asked alike, tasks apart; none where one failed, or where less is better.

    Whether a chat template is wanted stands in the request alone: some tasks never use one.
    """
    groups: dict[tuple[str, str, str, bool, str, str | None, int], list[Result]] = {}
    for report in reports:
        if (x := report.result) is not None:
            key = (
                str(x.mode), x.visibility, x.history, x.spec.recompress, report.cell.request.template, x.budget.asked,
                x.task.length,
            )
            groups.setdefault(key, []).append(x)
    for asked, runs in groups.items():
        means = [
            x.score.mean for x in runs if x.status == "ok" and x.score.mean is not None and x.score.higher_is_better
        ]
        if len(means) == len(runs) > 1:
            yield Mean(*asked, len(means), fmean(means))
