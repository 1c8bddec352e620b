"""Tables of run results: one run, several side by side, and the answers that became worse."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.analysis.formatting import (
    format_bytes,
    format_difference,
    format_interval,
    format_score,
    format_seconds,
    print_table,
)

if TYPE_CHECKING:
    from kvbench.analysis.compare import Difference, Regressions
    from kvbench.runs.results import DiffusionResult, Latency, Output, Result

LISTED = 10
"""Regressions of a run that are shown; --json has all."""


def print_result(result: Result, folder: Path) -> None:
    """The summary of one run."""
    spec, memory, latency, effect = result.spec, result.memory, result.latency, result.effect
    settings = " ".join(f"{key}={value}" for key, value in spec.method.settings.items())
    rows = [
        ("method", f"{spec.method.name} {settings}".strip()),
        ("task", f"{spec.task.name}, {spec.task.length} tokens, {spec.split} split"),
        ("samples", f"{spec.samples} contexts x {spec.turns} question{'s' if spec.turns > 1 else ''}"),
        ("model", f"{spec.model.id} ({spec.model.dtype}, {spec.device})"),
        ("mode", _mode(result)),
        ("score", format_score(result)),
    ]
    if len(result.score.by_turn) > 1:
        rows.append(("by turn", "  ".join("-" if x.mean is None else f"{x.mean:.3f}" for x in result.score.by_turn)))
    if result.agreement is not None:
        near = f"top-1 {result.agreement.top1:.3f}, KL {result.agreement.kl:.3g} nats"
        rows.append(("agreement", f"{near} to the dense cache on {result.agreement.n} reference tokens"))
        if result.agreement.by_distance:
            far = "  ".join(f"from {x.start}: {x.top1:.3f}" for x in result.agreement.by_distance)
            rows.append(("top-1 by answer token", far))
    if result.output.truncated:
        rows.append(("cut", f"{result.output.truncated} of {spec.samples} prompts were too long and lost their middle"))
    asked = "none" if spec.budget is None else spec.budget
    if memory is not None:
        measured = f"measured {memory.ratio:.1%} of the dense cache"
        if result.budget.kind == "read":
            share = memory.read_bytes_per_step / memory.full_bytes
            measured = f"a decode step reads {share:.1%} of the dense cache; {memory.ratio_total:.1%} held"
        host = f" and {format_bytes(memory.host_bytes)} in host memory" if memory.host_bytes else ""
        rows += [
            ("budget", f"asked {asked}, {measured}"),
            ("cache", (
                f"{format_bytes(memory.stored_bytes)}{host} of {format_bytes(memory.full_bytes)} dense, "
                f"peak {format_bytes(memory.peak_bytes)}, {memory.bytes_per_token:,.0f} bytes per token"
            )),
        ]
    if latency.mixed is not None:
        rows.append(("time", f"none: {latency.mixed}"))
    elif result.diffusion is None:
        compression = f"prefill {format_seconds(latency.prefill_s)} (compression {format_seconds(latency.compress_s)})"
        rows.append(("time", f"{compression}, {format_seconds(latency.tpot_s)} per token"))
    if result.diffusion is not None:
        rows += _denoising(result.diffusion, latency)
    if effect is not None:
        acted = "nothing to do, by declaration"
        if effect.n:
            acted = f"acted in {effect.n_acted} of {effect.n} samples"
        done = "kept" if result.diffusion is None else "computed in a pass"
        rows.append(("effect", f"{acted}, {effect.entries_kept:,.0f} of {effect.entries_seen:,} rows {done}"))
    rows.append(("run", str(folder)))
    if result.error:
        rows.append(("FAILED", result.error))
    print_table("", ("", result.status), rows)


def score_cells(
    results: Sequence[Result], ranks: Sequence[int | None], differences: Sequence[Difference | None]
) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of runs side by side; a difference is to the first."""
    columns = [
        "run", "method", "questions", "budget", "bytes", "rank", "score", "95%", "difference", "95%", "p", "", "top-1",
        "tokens", "ended by", "prefill", "per token",
    ]
    rows = []
    for result, rank, difference in zip(results, ranks, differences, strict=True):
        score, memory, latency = result.score, result.memory, result.latency
        rows.append([
            _short(result.run_id), result.method.name, f"{result.mode} {result.visibility}",
            result.budget.asked or "-",
            "-" if memory is None else f"{memory.ratio:.1%}", "-" if rank is None else str(rank),
            "failed" if result.status == "failed" else "-" if score.mean is None else f"{score.mean:.3f}",
            "-" if score.ci95 is None else format_interval(score.ci95), *format_difference(difference, score),
            "-" if result.agreement is None else f"{result.agreement.top1:.3f}", *format_output(result.output),
            format_seconds(latency.prefill_s), format_seconds(latency.tpot_s),
        ])
    return columns, rows


def print_regressions(found: Sequence[Regressions]) -> None:
    """How many answers of each run are worse than the full cache's, and the worst of them by name."""
    rows = []
    for run in found:
        worst = [f"{x.sample} turn {x.turn}: {x.full:.3f} -> {x.score:.3f}" for x in run.samples[:LISTED]]
        if run.count > LISTED:
            worst.append(f"{run.count - LISTED} more: see --json")
        rows.append([run.run_id, _short(run.full), f"{run.count} of {run.n}", "\n".join(worst)])
    print_table("", ("run", "full cache", "worse answers", "the worst"), rows)


def _denoising(found: DiffusionResult, latency: Latency) -> list[tuple[str, str]]:
    """The regime of a diffusion run, what it computed, and the same without a cache."""
    how = f"probability {found.threshold:g} and above" if found.steps is None else (
        f"{found.steps:.0f} steps, {found.remasking}"
    )
    noise = f", temperature {found.temperature:g}" if found.temperature else ""
    rows = [
        ("response block", f"{found.response_length:.0f} tokens in blocks of {found.block:.0f}, {how}{noise}"),
        ("passes", (
            f"{found.nfe:.1f} per answer, {found.computed_tokens_per_step:,.0f} tokens each: "
            f"{found.computed_share:.1%} of those without a cache; {_per_second(latency.tokens_per_s)}"
        )),
    ]
    for name, x in found.baselines.items():
        score = "-" if x.mean is None else f"{x.mean:.3f}"
        rows.append((f"beside it: {name}", (
            f"score {score}, {x.nfe:.1f} passes, {_per_second(x.tokens_per_s)}: the method is {x.speedup:.2f} times as "
            f"fast; {x.same_tokens:.1%} of the tokens are the same"
        )))
    return rows


def _per_second(tokens: float | None) -> str:
    return "-" if tokens is None else f"{tokens:,.1f} answer tokens/s"


def _short(run_id: str) -> str:
    return run_id.rpartition("-")[2]


def format_output(output: Output) -> tuple[str, str]:
    """Mean tokens of an answer, and how often each reason ended one."""
    answers = sum(output.stop_reasons.values())
    ended = ", ".join(f"{reason} {count}" for reason, count in sorted(output.stop_reasons.items()))
    return (f"{output.tokens / answers:.1f}", ended) if answers else ("-", "-")


def _mode(result: Result) -> str:
    parts = [str(result.mode), f"question {result.visibility}"]
    if result.mode == "multi-turn":
        parts.append(f"{result.history} history")
    if result.spec.recompress:
        parts.append("recompressed each turn")
    if result.task.chat_template_sha is not None:
        parts.append("in the chat template")
    return ", ".join(parts)
