"""What can be said of the cells before a model is loaded, so that a mistake ends a sweep before its first hour."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from kvbench.errors import UserError, unknown
from kvbench.runs.job import find_device
from kvbench.runs.request import Plan, Request, check, check_model
from kvbench.settings import jsonable_settings
from kvbench.sweep.cell import SweepCell


def check_cells(cells: Sequence[SweepCell]) -> list[Plan]:
    """The cells' requests, checked as by `kvbench run`: every name, setting and data set; no two are the same run.

    Raises:
        UserError: with the cell's name.
    """
    plans: list[Plan] = []
    seen: dict[tuple[object, ...], SweepCell] = {}
    for cell in cells:
        with _naming(cell):
            check_model(cell.request.model)
            plans.append(check(cell.request))
            facts = _describe(plans[-1])
        request = cell.request  # where the parts of its model are makes no other run of it
        first = seen.setdefault((facts, request.model, request.device, request.dtype), cell)
        if first is not cell:
            raise UserError(
                f"cells '{first.name}' ([[grid]] {first.grid}) and '{cell.name}' ([[grid]] {cell.grid}) are the same "
                "run. Leave one of them out."
            )
    return plans


def place_cells(
    cells: Sequence[SweepCell], find: Callable[[Request], str] = find_device
) -> tuple[list[SweepCell], list[Plan]]:
    """The cells with the device that each will run on, and no two of them the same run there; this waits for torch.

    Beside them what `check_cells` made of them.

    Args:
        cells: checked.
        find: a device, from what a cell asks for.

    Raises:
        UserError: with the cell's name.
    """
    from kvbench.hf import DTYPES

    placed = []
    for cell in cells:
        with _naming(cell):
            if cell.request.dtype not in (None, *DTYPES):
                raise unknown("dtype", str(cell.request.dtype), DTYPES)
            placed.append(replace(cell, request=replace(cell.request, device=find(cell.request))))
    return placed, check_cells(placed)


@contextmanager
def _naming(cell: SweepCell) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(f"cell '{cell.name}' ([[grid]] {cell.grid}): {error}") from error


def _describe(plan: Plan) -> str:
    """All that decides a run, the model and the device apart."""
    request, method, task = plan.request, plan.method, plan.task
    return json.dumps([
        [type(x).__module__, type(x).__qualname__, name, jsonable_settings(x)]
        for x, name in ((method, method.card.name), (task, task.name))
    ] + [
        task.dataset_revision, plan.protocol.model_dump(mode="json"), plan.template, plan.scorer.id,
        plan.generation.model_dump(mode="json"), plan.length, str(plan.budget), request.split, request.samples,
        request.seed, request.chunk, request.kernels,
    ], sort_keys=True, default=str)
