"""Turns a printed number into runs of kvbench and lists what is missing for them, before anything starts."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from kvbench.registry import is_registered
from kvbench.reproduce.claims import Claim
from kvbench.reproduce.paper import Prediction, slug
from kvbench.runs.options import Request
from kvbench.sweep.file import SweepFile, as_text, expand
from kvbench.sweep.suite import find_suite

Ingredient = Literal["method", "task", "checkpoint", "timing", "weights", "data", "GPU", "memory", "run"]


@dataclass(frozen=True)
class Missing:
    """A requirement of a number that is not met."""

    what: Ingredient
    why: str


@dataclass(frozen=True)
class SpeedRequest:
    """The cell of `kvbench bench` that measures a printed speed."""

    method: str
    model: str
    length: int
    batch: int
    timing: Literal["kernel", "step", "end-to-end"]
    budget: str | None
    settings: tuple[str, ...]


@dataclass(frozen=True)
class BytesRequest:
    """A number that follows from shapes: the method and the architecture that `kvbench plan` predicts it for."""

    predicts: Prediction
    method: str
    model: str
    gpu: str | None
    """A name of `kvbench plan --gpu`; None for a number of bytes alone."""
    length: int | None
    budget: str | None
    settings: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class ClaimPlan:
    """The runs whose mean score is compared with a printed number, the cell whose time is, or the predicted bytes."""

    claim: Claim
    requests: tuple[Request, ...]
    whole: bool
    """True for the paper's model and all of its samples; otherwise the verdict is at most `shape only`."""
    missing: tuple[Missing, ...]
    timing: SpeedRequest | None = None
    prediction: BytesRequest | None = None
    predicted_bytes: int | None = None
    """Bytes of the weights and one full cache, from the model's configuration; None: unknown."""


def plan_claim(
    claim: Claim, model: str | None = None, samples: int | None = None, out: Path = Path("runs")
) -> ClaimPlan:
    """The runs of a number, and what kvbench lacks for them. Loads no model or data and uses no network.

    Args:
        claim: the number.
        model: replaces the paper's model in runs of scores; other numbers are not planned with it.
        samples: maximum number of samples per task, in the same way.
        out: folder of runs.
    """
    missing = [Missing("task", f"needs {x}") for x in (claim.cell.lacks, claim.method.lacks) if x is not None]
    if not is_registered("method", claim.method.method):
        missing.append(Missing("method", f"method {claim.method.method} is not in kvbench"))
    if claim.table.measure != "score":
        if model is not None or samples is not None:
            missing.append(Missing(
                "run", "--model and --samples change runs of scores, and this number is a speed or follows from shapes"
            ))
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
    """The claim that a difference is taken to; None if the row is its own baseline or the baseline is not printed."""
    row = claim.method.baseline or claim.table.baseline
    values = claim.block.values.get(row or "")
    if row is None or row == claim.row or values is None:
        return None
    value = values[list(claim.table.columns).index(claim.column)]
    return None if math.isnan(value) else replace(claim, row=row, printed=value)


def with_baselines(claims: Sequence[Claim]) -> list[Claim]:
    """The claims, each after the baseline of its difference."""
    return list({x.id: x for claim in claims for x in (find_baseline(claim), claim) if x is not None}.values())


def _plan_speed(claim: Claim, missing: list[Missing]) -> ClaimPlan:
    column, shape = claim.cell, claim.block.shape
    if column.predicts is not None:
        return _plan_bytes(claim, column.predicts, missing)
    if column.timing is None and column.lacks is None:
        missing.append(Missing("timing", f"kvbench bench has no timing level for {claim.table.measure}"))
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


def _plan_bytes(claim: Claim, predicts: Prediction, missing: list[Missing]) -> ClaimPlan:
    column, shape = claim.cell, claim.block.shape
    if shape is None:
        missing.append(Missing("checkpoint", f"kvbench has no architecture of {claim.model}'s shape"))
    if missing or shape is None:
        return ClaimPlan(claim, (), whole=False, missing=tuple(missing))
    assert not isinstance(column.length, list) or not column.length, "one length or none"
    request = BytesRequest(
        predicts=predicts, method=claim.method.method, model=f"random:{shape}",
        gpu=None if claim.table.gpu is None else slug(claim.table.gpu),
        length=column.length if isinstance(column.length, int) else None, budget=claim.budget,
        settings=tuple((key, as_text(x)) for key, x in claim.method.set.items()),
    )
    return ClaimPlan(claim, (), whole=True, missing=(), prediction=request)


def _requests(claim: Claim, model: str, out: Path) -> Iterator[Request]:
    """One run per task and length of the column."""
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
            cells = expand(SweepFile(out=str(out), grid=[asked])) if suite is None else suite.cells(asked, out)
            yield from (x.request for x in cells)


def _cut(claim: Claim, task: str) -> int | None:
    """The paper's truncation as a length in kvbench, which includes the answer."""
    most = claim.protocol.truncation
    return None if most is None else most + (claim.room_of(task) or 0)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


_suite = functools.cache(find_suite)
