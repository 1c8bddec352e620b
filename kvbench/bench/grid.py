"""Runs the cells of a job in order: every method at every length, batch and timing level."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from kvbench.bench.forecast import Need
from kvbench.bench.job import OUT_OF_TIME, BenchJob
from kvbench.bench.measure import Measured, measure
from kvbench.bench.outcome import Failure, attempt, free_device_memory
from kvbench.bench.records import BenchCell, Predicted, Time
from kvbench.bench.references import compare_operations
from kvbench.bench.timing import compare, find_median
from kvbench.errors import DeviceLostError
from kvbench.kernels.choice import using
from kvbench.machine import GB
from kvbench.runs.prepare import describe_method

MAX = "max"
CHECKED_LENGTH = 4096


def run_cells(job: BenchJob, emit: Callable[[BenchCell], None]) -> None:
    """Time every cell, and pass each to `emit` when it is done.

    Raises:
        DeviceLostError: the CUDA context is unusable. The cells of the method that caused it are emitted before.
    """
    wrong: dict[str, Failure] = {}
    for name in job.methods:
        if (found := _check(job, name)) is None:
            continue
        wrong[name] = found
        if found.device_lost:
            _emit_all(replace(job, methods={name: job.methods[name]}), wrong, emit)
            raise _lost(name, found)
    _emit_all(job, wrong, emit)


def _emit_all(job: BenchJob, wrong: Mapping[str, Failure], emit: Callable[[BenchCell], None]) -> None:
    for length in job.lengths:
        for asked in job.batches:
            for cell in _cells(job, wrong, length, asked):
                emit(cell)
            if job.device.type == "cuda":
                free_device_memory()  # blocks of pinned memory are kept by size, and the next cells need other sizes


def _lost(name: str, failure: Failure) -> DeviceLostError:
    return DeviceLostError(
        f"the GPU cannot be used after an error of {name}: {failure.reason}. A command with --out FILE continues with "
        "the missing cells when it is run again."
    )


def _check(job: BenchJob, name: str) -> Failure | None:
    """Compare a method's operations with torch, at the first length that its budget allows; None if they agree."""
    if job.kernels == "torch" or job.setting.model.kind == "diffusion":
        return None
    if job.late:
        return Failure("skipped", OUT_OF_TIME)
    for length in sorted({min(CHECKED_LENGTH, *job.lengths), *job.lengths}):
        method = attempt(partial(job.fit, name, length))
        if not isinstance(method, Failure):
            with using(job.kernels):
                return attempt(partial(compare_operations, job.setting, method, length))
    return None


def _cells(job: BenchJob, wrong: Mapping[str, Failure], length: int, asked: str) -> Iterator[BenchCell]:
    """All methods at one length and batch, at every timing level."""
    needs: dict[str, Need] = {}
    failures = {name: wrong[name] for name in job.methods if name in wrong}
    batches = {name: 0 if asked == MAX else int(asked) for name in job.methods}
    for name in job.methods:
        method = attempt(partial(job.fit, name, length))
        if isinstance(method, Failure):
            failures.setdefault(name, method)
            continue
        need = needs[name] = job.need(method, length)
        if asked == MAX:
            batches[name] = need.max_batch(job.memory, job.setting.state, job.host_memory)
        if (why := _foresee(job, need, batches[name])) is not None:
            failures.setdefault(name, why)
    ready = {name: x.method for name, x in needs.items() if name not in failures}
    for timing in job.timings:
        cells = {
            name: BenchCell(
                method=describe_method(method), timing=timing,
                budget=None if (budget := job.budget_of(name)) is None else str(budget),
                length=length, batch=batches[name], asked_batch=asked, state=job.setting.state, outcome="ok",
                predicted=None if name not in needs else _predict(job, needs[name], batches[name]),
            ) for name, method in job.methods.items()
        }
        yield from (_fill(job, cells[name], failure) for name, failure in failures.items())
        if ready:
            for name, x in measure(job, timing, ready, length, batches, alone=asked == MAX):
                yield _fill(job, cells[name], x)
                if isinstance(x, Failure) and x.device_lost:
                    raise _lost(name, x)


def _foresee(job: BenchJob, need: Need, batch: int) -> Failure | None:
    """A failure without a try: no sequence fits, or the system would kill the process for its host memory."""
    peak, pinned = need.peak(max(1, batch), job.setting.state), need.pinned_bytes(max(1, batch))
    if job.host_memory is not None and pinned > job.host_memory:
        return Failure("out of memory", (
            f"not tried: {pinned / GB:.2f} GB of pinned memory predicted, {job.host_memory / GB:.2f} GB available"
        ))
    if batch and (job.device.type == "cuda" or peak <= job.memory):
        return None
    return Failure("out of memory", f"not tried: {peak / GB:.2f} GB predicted, {job.memory / GB:.2f} GB available")


def _predict(job: BenchJob, need: Need, batch: int) -> Predicted:
    return Predicted(
        stored_bytes=batch * need.cache, peak_bytes=need.peak(batch, job.setting.state),
        max_batch=need.max_batch(job.memory, job.setting.state, job.host_memory),
    )


def _fill(job: BenchJob, cell: BenchCell, ours: Measured | Failure) -> BenchCell:
    """Fill a cell with times, speed-ups and bytes, or with the reason why there are none."""
    if isinstance(ours, Failure):
        return cell.model_copy(update={"outcome": ours.outcome, "reason": ours.reason})
    times = {quantity: _time(job, quantity, seconds, ours) for quantity, seconds in ours.rounds.items()}
    paced = times.get("step") or times.get("token")
    return cell.model_copy(update={
        "batch": ours.batch, "times": times,
        "tokens_per_s": None if paced is None else ours.batch / paced.seconds.median,
        "graph": ours.graph, "graph_reason": ours.graph_reason, "steps": ours.steps, "memory": ours.memory,
        "device_memory": ours.device_memory, "kernels": ours.kernels,
    })


def _time(job: BenchJob, quantity: str, seconds: list[float], ours: Measured) -> Time:
    median = find_median(seconds)
    moved = ours.read_bytes
    if quantity not in ("attention", "step", "token") or job.setting.model.kind == "diffusion":
        moved = None
    elif moved is not None and quantity != "attention":
        moved += job.outline.step_bytes
    return Time(
        seconds=median, bytes_moved=moved,
        speedups={
            other: compare(rounds[quantity], seconds, paired=ours.paired) for other, rounds in ours.anchors.items()
            if quantity != "compression"  # anchors do not compress
        },
        bandwidth_share=None if moved is None else moved / median.median / job.copy_bandwidth,
    )
