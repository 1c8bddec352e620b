"""Timing tools: device events, a cold L2 cache, CUDA graph capture, copy bandwidth, medians and speed-ups."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvbench.bench.records import Median, Speedup
from kvbench.engine.timing import rotate
from kvbench.errors import first_line
from kvbench.log import say

Call = Callable[[], None]
WARM_UPS = 3
CAPTURED_CALLS = WARM_UPS + 1
"""Calls made before the captured one."""
COPIES = 20
COPIED_BYTES = {"cpu": 64 << 20, "cuda": 2 << 30}
"""Size of the copied tensor, many times the size of a last-level cache."""
DRAWS = 2000
WAIT_CYCLES = 200_000
"""GPU cycles, about 0.1 ms, that a kernel waits before a timed call, in which the CPU launches the call."""


def time_calls(device: torch.device, call: Call, count: int, before: Call | None = None) -> float:
    """Mean seconds per call over `count` consecutive calls; `before` runs before each call and is not timed.

    On a GPU, CUDA events measure the device's time. If Python launches more slowly than the device runs, they measure
    Python's time.
    """
    total = 0.0
    marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    for _ in range(count):
        if before is not None:
            before()
        if device.type == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(WAIT_CYCLES)  # noqa: SLF001  # keeps the launch of a graph out of the time
            start.record()
            call()
            stop.record()
            marks.append((start, stop))
        else:
            started = time.perf_counter()
            call()
            total += time.perf_counter() - started
    if marks:
        torch.cuda.synchronize(device)
        total = sum(start.elapsed_time(stop) for start, stop in marks) / 1000
    return total / count


def interleave(timers: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds by name and round. Each round runs every timer once, starting with a different one."""
    names = list(timers)
    found: dict[str, list[float]] = {name: [] for name in names}
    with _no_collection():
        for number in range(rounds):
            for name in rotate(names, number):
                found[name].append(timers[name]())
    return found


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable the garbage collector, which would interrupt a timed loop at random."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def make_cold(device: torch.device) -> Call | None:
    """A call that evicts the GPU's L2 cache; None on a CPU.

    It reads twice the size of the cache. Writing instead would cause write-backs during the next timed call.
    """
    if device.type != "cuda":
        return None
    size = torch.cuda.get_device_properties(device).L2_cache_size
    scratch = torch.ones(2 * size // 4, dtype=torch.float32, device=device)
    return lambda: _read(scratch)


def _read(scratch: Tensor) -> None:
    scratch.max()


def capture(call: Call, device: torch.device) -> tuple[Call, str | None]:
    """Capture a call as a CUDA graph. Returns the replay and None, or the call itself and the reason for the failure.

    The call runs CAPTURED_CALLS times before the capture, so that compilation and one-time allocations stay outside the
    graph, and so that a call that synchronizes is detected before the capture.
    """
    stream, pool = torch.cuda.current_stream(device), None
    try:
        _try_alone(call, device)
        pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            call()
    except RuntimeError as error:
        torch.cuda.set_stream(stream)  # a failed capture leaves its own stream current
        reason = first_line(error)
        if pool is not None:
            _leave_capture(device, pool)
            say(f"a CUDA graph capture failed: {reason}")
        if isinstance(error, torch.OutOfMemoryError):
            raise
        torch.cuda.synchronize(device)
        return call, reason
    return graph.replay, None


def _leave_capture(device: torch.device, pool: Any) -> None:
    """End the allocator's capture mode, which torch 2.11 leaves on after a failed capture (pytorch#180395).

    Otherwise every later `torch.cuda.empty_cache` and every later capture would fail.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        with suppress(RuntimeError, AttributeError):  # a newer torch has done it, or has no such function
            getattr(torch._C, name)(index, pool)  # noqa: SLF001


def _try_alone(call: Call, device: torch.device) -> None:
    """Run the call on a side stream, as a capture does. The last call raises RuntimeError if it synchronizes."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            call()
        with warnings.catch_warnings(action="ignore"):  # "synchronization debug mode is a prototype"
            torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream(device).wait_stream(side)


def measure_copy(device: torch.device) -> float:
    """Median bandwidth of a large copy on the device; bytes read plus written, per second."""
    size = COPIED_BYTES[device.type]
    source = torch.randint(256, (size,), dtype=torch.uint8, device=device)  # zeros may be copied faster
    target = torch.empty_like(source)
    seconds = [time_calls(device, lambda: _copy(target, source), 1) for _ in range(WARM_UPS + COPIES)]
    return 2 * size / float(np.median(seconds[WARM_UPS:]))


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def find_median(values: Sequence[float]) -> Median:
    """The median and its 95 % percentile bootstrap interval over rounds."""
    low, high = _find_interval(_resample_medians(values, seed=0))
    return Median(median=float(np.median(values)), low=low, high=high, n=len(values))


def compare(anchor: Sequence[float], ours: Sequence[float], *, paired: bool) -> Speedup:
    """Speed-up over an anchor: the median of the ratios by round if paired, else the ratio of the medians."""
    if paired:
        ratios = np.asarray(anchor) / np.asarray(ours)
        median, drawn = np.median(ratios), _resample_medians(ratios, seed=0)
    else:
        median = np.median(anchor) / np.median(ours)
        drawn = _resample_medians(anchor, seed=0) / _resample_medians(ours, seed=1)
    low, high = _find_interval(drawn)
    return Speedup(median=float(median), low=low, high=high, n=min(len(anchor), len(ours)), paired=paired)


def _resample_medians(values: Sequence[float] | np.ndarray, seed: int) -> np.ndarray:
    """Medians of bootstrap resamples. [DRAWS]"""
    drawn = np.random.default_rng(seed).integers(0, len(values), size=(DRAWS, len(values)))
    medians: np.ndarray = np.median(np.asarray(values)[drawn], axis=1)
    return medians


def _find_interval(drawn: np.ndarray) -> tuple[float, float]:
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(low), float(high)
