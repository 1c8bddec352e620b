"""One cell of a sweep is one `kvbench run`: same spec, same folder; what it came to is a report."""

from __future__ import annotations

import gc
import io
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvbench.errors import UserError
from kvbench.log import say
from kvbench.runs.job import Job, prepare
from kvbench.runs.request import Request

if TYPE_CHECKING:
    from kvbench.hf import Model
    from kvbench.runs.results import Result

PATIENCE = 20.0
"""Seconds to wait for a folder that is locked: a worker that was given up may be finishing a sample in it."""


@dataclass(frozen=True)
class SweepCell:
    """A run of the grid."""

    index: int
    grid: int
    """Which [[grid]] of the file it is from, counted from 1."""
    name: str
    """Its method and what else tells it from the other cells."""
    request: Request
    options: dict[str, str]
    """What else that is, by option."""

    @property
    def model_key(self) -> tuple[str | None, ...]:
        """Equal where one loaded model serves both."""
        request = self.request
        return request.model, request.device, request.dtype, request.device_map


@dataclass(frozen=True)
class CellReport:
    """What a cell came to."""

    cell: SweepCell
    status: Literal["ok", "failed"]
    error: str | None = None
    folder: Path | None = None
    """None: it did not come as far as having one."""
    existing: bool = False
    """The run was finished before: its result was only read."""
    result: Result | None = None

    @property
    def document(self) -> dict[str, Any]:
        """What `kvbench sweep --json` says of it."""
        result, request = self.result, self.cell.request
        return {
            "cell": self.cell.name, "run_id": None if self.folder is None else self.folder.name,
            "folder": None if self.folder is None else str(self.folder), "status": self.status, "error": self.error,
            "existing": self.existing, "method": request.method, "task": request.task, "model": request.model,
            "budget": request.budget, "mode": request.mode,
            "score": None if result is None else result.score.model_dump(mode="json"),
            "ratio": None if result is None or result.memory is None else result.memory.ratio,
        }


class ModelCache:
    """The model that was loaded last, for the cells that follow it."""

    def __init__(self) -> None:
        self._key: object = None
        self._model: Model | None = None

    def take(self, cell: SweepCell) -> Model | None:
        """The model of the cell; None: another one, which is let go of first, so that two never stand in memory."""
        if self._key != cell.model_key and self._model is not None:
            import torch

            self._model = None
            gc.collect()
            torch.cuda.empty_cache()  # else what it leaves behind counts as taken when the next one is predicted
        return self._model

    def put(self, cell: SweepCell, model: Model) -> None:
        """Keep a model."""
        self._key, self._model = cell.model_key, model


class CountCallback:
    """Passes on how far a run is."""

    def __init__(self, hear: Callable[[int], None]) -> None:
        self._hear = hear

    def advance(self, done: int) -> None:
        """So many samples are done."""
        self._hear(done)


class LineWriter(io.TextIOBase):
    """Standard error of a worker, line by line to whoever shows the progress."""

    def __init__(self, send: Callable[[str], object]) -> None:
        self._send, self._rest = send, ""

    def write(self, text: str) -> int:
        """Send the lines that are whole."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._send(line)
        return len(text)


def run_cell(cell: SweepCell, cache: ModelCache, advance: Callable[[int], None]) -> CellReport:
    """Run what is missing of a cell. Whatever it raises is its report, Ctrl-C apart.

    Args:
        cell: which.
        cache: where the last model is.
        advance: told how many samples are done, after each.
    """
    from kvbench.runs.runner import InterruptedRunError, run

    job: Job | None = None
    try:
        job = prepare(cell.request, cache.take(cell))
        cache.put(cell, job.loaded)
        _wait_for(job.folder)
        outcome = run(job, CountCallback(advance))
    except InterruptedRunError:
        raise
    except UserError as error:
        return CellReport(cell, "failed", str(error), None if job is None else job.folder)
    except Exception as error:  # noqa: BLE001  # a method or a task with a bug must not end the other cells
        say(f"{cell.name}: {traceback.format_exc()}")
        return CellReport(cell, "failed", describe(error), None if job is None else job.folder)
    result = outcome.result
    return CellReport(cell, result.status, result.error, outcome.folder, outcome.existing, result)


def describe(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"


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
