"""A job's cells as a table for people."""

from __future__ import annotations

from collections.abc import Iterator

from kvbench.bench.records import FEW, Bench, Cell, Speedup, Time
from kvbench.table import format_bytes

COLUMNS = (
    "clock", "tokens x batch", "method", "of", "time", "over full", "over full-int8", "tokens/s", "moved", "of copy",
    "held", "peak", "graph",
)


def list_rows(bench: Bench) -> Iterator[list[str]]:
    """A row for every time of every cell. Seconds of a CPU are nobody's claim: they are left out."""
    absolute = bench.environment.gpu is not None
    for cell in bench.cells:
        start = [cell.clock, f"{cell.length:,} x {cell.batch}{' (max)' if cell.asked_batch == 'max' else ''}",
                 cell.method.name]
        if cell.outcome != "ok":
            yield [*start, cell.outcome, *[""] * 8, cell.reason or ""]
        for quantity, time in cell.times.items():
            yield [*start, quantity, *_numbers(cell, quantity, time, absolute=absolute), *_memory(cell), _graph(cell)]


def list_lines(bench: Bench) -> Iterator[str]:
    """The same in a line each, short enough for the end of a log."""
    for cell in bench.cells:
        start = f"{cell.clock:6} {cell.length:>7,} x {cell.batch:<3} {cell.method.name:20}"
        if cell.outcome != "ok":
            yield f"{start} {cell.outcome}: {cell.reason}"[:150]
        for quantity, time in cell.times.items():
            share = "" if time.bandwidth_share is None else f"{time.bandwidth_share:.0%} of copy"
            graph = {True: "graph", False: "no graph", None: ""}[cell.graph]
            found = time.speedups.get("full") or time.speedups.get("none")
            seconds = format_seconds(time.seconds.median) if bench.environment.gpu else "-"
            yield f"{start} {quantity:11} {seconds:8} {format_speedup(found):26} {share:12} {graph}".rstrip()


def _numbers(cell: Cell, quantity: str, time: Time, *, absolute: bool) -> list[str]:
    paced = cell.tokens_per_s if quantity in ("step", "token") else None
    return [
        format_seconds(time.seconds.median) if absolute else "-",
        *(format_speedup(time.speedups.get(x)) for x in (("none" if "none" in time.speedups else "full"), "full-int8")),
        "-" if paced is None or not absolute else f"{paced:,.0f}",
        "-" if time.bytes_moved is None else format_bytes(time.bytes_moved),
        "-" if time.bandwidth_share is None else f"{time.bandwidth_share:.0%}",
    ]


def _memory(cell: Cell) -> list[str]:
    """What was held, and the most at once: by the GPU's allocator where there is one."""
    if cell.memory is None:
        return ["-", "-"]
    held = (cell.memory.cache_bytes + cell.memory.host_bytes) / cell.memory.dense_bytes
    peak = cell.memory.peak_bytes if cell.device_memory is None else cell.device_memory.peak_bytes
    return [f"{held:.1%}", format_bytes(peak)]


def _graph(cell: Cell) -> str:
    if cell.graph is None:
        return "-"
    return "yes" if cell.graph else f"no: {cell.graph_reason}"


def format_speedup(found: Speedup | None) -> str:
    """A ratio with its interval, and why it is no finding."""
    if found is None:
        return "-"
    doubt = f" of {found.n}" if found.n < FEW else " noise" if found.within_noise else ""
    return f"{found.median:.2f} [{found.low:.2f}, {found.high:.2f}]{doubt}"


def format_seconds(value: float) -> str:
    """Seconds with a unit that leaves three digits or so."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value * 1e6:.3g} us"
