"""Shares of a run: bytes of the full cache at the same moment, and answers that the length limit cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvbench.analysis.compare import is_full, name_questions
from kvbench.analysis.load import FinishedRun
from kvbench.runs.results import MemoryResult, Result


def stored_share(result: Result) -> float | None:
    """Bytes that hold the context after compression, in all tiers, of the full cache of the context."""
    memory = result.memory
    return None if memory is None else _share(result, memory.stored_bytes + memory.off_device_bytes, memory.full_bytes)


def bytes_per_token(result: Result) -> float | None:
    """Bytes that hold the context after compression, in all tiers, by token of the context."""
    memory = result.memory
    if memory is None or not memory.stored_bytes:
        return None if memory is None else memory.bytes_per_token
    return memory.bytes_per_token * (1 + memory.off_device_bytes / memory.stored_bytes)


def conversation_share(result: Result) -> float | None:
    """Bytes that hold the conversation at its end, in all tiers, of the full cache of the conversation."""
    memory = result.memory
    if memory is None or memory.end_stored_bytes is None:
        return None
    return _share(result, memory.end_stored_bytes + memory.off_device_bytes, memory.end_full_bytes)


def read_share(result: Result) -> float | None:
    """Bytes that a decode step reads, of those that the full cache reads at the same step.

    None also if an earlier version of kvbench made the result; see `fill_full_reads`.
    """
    memory = result.memory
    return None if memory is None else _share(result, memory.read_bytes_per_step, _full_reads(result, memory))


def distinct_read_share(result: Result) -> float | None:
    """As `read_share`, with an entry counted once that several query heads read."""
    memory = result.memory
    if memory is None or memory.distinct_read_bytes_per_step is None:
        return None
    return _share(result, memory.distinct_read_bytes_per_step, _full_reads(result, memory))


def _full_reads(result: Result, memory: MemoryResult) -> int | None:
    """A denoising step without a cache reads the keys and values of the whole sequence."""
    return memory.full_read_bytes_per_step if result.diffusion is None else memory.full_bytes


def _share(result: Result, count: int, full: int | None) -> float | None:
    return None if not full else count / (full * reference_width(result))


def reference_width(result: Result) -> float:
    """Width of the full cache that a run is compared with, as a share of the width in which it was computed.

    The full cache has the element type of the model; for quantized caches it has 16 bits, also if the model computed
    in 32.
    """
    return 0.5 if result.method.family == "quantization" and result.model.dtype == "float32" else 1.0


def cut_share(result: Result) -> float | None:
    """Share of the generated answers that the length limit ended; None if nothing was generated."""
    reasons = result.output.stop_reasons
    generated = reasons.get("length", 0) + reasons.get("stop", 0)
    return reasons.get("length", 0) / generated if generated else None


def fill_full_reads(runs: Sequence[FinishedRun], sources: Sequence[FinishedRun]) -> list[FinishedRun]:
    """Runs in which results of earlier versions have the full cache's reads from its run on the same questions.

    Only with reference history, where all methods continue the same conversation.

    Args:
        runs: runs to fill.
        sources: runs whose measurements are trusted, the most trusted first.
    """
    measured: dict[str, int] = {}
    for x in sources:
        if is_full(x.result) and x.result.memory is not None:
            measured.setdefault(name_questions(x.result.spec), x.result.memory.read_bytes_per_step)
    return [_fill(x, measured) for x in runs]


def _fill(run: FinishedRun, measured: dict[str, int]) -> FinishedRun:
    result, memory = run.result, run.result.memory
    if memory is None or memory.full_read_bytes_per_step is not None or result.history == "own":
        return run
    found = measured.get(name_questions(result.spec))
    memory = memory.model_copy(update={"full_read_bytes_per_step": found})
    return replace(run, result=result.model_copy(update={"memory": memory}))
