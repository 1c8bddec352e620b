"""Formats the cells of a job as tables."""

from __future__ import annotations

from collections.abc import Iterator

from kvbench.analysis.formatting import format_bytes
from kvbench.bench.records import FEW, Bench, BenchCell, Speedup, Time
from kvbench.log import count
from kvbench.machine import GB

COLUMNS = (
    "method", "quantity", "time", "over full", "over full-int8", "over none", "tokens/s", "bytes moved", "of copy",
    "stored", "peak", "graph", "reason",
)
ON_A_GPU = ("time", "tokens/s")
"""Columns of absolute times, left out on a CPU, where they depend on other load."""


def describe(bench: Bench) -> str:
    """The model, where it ran, and the contexts if no prompt was run."""
    place = bench.environment
    where = place.gpu or f"{place.cpu}, {count(place.threads, 'thread')}"
    context = "; synthetic contexts, no prompt was run" if bench.command["state"] == "synthetic" else ""
    return (
        f"{bench.model.id} ({bench.model.dtype}, {bench.kernels} kernels) on {where}; a copy moves "
        f"{bench.copy_bandwidth.before / GB:,.0f} GB/s{context}"
    )


def make_tables(bench: Bench) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """For each timing level, length and batch a title, the columns that are not empty, and one row per time."""
    gpu = bench.environment.gpu is not None
    groups: dict[str, list[dict[str, str]]] = {}
    for cell in bench.cells:
        batch = f"{cell.length:,} tokens x {cell.batch}{' max' * (cell.asked_batch == 'max')}"
        groups.setdefault(f"{cell.timing}, {batch}", []).extend(_list_cells(cell, gpu=gpu))
    for title, rows in groups.items():
        columns = [x for x in COLUMNS if any(row.get(x) for row in rows) and (gpu or x not in ON_A_GPU)]
        yield title, columns, [[row.get(x, "") for x in columns] for row in rows]


def _list_cells(cell: BenchCell, *, gpu: bool) -> Iterator[dict[str, str]]:
    start = {"method": cell.method.name}
    if cell.outcome != "ok":
        yield {**start, "quantity": cell.outcome, "reason": cell.reason or ""}
    for quantity, time in cell.times.items():
        yield {
            **start, "quantity": _label(cell, quantity), "time": format_seconds(time.seconds.median),
            **{f"over {name}": format_speedup(x) for name, x in time.speedups.items()},
            **_list_numbers(cell, quantity, time), "graph": "" if cell.graph is None else "yes" if cell.graph else "no",
            **({"reason": cell.graph_reason} if gpu and cell.graph_reason else {}),
        }


def _label(cell: BenchCell, quantity: str) -> str:
    """Name of a quantity; for compression with its share of the prefill, if the file has one."""
    if quantity != "compression":
        return quantity
    prefill = cell.times.get("prefill")
    if prefill is None or not prefill.seconds.median:
        return quantity
    return f"{quantity}, {cell.times[quantity].seconds.median / prefill.seconds.median:.0%} of prefill"


def _list_numbers(cell: BenchCell, quantity: str, time: Time) -> dict[str, str]:
    """Throughput, bytes moved, stored bytes and peak bytes (the allocator's on a GPU, the ledger's on a CPU)."""
    found = {}
    if cell.tokens_per_s is not None and quantity in ("step", "token"):
        found["tokens/s"] = f"{cell.tokens_per_s:,.0f}"
    if time.bytes_moved is not None and time.bandwidth_share is not None:
        found |= {"bytes moved": format_bytes(time.bytes_moved), "of copy": f"{time.bandwidth_share:.0%}"}
    if cell.memory is not None:
        peak = cell.memory.peak_bytes if cell.device_memory is None else cell.device_memory.peak_bytes
        held, full = cell.memory.stored_bytes + cell.memory.off_device_bytes, cell.memory.full_bytes
        found |= {"stored": f"{held / full:.1%}" if full else "", "peak": format_bytes(peak)}
    return found


def list_lines(bench: Bench) -> Iterator[str]:
    """One short line per time, for logs."""
    for cell in bench.cells:
        start = f"{cell.timing:10} {cell.length:>7,} x {cell.batch:<3} {cell.method.name:20}"
        if cell.outcome != "ok":
            yield f"{start} {cell.outcome}: {cell.reason}"
        for quantity, time in cell.times.items():
            share = "" if time.bandwidth_share is None else f"{time.bandwidth_share:.0%} of copy"
            graph = {True: "graph", False: "no graph", None: ""}[cell.graph]
            found = time.speedups.get("full") or time.speedups.get("none")
            seconds = format_seconds(time.seconds.median) if bench.environment.gpu else "-"
            timed = f"{_label(cell, quantity):22} {seconds:8} {format_speedup(found):26}"
            yield f"{start} {timed} {share:12} {graph}".rstrip()


def format_speedup(found: Speedup | None) -> str:
    """A speed-up with its interval, marked if it is within noise or of few rounds."""
    if found is None:
        return "-"
    doubt = f" of {found.n} rounds" if found.n < FEW else " noise" if found.within_noise else ""
    return f"{_factor(found.median)} [{_factor(found.low)}, {_factor(found.high)}]{doubt}"


def _factor(x: float) -> str:
    """Two decimals, and fewer for large factors, so that a table stays narrow."""
    return f"{x:.2f}" if x < 9.995 else f"{x:.1f}" if x < 99.95 else f"{x:,.0f}"


def format_seconds(value: float) -> str:
    """Seconds in s, ms or us, with three significant digits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        shown = float(f"{value / size:.3g}")
        if shown >= 1:
            return f"{shown:,.0f} {unit}" if shown >= 1000 else f"{shown:.3g} {unit}"
    return f"{value * 1e6:.3g} us"
