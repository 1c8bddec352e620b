"""Checks of a sweep's cells before any model is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from kvbench.errors import UserError
from kvbench.runs.options import Request
from kvbench.runs.prepare import find_device
from kvbench.runs.provenance import find_sources
from kvbench.runs.request import ResolvedRequest, check, check_model, read_batch
from kvbench.settings import jsonable_settings
from kvbench.sweep.cell import SweepCell


def check_cells(cells: Sequence[SweepCell]) -> list[ResolvedRequest]:
    """Check every request as `kvbench run` does, and that no two cells are the same run.

    Raises:
        UserError: bad input; the message names the cell.
    """
    plans: list[ResolvedRequest] = []
    seen: dict[tuple[object, ...], SweepCell] = {}
    for cell in cells:
        with _naming(cell):
            check_model(cell.request.model)
            plans.append(check(cell.request))
            facts = describe_run(plans[-1])
        request = cell.request  # without the device map, which is not part of a run's identity
        first = seen.setdefault((facts, request.model, request.device, request.dtype or "auto"), cell)
        if first is not cell:
            raise UserError(f"cells {first.label} and {cell.label} are the same run. Remove one of them.")
    return plans


def place_cells(
    cells: Sequence[SweepCell], find: Callable[[Request], str] = find_device
) -> tuple[list[SweepCell], list[ResolvedRequest]]:
    """Resolve the device of every cell, and check the cells again. Imports torch.

    Args:
        cells: checked cells.
        find: returns the device for a request.

    Returns:
        The cells with their devices, and the result of `check_cells`.

    Raises:
        UserError: bad input; the message names the cell.
    """
    from kvbench.hf.config import check_dtype

    placed = []
    for cell in cells:
        with _naming(cell):
            check_dtype(cell.request.dtype)
            placed.append(replace(cell, request=replace(cell.request, device=find(cell.request))))
    plans = check_cells(placed)
    for method, task in {(type(x.method), type(x.task)) for x in plans}:
        find_sources(method, task)  # now: the checkout may change while the sweep runs
    return placed, plans


@contextmanager
def _naming(cell: SweepCell) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(f"cell {cell.label}: {error}") from error


def describe_run(plan: ResolvedRequest) -> str:
    """The identity of a run as text, without the model and the device."""
    request, method, task = plan.request, plan.method, plan.task
    return json.dumps([
        [type(x).__module__, type(x).__qualname__, name, jsonable_settings(x)]
        for x, name in ((method, method.card.name), (task, task.name))
    ] + [
        task.dataset_revision, plan.protocol.model_dump(mode="json"), plan.template, plan.scorer.id,
        plan.generation.model_dump(mode="json"), plan.length, str(plan.budget), request.split, request.samples,
        request.seed, request.parts, request.chunk, read_batch(request.batch), request.kernels,
    ], sort_keys=True, default=str)
