"""A job's cells as a table for people."""

from __future__ import annotations

from collections.abc import Iterator

from kvbench.analysis.formatting import format_bytes
from kvbench.bench.records import FEW, Bench, Cell, Speedup, Time

COLUMNS = (
    "clock", "tokens x batch", "method", "of", "time", "over full", "over full-int8", "over none", "tokens/s", "moved",
    "of copy", "held", "peak", "graph", "why",
)
ON_A_GPU = ("time", "tokens/s")
"""Columns of absolute numbers: seconds of a CPU are nobody's claim."""


def make_table(bench: Bench) -> tuple[list[str], list[list[str]]]:
    """Those columns that say something, and a row for every time of every cell."""
    gpu = bench.environment.gpu is not None
    rows = [x for cell in bench.cells for x in _list_cells(cell, gpu=gpu)]
    columns = [x for x in COLUMNS if any(row.get(x) for row in rows) and (gpu or x not in ON_A_GPU)]
    return columns, [[row.get(x, "") for x in columns] for row in rows]


def _list_cells(cell: Cell, *, gpu: bool) -> Iterator[dict[str, str]]:
    start = {
        "clock": cell.clock, "tokens x batch": f"{cell.length:,} x {cell.batch}{' max' * (cell.asked_batch == 'max')}",
        "method": cell.method.name,
    }
    if cell.outcome != "ok":
        yield {**start, "of": cell.outcome, "why": cell.reason or ""}
    for quantity, time in cell.times.items():
        yield {
            **start, "of": _label(cell, quantity), "time": format_seconds(time.seconds.median),
            **{f"over {name}": format_speedup(x) for name, x in time.speedups.items()},
            **_list_numbers(cell, quantity, time), "graph": "" if cell.graph is None else "yes" if cell.graph else "no",
            **({"why": cell.graph_reason} if gpu and cell.graph_reason else {}),
        }


def _label(cell: Cell, quantity: str) -> str:
    """A quantity; compression by its share of the prefill, which any machine's seconds tell."""
    if quantity != "compression":
        return quantity
    share = cell.times[quantity].seconds.median / cell.times["prefill"].seconds.median
    return f"{quantity}, {share:.0%} of it"


def _list_numbers(cell: Cell, quantity: str, time: Time) -> dict[str, str]:
    """Throughput, bytes moved and held, and the most at once: by the GPU's allocator where there is one."""
    found = {}
    if cell.tokens_per_s is not None and quantity in ("step", "token"):
        found["tokens/s"] = f"{cell.tokens_per_s:,.0f}"
    if time.bytes_moved is not None and time.bandwidth_share is not None:
        found |= {"moved": format_bytes(time.bytes_moved), "of copy": f"{time.bandwidth_share:.0%}"}
    if cell.memory is not None:
        peak = cell.memory.peak_bytes if cell.device_memory is None else cell.device_memory.peak_bytes
        held = (cell.memory.stored_bytes + cell.memory.host_bytes) / cell.memory.full_bytes
        found |= {"held": f"{held:.1%}", "peak": format_bytes(peak)}
    return found


def list_lines(bench: Bench) -> Iterator[str]:
    """A short line for every time, for the end of a log."""
    for cell in bench.cells:
        start = f"{cell.clock:6} {cell.length:>7,} x {cell.batch:<3} {cell.method.name:20}"
        if cell.outcome != "ok":
            yield f"{start} {cell.outcome}: {cell.reason}"[:150]
        for quantity, time in cell.times.items():
            share = "" if time.bandwidth_share is None else f"{time.bandwidth_share:.0%} of copy"
            graph = {True: "graph", False: "no graph", None: ""}[cell.graph]
            found = time.speedups.get("full") or time.speedups.get("none")
            seconds = format_seconds(time.seconds.median) if bench.environment.gpu else "-"
            timed = f"{_label(cell, quantity):22} {seconds:8} {format_speedup(found):26}"
            yield f"{start} {timed} {share:12} {graph}".rstrip()


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
