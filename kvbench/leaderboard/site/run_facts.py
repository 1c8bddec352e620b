"""The facts on a run's page, as pairs of a name and a value."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvbench.analysis.formatting import format_bytes, format_seconds
from kvbench.analysis.shares import (
    conversation_share,
    distinct_read_share,
    read_share,
    reference_width,
    stored_share,
)
from kvbench.leaderboard.site.pages import write_value
from kvbench.runs.results import BaselineResult, Result

Facts = list[tuple[str, str]]
MEMORY: tuple[tuple[str, str, Callable[[Result], float | None] | None], ...] = (
    ("full_bytes", "full cache of the same context", None),
    ("stored_bytes", "stored for the context, host memory and files included", stored_share),
    ("host_bytes", "of these in host memory", None),
    ("file_bytes", "of these in files", None),
    ("spare_bytes", "spare bytes for later tokens, the harness's", None),
    ("end_stored_bytes", "stored at the end of the conversation", conversation_share),
    ("peak_bytes", "peak on the device", None),
    ("read_bytes_per_step", "read per decode step", read_share),
    ("distinct_read_bytes_per_step", "read per decode step, each entry once", distinct_read_share),
    ("host_read_bytes_per_step", "read per decode step from host memory", None),
    ("file_read_bytes_per_step", "read per decode step from files", None),
)
"""Bytes, and their shares of what the full cache stores or reads at the same moment."""


def list_memory(result: Result) -> list[tuple[str, str, float | None]]:
    """Name, size and share for each measured number of bytes; parts that are empty are left out."""
    memory = result.memory
    if memory is None:
        return []
    end = memory.end_stored_bytes
    counts = memory.model_dump() | {
        "stored_bytes": memory.stored_bytes + memory.off_device_bytes,
        "end_stored_bytes": None if end is None else end + memory.off_device_bytes,
    }
    found = [
        (words, format_bytes(counts[name]), None if share is None else share(result))
        for name, words, share in MEMORY if counts[name] or (share and counts[name] is not None)
    ]
    if (width := reference_width(result)) != 1:
        whole = format_bytes(round(memory.full_bytes * width))
        found.insert(1, ("full cache in 16 bits, to which the shares refer", whole, None))
    return found


def list_times(result: Result) -> Facts:
    """Medians of the end-to-end timing."""
    x = result.latency
    found = [
        ("prefill, compression included", x.prefill_s), ("of which compression", x.compress_s),
        ("time to first token", x.ttft_s), ("time per output token", x.tpot_s),
        ("time per output token, 95th percentile", x.p95),
    ]
    return [(name, format_seconds(value)) for name, value in found if value is not None]


def list_effect(result: Result) -> Facts:
    """The counters of the effect check."""
    x = result.effect
    if x is None:
        return []
    acted = f"in {x.n_acted} of {x.n} contexts" if x.n else "not required: the method is declared lossless"
    unit = "computed per denoising step" if result.diffusion else "kept"
    where = "in every layer" if len(set(x.entries_kept_by_layer)) == 1 else "mean over layers"
    return [
        ("cache modified", acted), ("contexts at lossless settings", str(x.n_identity)),
        (f"entries {unit}, {where}", f"{x.entries_kept:,.1f} of {x.entries_seen:,}"),
        *((name.replace("_", " "), f"{count:,}") for name, count in sorted(x.facts.items())),
    ]


def list_diffusion(result: Result) -> Facts:
    """Settings and measurements of a diffusion run."""
    x = result.diffusion
    if x is None:
        return []
    found = x.model_dump(mode="json", exclude={"baselines"}, exclude_none=True)
    return [
        *((name.replace("_", " "), f"{y:,.4g}" if isinstance(y, float) else str(y)) for name, y in found.items()),
        *((f"baseline {name}", _describe(y)) for name, y in x.baselines.items()),
    ]


def _describe(x: BaselineResult) -> str:
    score = "no score" if x.mean is None else f"score {x.mean:.3f}"
    return f"{score} with NFE {x.nfe:.1f}; this run is {x.speedup:.2f} times as fast, {x.same_tokens:.1%} same tokens"


def list_place(result: Result) -> Facts:
    """Hardware, software and source versions of the run."""
    place, sources = result.environment, result.spec.sources
    code = "unknown" if place.git is None else f"{place.git.commit}{', uncommitted changes' if place.git.dirty else ''}"
    return [
        ("machine", place.gpu or place.cpu), ("threads", str(place.threads)), ("started", place.started),
        ("total seconds", f"{place.seconds:,.1f}"), ("commit", code), ("python", place.python),
        *((name, write_value(value)) for name, value in result.spec.versions.model_dump().items()),
        ("triton", write_value(place.triton)),
        ("kernels", f"{result.kernels.implementation}: {', '.join(_kernels(result)) or 'none recorded'}"),
        *((f"source of the {name}" if name in ("method", "task") else f"sources of the {name}", value)
          for name, value in sources.model_dump().items()),
        ("model files", result.model.sha256), ("tokenizer", result.model.tokenizer_sha256),
    ]


def _kernels(result: Result) -> Iterable[str]:
    return [f"{op} {kind}" for op, kind in sorted(result.kernels.ran.items())] or result.kernels.ops
