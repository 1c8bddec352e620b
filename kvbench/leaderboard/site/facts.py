"""What the page of one run says of it, in pairs of a name and a value."""

from __future__ import annotations

from collections.abc import Iterable

from kvbench.analysis.formatting import format_bytes, format_seconds
from kvbench.leaderboard.site.pages import write_value
from kvbench.runs.results import BaselineResult, Result

Facts = list[tuple[str, str]]
MEMORY = (
    ("full_bytes", "a dense cache of the same context"),
    ("stored_bytes", "held on the device right after compression"),
    ("host_bytes", "held in host memory"),
    ("spare_bytes", "room kept for later tokens"),
    ("end_bytes", "held on the device when the turn was answered"),
    ("peak_bytes", "the most held on the device at once"),
    ("read_bytes_per_step", "read by a decode step"),
)


def list_memory(result: Result) -> list[tuple[str, str, float]]:
    """What, how much, and its share of the dense cache."""
    memory = result.memory
    if memory is None:
        return []
    found = ((words, getattr(memory, name)) for name, words in MEMORY)
    return [(words, format_bytes(count), count / memory.full_bytes) for words, count in found]


def list_times(result: Result) -> Facts:
    """Medians by the user's clock."""
    x = result.latency
    found = [
        ("prefill, compression included", x.prefill_s), ("of which compression", x.compress_s),
        ("to the first token", x.ttft_s), ("per token", x.tpot_s), ("per token, 95 % of them below", x.p95),
    ]
    return [(name, format_seconds(value)) for name, value in found if value is not None]


def list_effect(result: Result) -> Facts:
    """What the stores say the method did."""
    x = result.effect
    if x is None:
        return []
    acted = f"in {x.n_acted} of {x.n} contexts" if x.n else "nothing to do, by declaration"
    unit = "computed in a pass" if result.diffusion else "kept"
    return [
        ("it acted", acted), ("contexts at settings that lose nothing", str(x.n_identity)),
        (f"rows {unit}, mean over layers", f"{x.entries_kept:,.1f} of {x.entries_seen:,}"),
        *((name.replace("_", " "), f"{count:,}") for name, count in sorted(x.facts.items())),
    ]


def list_diffusion(result: Result) -> Facts:
    """The regime of a diffusion run, and what it took."""
    x = result.diffusion
    if x is None:
        return []
    found = x.model_dump(mode="json", exclude={"baselines"}, exclude_none=True)
    return [
        *((name.replace("_", " "), f"{y:,.4g}" if isinstance(y, float) else str(y)) for name, y in found.items()),
        *((f"beside it, {name}", _describe(y)) for name, y in x.baselines.items()),
    ]


def _describe(x: BaselineResult) -> str:
    score = "no score" if x.mean is None else f"score {x.mean:.3f}"
    return f"{score} in {x.nfe:.1f} passes; this run is {x.speedup:.2f} times as fast, {x.same_tokens:.1%} same tokens"


def list_place(result: Result) -> Facts:
    """Where it ran, from which code."""
    place, sources = result.environment, result.spec.sources
    code = "not known" if place.git is None else f"{place.git.commit}{', changed' if place.git.dirty else ''}"
    return [
        ("machine", place.gpu or place.cpu), ("threads", str(place.threads)), ("started", place.started),
        ("seconds in all", f"{place.seconds:,.1f}"), ("commit", code), ("python", place.python),
        *((name, write_value(value)) for name, value in result.spec.versions.model_dump().items()),
        ("triton", write_value(place.triton)),
        ("kernels", f"{result.kernels.implementation}: {', '.join(_kernels(result)) or 'none recorded'}"),
        *((f"source of the {name}" if name in ("method", "task") else f"sources of the {name}", value)
          for name, value in sources.model_dump().items()),
        ("model files", result.model.sha256), ("tokenizer", result.model.tokenizer_sha256),
    ]


def _kernels(result: Result) -> Iterable[str]:
    return [f"{op} {kind}" for op, kind in sorted(result.kernels.ran.items())] or result.kernels.ops
