"""Runs a job of `kvbench bench`, from the typed options to its file."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Literal, cast, get_args

import torch

from kvbench.bench.answer import STEPS
from kvbench.bench.earlier import (
    check_environment,
    check_identity,
    find_changes,
    is_finished,
    list_options,
    read_earlier,
)
from kvbench.bench.forecast import ANCHORS, LATER, State, make_methods
from kvbench.bench.grid import MAX, run_cells
from kvbench.bench.job import BenchJob
from kvbench.bench.outcome import Failure, attempt
from kvbench.bench.records import Bench, BenchCell, CopyBandwidth, Timing
from kvbench.bench.state import Setting
from kvbench.bench.timing import COPIED_BYTES, measure_copy
from kvbench.budget import Budget
from kvbench.errors import MOST, UserError, check_number, is_whole, unknown
from kvbench.hf import Model, check_device, load_model, predict_memory
from kvbench.log import say
from kvbench.machine import GB, free_bytes
from kvbench.method import Method
from kvbench.runs.environment import find_environment
from kvbench.runs.files import holding, write_record
from kvbench.runs.prepare import describe_method
from kvbench.runs.request import check_kernels, check_kernels_device, check_kernels_dtype
from kvbench.runs.spec import Implementation, ModelSpec
from kvbench.settings import parse_pairs

ROUNDS: dict[Timing, int] = {"kernel": 16, "step": 16, "end-to-end": 5}
LEAST_GB = 0.001
HOST_SHARE = 0.6
"""Share of the available host memory that pinned blocks, or everything on a CPU, may take."""
MARGIN = LATER - STEPS
"""Tokens in addition to the timed ones: warm-ups, recorded queries and the comparison of a captured step."""


@dataclass(frozen=True)
class BenchRequest:
    """The options of `kvbench bench` as typed; None selects the default."""

    methods: tuple[str, ...]
    model: str = "mini"
    lengths: tuple[int, ...] = (4096,)
    batches: tuple[str, ...] = ("1",)
    timings: tuple[str, ...] = get_args(Timing)
    state: str = "prefill"
    budget: str | None = None
    settings: tuple[str, ...] = ()
    kernels: str = "torch"
    chunk: int | None = None
    rounds: int | None = None
    memory: float | None = None
    """GB that weights and caches may take together; None: all free memory of a GPU, 60 % of a CPU's."""
    seconds: float | None = None
    """No cell is started after this many seconds; the remaining cells are `skipped`."""
    device: str | None = None
    dtype: str | None = None
    out: Path | None = None


def run_bench(request: BenchRequest) -> Bench:
    """Time all cells of a request. The file, if one is requested, is rewritten after every cell.

    An unfinished file of the same job is continued, and a finished one returned.

    Raises:
        UserError: the request is invalid, the file is of another job, machine, code or model, or another process works
            on it. Failures of single cells are outcomes of these cells.
    """
    out = request.out
    if out is None:
        return _run(request)
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise UserError(f"--out '{out}' must be a file in an existing folder.")
    lock = out.with_name(f".{out.name}.lock")
    with holding(lock, out, "--out"):
        try:
            return _run(request)
        finally:
            lock.unlink()


def _run(request: BenchRequest) -> Bench:
    started, began = datetime.now(UTC).isoformat(timespec="seconds"), time.perf_counter()
    held = read_earlier(request)
    job = replace(_prepare(request), deadline=began + (request.seconds or math.inf))
    model, device = job.setting.model, job.device
    where = find_environment(device.type, started=started, seconds=0.0, device_map=model.device_map)
    earlier: list[BenchCell] = []
    if held is not None and request.out is not None:
        check_identity(request.out, held, ModelSpec.of(model), map(describe_method, job.methods.values()))
        if is_finished(held):
            changes = "; ".join(find_changes(held, where))
            other = f" It is of another machine or other code ({changes})." if changes else ""
            say(f"already finished: showing {request.out}.{other} Delete the file to run it again.")
            return held
        check_environment(request.out, held, where)
        earlier = [x for x in held.cells if x.outcome != "skipped"]
        say(f"{request.out} has {len(earlier)} cells of this job: continuing with the others.")
    job, done = replace(job, methods=_find_unfinished(job, earlier)), {_key(x) for x in earlier}
    cells = list(earlier)

    def save(status: Literal["running", "done"], after: float | None) -> Bench:
        bench = Bench(
            status=status, command=list_options(request),
            model=ModelSpec.of(model), kernels=job.kernels,
            weight_bytes=job.outline.weight_bytes, memory_bytes=job.memory,
            copy_bandwidth=CopyBandwidth(
                copied_bytes=COPIED_BYTES[device.type], before=job.copy_bandwidth, after=after
            ),
            cells=tuple(cells),
            environment=where.model_copy(update={"seconds": time.perf_counter() - began}),
        )
        if request.out is not None:
            write_record(request.out, bench)
        return bench

    def emit(cell: BenchCell) -> None:
        if _key(cell) in done:
            return  # an anchor that was timed again for the methods that are missing
        cells.append(cell)
        outcome = cell.outcome if cell.reason is None else f"{cell.outcome}: {cell.reason}"
        say(f"{cell.timing} {cell.method.name}, {cell.length} tokens x {cell.batch}: {outcome}")
        save("running", None)

    save("running", None)  # a place that cannot be written costs no measurement
    run_cells(job, emit)
    after = attempt(partial(measure_copy, device))
    return save("done", None if isinstance(after, Failure) else after)


