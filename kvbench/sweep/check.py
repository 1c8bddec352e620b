"""What can be said of the cells before a model is loaded, so that a mistake ends a sweep before its first hour."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from kvbench.errors import UserError, unknown
from kvbench.method import DEFAULT_BUDGET, Budget, BudgetKind, Method
from kvbench.registry import find_method, find_task
from kvbench.request import (
    Request,
    _check_kernels,
    _check_model,
    _check_numbers,
    _check_output,
    find_scorer,
)
from kvbench.request import _find_device as find_device
from kvbench.settings import configure, jsonable_settings, parse_pairs
from kvbench.spec import read_generation, resolve_protocol
from kvbench.sweep.cell import Cell
from kvbench.task import Task


@dataclass
class Classes:
    """Methods and tasks by name, each looked for once: a search reads every source file."""

    methods: dict[str, type[Method]] = field(default_factory=dict)
    tasks: dict[str, type[Task]] = field(default_factory=dict)

    def method(self, name: str) -> type[Method]:
        """As `find_method`."""
        if name not in self.methods:
            self.methods[name] = find_method(name)
        return self.methods[name]

    def task(self, name: str) -> type[Task]:
        """As `find_task`."""
        if name not in self.tasks:
            self.tasks[name] = find_task(name)
        return self.tasks[name]


def check_cells(cells: Sequence[Cell]) -> None:
    """Look up every name and setting, as `kvbench run` would, and see that no two cells are the same run.

    Raises:
        UserError: with the cell's name.
    """
    classes = Classes()
    seen: dict[tuple[object, ...], Cell] = {}
    for cell in cells:
        with _naming(cell):
            facts = _describe(cell.request, classes)
        first = seen.setdefault((facts, cell.model_key), cell)
        if first is not cell:
            raise UserError(
                f"cells '{first.name}' ([[grid]] {first.grid}) and '{cell.name}' ([[grid]] {cell.grid}) are the same "
                "run. Leave one of them out."
            )


def place_cells(cells: Sequence[Cell], find: Callable[[str | None], str] = find_device) -> list[Cell]:
    """The cells with the device that each will run on; this waits for torch.

    Args:
        cells: checked.
        find: a device, from the one that a cell asks for.

    Raises:
        UserError: with the cell's name.
    """
    from kvbench.hf import DTYPES

    placed = []
    for cell in cells:
        with _naming(cell):
            if cell.request.dtype not in (None, *DTYPES):
                raise unknown("dtype", str(cell.request.dtype), DTYPES)
            placed.append(replace(cell, request=replace(cell.request, device=find(cell.request.device))))
    return placed


@contextmanager
def _naming(cell: Cell) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(f"cell '{cell.name}' ([[grid]] {cell.grid}): {error}") from error


def _describe(request: Request, classes: Classes) -> str:
    """All that decides a run, the model apart, resolved as `prepare` resolves it."""
    task_class = classes.task(request.task)
    task = configure(task_class, parse_pairs(request.task_settings, "--task-set"), "--task-set", request.task)
    protocol = resolve_protocol(
        request.mode, request.visibility, request.history, request.turns, recompress=request.recompress,
        default_turns=task.default_turns,
    )
    if protocol.mode not in task.modes:
        raise unknown(f"mode for task {task.name}", request.mode, [str(x) for x in task.modes])
    scorer = find_scorer(task, request.scorer)
    generation = read_generation(parse_pairs(request.generation, "--gen"))
    length = task.default_length if request.length is None else request.length
    _check_numbers(request, length)
    _check_kernels(request.kernels)
    _check_output(request)
    _check_model(request.model)
    method_class = classes.method(request.method)
    method = configure(method_class, parse_pairs(request.method_settings, "--set"), "--set", request.method)
    budget = _check_budget(request.budget, method)
    return json.dumps([
        [x.__module__, x.__qualname__, made.name, jsonable_settings(y)]
        for x, made, y in ((method_class, method.card, method), (task_class, task, task))
    ] + [
        protocol.model_dump(mode="json"), scorer.id, generation.model_dump(mode="json"), length, str(budget),
        request.split, request.samples, request.seed, request.chunk, request.kernels,
    ], sort_keys=True, default=str)


def _check_budget(asked: str | None, method: Method) -> Budget | None:
    """The budget as `prepare` has it; how far it can be reached needs the model."""
    budget = None if asked is None else Budget.parse(asked)
    card = method.card
    if card.budget is BudgetKind.NONE and budget not in (None, Budget("fraction", 1.0)):
        raise UserError(f"{card.name} takes no budget, got {budget}: put it into a [[grid]] of its own.")
    if budget is not None and budget.kind == "paper" and card.paper_budget is None:
        raise UserError(f"{card.name} has no paper budget on its card. Use a share (25%) or rows (1024).")
    return DEFAULT_BUDGET if budget is None and card.budget in (BudgetKind.HELD, BudgetKind.READ) else budget

