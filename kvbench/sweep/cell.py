"""One cell of a sweep: a request to run, and the report of its result."""

from __future__ import annotations

import gc
import io
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvbench.errors import DeviceLostError, InterruptionError, UserError, describe_error
from kvbench.log import labeling, say
from kvbench.runs.job import Job
from kvbench.runs.options import Request
from kvbench.runs.prepare import prepare

if TYPE_CHECKING:
    from kvbench.engine.shared import SharedPrefill
    from kvbench.hf import Model
    from kvbench.runs.results import Result

PATIENCE = 20.0
"""Seconds to wait for a locked folder, in which a lost worker may still be finishing a sample."""


@dataclass(frozen=True)
class SweepCell:
    """One run of a sweep."""

    index: int
    name: str
    """Its method, and the options in which it differs from the other cells."""
    request: Request
    options: dict[str, str]
    """Those options with their values."""
    place: str | None = None
    """Its place in a sweep file, e.g. `[[grid]] 2`."""

    @property
    def label(self) -> str:
        """Name and place, for messages."""
        return f"'{self.name}' ({self.place})" if self.place else f"'{self.name}'"

    @property
    def model_key(self) -> tuple[str | None, ...]:
        """Equal for cells that can share a loaded model."""
        request = self.request
        return request.model, request.device, request.dtype, request.device_map

    @property
    def context_key(self) -> tuple[object, ...]:
        """Equal for cells that run the same prefills."""
        x = self.request
        return (
            *self.model_key, x.task, x.task_settings, x.template, x.split, x.seed, x.length, x.turns, x.mode,
            x.visibility, x.parts, x.chunk, x.kernels,
        )


@dataclass(frozen=True)
class CellReport:
    """The outcome of a cell."""

    cell: SweepCell
    status: Literal["ok", "failed"]
    error: str | None = None
    folder: Path | None = None
    """The run's folder; None if the cell failed before it had one."""
    existing: bool = False
    """True if the run was already finished and only its result was read."""
    result: Result | None = None
    changes: tuple[str, ...] = ()
    """How the current code, and what the method finds on the model, differ from those of an existing run."""

    @property
    def document(self) -> dict[str, Any]:
        """The report as JSON, for `kvbench sweep --json`."""
        from kvbench.analysis.shares import stored_share  # imports numpy; `kvbench list` imports this module

        result, request = self.result, self.cell.request
        chosen = request if result is None else result.spec  # with the defaults of what the file leaves out
        return {
            "cell": self.cell.name, "run_id": None if self.folder is None else self.folder.name,
            "folder": None if self.folder is None else str(self.folder), "status": self.status, "error": self.error,
            "existing": self.existing, "method": request.method, "task": request.task, "model": request.model,
            "budget": chosen.budget, "mode": chosen.mode,
            "score": None if result is None else result.score.model_dump(mode="json"),
            "stored_share": None if result is None else stored_share(result),
        }


class ModelCache:
    """Keeps the last loaded model for the cells that follow."""

    def __init__(self) -> None:
        self._key: object = None
        self._model: Model | None = None

    def take(self, cell: SweepCell) -> Model | None:
        """The cell's model if it is loaded; else None, after freeing the other model so that only one is in memory."""
        if self._key != cell.model_key and self._model is not None:
            import torch

            self._model = None
            gc.collect()
            torch.cuda.empty_cache()  # so that the next memory prediction counts it as free
        return self._model

    def put(self, cell: SweepCell, model: Model) -> None:
        """Keep a model."""
        self._key, self._model = cell.model_key, model


class LineWriter(io.TextIOBase):
    """A stream that sends a worker's standard error line by line."""

    def __init__(self, send: Callable[[str], object]) -> None:
        self._send, self._rest = send, ""

    def write(self, text: str) -> int:
        """Send all complete lines."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._send(line)
        return len(text)


def group_cells(cells: Sequence[SweepCell], workers: int, *, share: bool) -> list[list[SweepCell]]:
    """The cells that one process runs at a time, those of one model together.

    With `share`, the cells on the same contexts, divided where there are more workers than such groups; otherwise each
    cell alone.
    """
    models = list(dict.fromkeys(x.model_key for x in cells))
    ordered = sorted(cells, key=lambda x: models.index(x.model_key))
    if not share:
        return [[x] for x in ordered]
    groups: dict[tuple[object, ...], list[SweepCell]] = {}
    for cell in ordered:
        groups.setdefault(cell.context_key, []).append(cell)
    parts = max(1, workers // len(groups))
    return [part for x in groups.values() for part in (x[i::parts] for i in range(parts)) if part]


def run_group(
    cells: Sequence[SweepCell], cache: ModelCache, advance: Callable[[SweepCell, int], None], *, share: bool = False
) -> Iterator[CellReport]:
    """Run the missing samples of cells and yield their reports; every exception but Ctrl-C becomes a failed report.

    Several cells take turns, sample by sample or batch by batch, and share the prefills of their contexts. Lines of the
    log have the cell's name.

    Args:
        cells: the cells, of one model.
        cache: holds the last loaded model.
        advance: called with a cell and the number of its finished samples after each sample.
        share: whether a single cell takes such prefills, too, and so has no times.

    Raises:
        InterruptionError: Ctrl-C.
        DeviceLostError: the GPU has become unusable by this process.
    """
    shared = None
    if share or len(cells) > 1:
        from kvbench.engine.shared import SharedPrefill

        shared = SharedPrefill()
    started: dict[Path, SweepCell] = {}
    runs = [_run_steps(x, cache, partial(advance, x), shared, started) for x in cells]
    waiting = [(-1, place) for place in range(len(cells))]  # the next sample of each run
    while waiting:
        _, place = heappop(waiting)
        try:
            with labeling(cells[place].name):
                heappush(waiting, (next(runs[place]), place))
        except StopIteration as end:
            yield end.value


def _run_steps(
    cell: SweepCell, cache: ModelCache, advance: Callable[[int], None], shared: SharedPrefill | None,
    started: dict[Path, SweepCell],
) -> Generator[int, None, CellReport]:
    """Run a cell, and add it to those that have started; yields the index of each sample before it is run."""
    from kvbench.runs.runner import run_samples

    job: Job | None = None
    try:
        job = prepare(cell.request, cache.take(cell))
        cache.put(cell, job.loaded)
        first = started.setdefault(job.folder, cell)  # a batch of auto is known only now
        if first is not cell:
            raise UserError(f"{cell.label} is the same run as {first.label}. Remove one of them.")
        _wait_for(job.folder)
        outcome = yield from run_samples(job, advance, shared)
    except (InterruptionError, DeviceLostError):
        raise
    except UserError as error:
        return CellReport(cell, "failed", str(error), None if job is None else job.folder)
    except Exception as error:  # noqa: BLE001  # a bug in a method or task must not stop the other cells
        say(traceback.format_exc())
        return CellReport(cell, "failed", describe_error(error), None if job is None else job.folder)
    result, changes = outcome.result, (*outcome.code_changes, *outcome.bound_changes)
    if changes or (outcome.existing and result.status == "failed"):
        say(outcome.describe_existing())
    return CellReport(cell, result.status, result.error, outcome.folder, outcome.existing, result, changes)


def _wait_for(folder: Path) -> None:
    from kvbench.runs.files import SaveError, locked

    deadline = time.monotonic() + PATIENCE
    while folder.exists() and time.monotonic() < deadline:
        try:
            with locked(folder):
                return
        except SaveError:
            raise
        except UserError:
            time.sleep(0.2)