def _find_unfinished(job: BenchJob, earlier: Sequence[BenchCell]) -> dict[str, Method]:
    """The anchors and the methods that lack cells."""
    counts = Counter(x.method.name for x in earlier)
    each = len(job.timings) * len(job.lengths) * len(job.batches)
    return {
        name: x for name, x in job.methods.items() if name in job.anchors or counts[x.card.name] < each
    }


def _key(cell: BenchCell) -> tuple[object, ...]:
    return cell.method.name, cell.timing, cell.length, cell.asked_batch


def _prepare(request: BenchRequest) -> BenchJob:
    """Check the request, load the model and measure the copy bandwidth."""
    timings = _check(request)
    device = request.device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device(device)
    outline = predict_memory(request.model, request.dtype, device=device)
    made = make_methods(request.methods, parse_pairs(request.settings, "--set"), request.model, outline.kind)
    check_kernels_device(request.kernels, device.partition(":")[0])
    if outline.kind == "diffusion" and timings != ["end-to-end"]:
        raise UserError(
            "the steps of a diffusion model differ in shape, so only whole answers are timed: "
            "use --timing end-to-end."
        )
    free = free_bytes(device.partition(":")[0])
    if outline.weight_bytes > free:
        raise UserError(
            f"model '{request.model}' needs {outline.weight_bytes / GB:.1f} GB for its weights, but "
            f"{free / GB:.1f} GB are free on {device}. Use a smaller --dtype or a smaller model."
        )
    model = load_model(request.model, device, request.dtype)
    check_kernels_dtype(request.kernels, model.device.type, model.dtype)
    rounds = {timing: request.rounds or ROUNDS[timing] for timing in timings}
    later = max(-(-STEPS // x) * x for x in rounds.values()) + MARGIN
    check_positions(request, model, later)
    # A CPU's memory is shared with other processes, and the kernel ends the process that takes too much.
    most = int(HOST_SHARE * free) if model.device.type == "cpu" else free
    return BenchJob(
        setting=Setting(
            model=model, state=cast("State", request.state), chunk=request.chunk, later=later,
        ),
        outline=outline, methods=made,
        anchors=ANCHORS[outline.kind], lengths=tuple(dict.fromkeys(request.lengths)),
        batches=tuple(dict.fromkeys(x if x == MAX else str(int(x)) for x in request.batches)),
        timings=timings, budget=request.budget, kernels=cast("Implementation", request.kernels),
        rounds=rounds, memory=most if request.memory is None else int(request.memory * GB),
        host_memory=int(HOST_SHARE * free_bytes("cpu")) if model.device.type == "cuda" else None,
        copy_bandwidth=measure_copy(model.device),
    )


def _check(request: BenchRequest) -> list[Timing]:
    for timing in request.timings:
        if timing not in get_args(Timing):
            raise unknown("timing level", timing, get_args(Timing))
    if request.state not in get_args(State):
        raise unknown("state", request.state, get_args(State))
    if request.state == "synthetic" and "end-to-end" in request.timings:
        raise UserError("end-to-end timing runs the prompt: leave --state out, or use --timing kernel,step.")
    numbers = {
        "length": request.lengths, "rounds": (request.rounds,), "chunk": (request.chunk,),
        "seconds": (request.seconds,),
    }
    for name, values in numbers.items():
        for value in values:
            if value is not None:
                check_number(name, value)
    if request.memory is not None:
        check_number("memory in GB", request.memory, LEAST_GB)
    for batch in request.batches:
        if batch != MAX and not (is_whole(batch) and int(batch)):
            raise UserError(
                f"batch '{batch[:80]}' must be a number from 1 to {MOST:,}, or max (the largest that fits)."
            )
    if request.budget is not None:
        Budget.parse(request.budget)
    check_kernels(request.kernels)
    return [cast("Timing", x) for x in dict.fromkeys(request.timings)]


def check_positions(request: BenchRequest, model: Model, later: int) -> None:
    """Check that the model can compute at the positions of a request. later: tokens after the longest context.

    Lengths beyond the model's training length are allowed if its positions are rotations, since only time is measured.

    Raises:
        UserError: the model cannot compute there.
    """
    longest = max(request.lengths) + later
    anywhere = bool(model.ropes) and all(x.trusted and x.movable for x in model.ropes)
    if longest > model.max_length and not anywhere:
        raise UserError(
            f"length {max(request.lengths)} and {later} more tokens are beyond the {model.max_length} positions that "
            f"{model.id} can compute. Use a smaller --length."
        )
