"""Runs cells on this machine: in this process, or in worker processes that each keep a model.

Imports are local because a worker must set its environment variables and signal handlers before it imports torch.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import TYPE_CHECKING

from kvbench.errors import DeviceLostError
from kvbench.log import say

if TYPE_CHECKING:
    from kvbench.sweep.cell import SweepCell
    from kvbench.sweep.progress import SweepProgress

TRIES = 2
"""Attempts per cell: a cell whose worker dies this often fails."""
GRACE = 10.0
"""Seconds that an idle worker has to exit."""


def run_local(
    cells: Sequence[SweepCell], workers: int | None, progress: SweepProgress, *, share: bool = False
) -> None:
    """Run every cell and report to `progress`.

    Args:
        cells: all cells of the sweep, with their devices.
        workers: processes; None: one, or as many as fill the GPUs.
        progress: of the sweep.
        share: run the prefills of the same contexts once.

    Raises:
        KeyboardInterrupt: Ctrl-C, after all workers have ended.
        InterruptionError: Ctrl-C while a cell ran in this process.
        UserError: more workers than fit on the GPUs.
    """
    from kvbench.sweep.cell import ModelCache, group_cells, run_group
    from kvbench.sweep.gpu import check_beside, choose_workers, list_gpus

    gpus = list_gpus() if any(x.request.device == "cuda" for x in cells) else []
    if workers is None:
        workers = choose_workers(cells, gpus, len(os.sched_getaffinity(0)), share=share)
    groups = group_cells(cells, workers, share=share)
    check_beside(groups, workers, gpus)
    if workers == 1:
        cache = ModelCache()
        for group in groups:
            for report in run_group(group, cache, progress.receive):
                progress.finish(report)
        return
    pool = WorkerPool(groups, min(workers, len(groups)), progress)
    try:
        pool.run()
    finally:
        pool.close()


@dataclass
class WorkerProcess:
    """A process, the cells that it has not finished, and the key of the model it has loaded."""

    number: int
    process: SpawnProcess
    connection: Connection
    cells: list[SweepCell] = field(default_factory=list)
    model_key: object = None


class WorkerPool:
    """Distributes groups of cells to worker processes; cells whose worker dies are retried."""

    def __init__(self, groups: Sequence[list[SweepCell]], size: int, progress: SweepProgress) -> None:
        self.waiting, self.size, self.progress = list(groups), size, progress
        self.workers: list[WorkerProcess] = []
        self.losses: Counter[int] = Counter()
        self.shared: set[int] = set()
        """Cells that shared prefills with others: they give no times alone either, since others may use their GPU."""
        self.gpus = _find_gpus() if any(x.request.device == "cuda" for group in groups for x in group) else []

    def run(self) -> None:
        """Run until no group is waiting and no worker is busy."""
        while True:
            self._assign()
            busy = {x.connection: x for x in self.workers if x.cells}
            if not busy:
                return
            for connection in wait(list(busy)):
                assert isinstance(connection, Connection)
                self._receive(busy[connection])

    def close(self) -> None:
        """End all workers; an idle worker exits when its connection closes."""
        for worker in self.workers:
            worker.connection.close()
            if worker.cells:
                worker.process.terminate()  # finished samples are saved
        for worker in self.workers:
            worker.process.join(GRACE)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()

    def _assign(self) -> None:
        """Give every idle worker a group, preferably one of the model that it has loaded."""
        while self.waiting:
            worker = next((x for x in self.workers if not x.cells), None)
            if worker is None:
                if len(self.workers) == self.size:
                    return
                worker = self._start_worker()
            group = next((x for x in self.waiting if x[0].model_key == worker.model_key), self.waiting[0])
            self.waiting.remove(group)
            worker.cells, worker.model_key = list(group), group[0].model_key
            if len(group) > 1:
                self.shared.update(x.index for x in group)
            try:
                worker.connection.send((group, group[0].index in self.shared))
            except OSError:
                self._remove(worker)

    def _receive(self, worker: WorkerProcess) -> None:
        """Handle one message of a worker: a log line, a cell's number of finished samples, or its report."""
        try:
            message = worker.connection.recv()
        except (EOFError, OSError):
            self._remove(worker)
            return
        if isinstance(message, str):
            say(message)
        elif isinstance(message, tuple):
            self.progress.receive(*message)
        else:
            worker.cells.remove(message.cell)
            self.progress.finish(message)

    def _remove(self, worker: WorkerProcess) -> None:
        from kvbench.sweep.cell import CellReport

        worker.process.join()
        worker.connection.close()
        self.workers.remove(worker)
        reason = f"the worker died ({_cause(worker.process.exitcode)})"
        for cell in reversed(worker.cells):
            self.losses[cell.index] += 1
            if self.losses[cell.index] < TRIES:
                self.progress.receive(cell, f"{reason}; retrying.")
                self.waiting.insert(0, [cell])  # alone, so that a cell that kills its worker fails alone
            else:
                self.progress.finish(CellReport(cell, "failed", f"{reason} {TRIES} times. Finished samples are saved."))

    def _start_worker(self) -> WorkerProcess:
        number = next(x for x in range(self.size) if x not in {y.number for y in self.workers})
        here, there = multiprocessing.get_context("spawn").Pipe()
        with _environment(self._settings(number)):
            process = multiprocessing.get_context("spawn").Process(target=_work, args=(there,), daemon=True)
            process.start()
        there.close()  # so that the connection closes when the worker dies
        worker = WorkerProcess(number, process, here)
        self.workers.append(worker)
        return worker

    def _settings(self, number: int) -> dict[str, str]:
        """Environment variables that a worker needs before it imports torch."""
        found = {}
        if "OMP_NUM_THREADS" not in os.environ:
            found["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // self.size))
        if self.gpus:
            found["CUDA_VISIBLE_DEVICES"] = self.gpus[number % len(self.gpus)]
        return found


def _find_gpus() -> list[str]:
    """The visible GPUs, in the form of CUDA_VISIBLE_DEVICES."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(x) for x in range(torch.cuda.device_count())]


def _cause(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    return f"{name}, often out of memory" if name == "SIGKILL" else name


@contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    """Set environment variables for processes that start within the context."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _work(connection: Connection) -> None:
    """Main function of a worker: receive cells and send messages until the connection closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; only the main one handles it
    from kvbench.sweep.cell import LineWriter, ModelCache, run_group

    cache = ModelCache()
    with redirect_stderr(LineWriter(connection.send)):
        while True:
            try:
                group, share = connection.recv()
                for report in run_group(group, cache, lambda *done: connection.send(done), share=share):
                    connection.send(report)
            except (EOFError, OSError):
                return
            except DeviceLostError as error:  # the cells go on in a new process
                say(str(error))
                sys.exit(error.exit_code)
