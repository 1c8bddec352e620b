"""What everything is timed with: device events, a cold cache, captured graphs, a copy as the ruler; and medians."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from kvbench.bench.records import Median, Speedup

Call = Callable[[], None]
WARM_UPS = 3
CAPTURED_CALLS = WARM_UPS + 1
"""Calls that are made before one is captured."""
COPIES = 20
COPIED_BYTES = {"cpu": 64 << 20, "cuda": 2 << 30}
"""Of the ruler's source: many times a cache."""
DRAWS = 2000


def time_calls(device: torch.device, call: Call, count: int, before: Call | None = None) -> float:
    """Seconds of a call, the mean of several one after the other; what runs before each is not in it.

    On a GPU by events, so that it is the device's time: where Python is slower than the device, Python's.
    """
    total = 0.0
    marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    for _ in range(count):
        if before is not None:
            before()
        if device.type == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
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
    """Seconds by name and round: in each round every one once, and another one goes first."""
    names = list(timers)
    found: dict[str, list[float]] = {name: [] for name in names}
    with _no_collection():
        for number in range(rounds):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                found[name].append(timers[name]())
    return found


@contextmanager
def _no_collection() -> Iterator[None]:
    """The garbage collector stops a timed loop at moments of its own."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def make_cold(device: torch.device) -> Call | None:
    """A call that leaves nothing of ours in the GPU's L2 cache; None where there is no GPU.

    It reads twice the cache's size: what it would write had to be written back within the next timed call.
    """
    if device.type != "cuda":
        return None
    size = torch.cuda.get_device_properties(device).L2_cache_size
    scratch = torch.ones(2 * size // 4, dtype=torch.float32, device=device)
    return lambda: _read(scratch)


def _read(scratch: Tensor) -> None:
    scratch.max()


def capture(call: Call, device: torch.device) -> tuple[Call, str | None]:
    """The call as a CUDA graph that is replayed; or the call itself, and why it cannot be one.

    CAPTURED_CALLS are made before: what is compiled or allocated once must not be within a graph, and a call that
    waits for the device is found while it can still be told.
    """
    stream = torch.cuda.current_stream(device)
    try:
        _try_alone(call, device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        torch.cuda.set_stream(stream)  # a capture that broke off leaves its own
        torch.cuda.synchronize(device)
        return call, (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return graph.replay, None


def _try_alone(call: Call, device: torch.device) -> None:
    """On a stream of its own, as a capture is; the last call may not wait for the device (RuntimeError)."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            call()
        with warnings.catch_warnings(action="ignore"):  # that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream(device).wait_stream(side)


def measure_copy(device: torch.device) -> float:
    """Bytes per second, read and written, that a large copy on the device moves: the median of several."""
    size = COPIED_BYTES[device.type]
    source = torch.randint(256, (size,), dtype=torch.uint8, device=device)  # zeros may be moved faster
    target = torch.empty_like(source)
    seconds = [time_calls(device, lambda: _copy(target, source), 1) for _ in range(WARM_UPS + COPIES)]
    return 2 * size / float(np.median(seconds[WARM_UPS:]))


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def find_median(values: Sequence[float]) -> Median:
    """The median and its 95 % percentile bootstrap over rounds."""
    median, low, high = _bootstrap(np.asarray(values)[_draws(len(values), seed=0)], float(np.median(values)))
    return Median(median=median, low=low, high=high, n=len(values))


def compare(anchor: Sequence[float], ours: Sequence[float], *, paired: bool) -> Speedup:
    """How many times as fast as an anchor: the median over rounds of their ratio, or the ratio of their medians."""
    theirs, mine = np.asarray(anchor), np.asarray(ours)
    if paired:
        ratios = theirs / mine
        found = _bootstrap(ratios[_draws(len(ratios), seed=0)], float(np.median(ratios)))
    else:
        drawn = np.median(theirs[_draws(len(theirs), seed=0)], axis=1) / np.median(
            mine[_draws(len(mine), seed=1)], axis=1
        )
        low, high = np.percentile(drawn, [2.5, 97.5])
        found = float(np.median(theirs) / np.median(mine)), float(low), float(high)
    return Speedup(median=found[0], low=found[1], high=found[2], n=min(len(theirs), len(mine)), paired=paired)


def _draws(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, n, size=(DRAWS, n))


def _bootstrap(drawn: np.ndarray, median: float) -> tuple[float, float, float]:
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return median, float(low), float(high)
