"""From a printed number to runs of kvbench, and what is missing for them: said before anything starts."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from kvbench.registry import list_entries
from kvbench.reproduce.claims import Claim
from kvbench.runs.options import Request
from kvbench.sweep.file import File, as_text, expand
from kvbench.sweep.suite import find_suite

Ingredient = Literal["method", "task", "checkpoint", "timing", "weights", "data", "GPU", "memory", "run"]


@dataclass(frozen=True)
class Missing:
    """What a number needs and is not there."""

    what: Ingredient
    why: str


@dataclass(frozen=True)
class SpeedRequest:
    """A cell of `kvbench bench`."""

    method: str
    model: str
    length: int
    batch: int
    timing: Literal["kernel", "step", "end-to-end"]
    budget: str | None
    settings: tuple[str, ...]


@dataclass(frozen=True)
class ClaimPlan:
    """The runs whose mean score stands beside a printed number, or the cell whose time does."""

    claim: Claim
    requests: tuple[Request, ...]
    whole: bool
    """Whether these are the paper's model and all of its samples: anything else shows a shape, and no more."""
    missing: tuple[Missing, ...]
    timing: SpeedRequest | None = None
    predicted_bytes: int | None = None
    """Of weights and one dense cache, from the model's configuration; None: not known."""


def plan_claim(
    claim: Claim, model: str | None = None, samples: int | None = None, out: Path = Path("runs")
) -> ClaimPlan:
    """The runs of a number, and what kvbench lacks for them. This is quick: no model, no data, no network.

    Args:
        claim: the number.
        model: in the place of the paper's.
        samples: at most so many of each task.
        out: folder of runs.
    """
    missing = [Missing("task", f"needs {x}") for x in (claim.cell.lacks, claim.method.lacks) if x is not None]
    if not set(claim.method.method.split("+")) <= _methods():
        missing.append(Missing("method", f"method {claim.method.method} is not in kvbench"))
    if claim.table.measure != "score":
        return _plan_speed(claim, missing)
    name = model or claim.block.id
    if name is None:
        wanted = claim.block.lacks or f"the name of the checkpoint {claim.model}"
        missing.append(Missing("checkpoint", f"needs {wanted}"))
    if missing or name is None:
        return ClaimPlan(claim, (), whole=False, missing=tuple(missing))
    asked = tuple(_requests(claim, name, out))
    requests = tuple(x if samples is None else replace(x, samples=min(samples, x.samples)) for x in asked)
    return ClaimPlan(claim, requests, whole=name == claim.block.id and requests == asked, missing=())


def find_baseline(claim: Claim) -> Claim | None:
    """The number that a difference is taken to; None: the row is its own baseline, or none is printed there."""
    row = claim.method.baseline or claim.table.baseline
    values = claim.block.values.get(row or "")
    if row is None or row == claim.row or values is None:
        return None
    value = values[list(claim.table.columns).index(claim.column)]
    return None if math.isnan(value) else replace(claim, row=row, printed=value)


def with_baselines(claims: Sequence[Claim]) -> list[Claim]:
    """The numbers, each after the one that its difference is taken to."""
    return list({x.id: x for claim in claims for x in (find_baseline(claim), claim) if x is not None}.values())


def _plan_speed(claim: Claim, missing: list[Missing]) -> ClaimPlan:
    column, shape = claim.cell, claim.block.shape
    if column.timing is None and column.lacks is None:
        missing.append(Missing("timing", f"needs a timing of {claim.table.measure} over those of kvbench bench"))
    if shape is None:
        missing.append(Missing("checkpoint", f"kvbench has no architecture of {claim.model}'s shape"))
    if missing or column.timing is None or shape is None or not isinstance(column.length, int):
        return ClaimPlan(claim, (), whole=False, missing=tuple(missing))
    timing = SpeedRequest(
        method=claim.method.method, model=f"random:{shape}", length=column.length, batch=claim.batch,
        timing=column.timing, budget=claim.budget,
        settings=tuple(f"{key}={as_text(x)}" for key, x in claim.method.set.items()),
    )
    return ClaimPlan(claim, (), whole=False, missing=(), timing=timing)


def _requests(claim: Claim, model: str, out: Path) -> Iterator[Request]:
    """One run for each task and length of the column."""
    table, column, row, protocol = claim.table, claim.cell, claim.method, claim.protocol
    options: dict[str, Any] = {
        **table.run, **column.run, **row.run, "method": row.method, "model": model, "budget": claim.budget,
        "set": row.set or None, "visibility": protocol.visibility, "history": protocol.history,
        "template": protocol.template, "dtype": protocol.dtype,
    }
    suite = None if table.suite is None else _suite(table.suite)
    for task in _listed(column.task) or ([] if suite is None else suite.tasks):
        for length in _listed(column.length) or [options.get("length") or _cut(claim, task)]:
            asked = {k: v for k, v in {**options, "task": task, "length": length}.items() if v is not None}
            cells = expand(File(out=str(out), grid=[asked])) if suite is None else suite.cells(asked, out)
            yield from (x.request for x in cells)


def _cut(claim: Claim, task: str) -> int | None:
    """The length at which a prompt is cut where the paper cuts it: ours has the answer in it."""
    most = claim.protocol.truncation
    return None if most is None else most + (claim.room_of(task) or 0)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


_suite = functools.cache(find_suite)


@functools.cache
def _methods() -> set[str]:
    return {x.name for x in list_entries("method")}
