"""Prints run results: the summary of one run, several runs side by side, and regressions."""

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
"""Regressions shown per run; --json has all."""


def print_result(result: Result, folder: Path) -> None:
    """Print the summary of one run."""
    spec, latency = result.spec, result.latency
    settings = " ".join(f"{key}={value}" for key, value in spec.method.settings.items())
    turns = f"{spec.turns} questions" if spec.turns > 1 else "1 question"
    rows = [
        ("method", f"{spec.method.name} {settings}".strip()),
        ("task", f"{spec.task.name}, {spec.task.length} tokens, {spec.split} split"),
        ("samples", f"{spec.samples} contexts x {turns}"),
        ("model", f"{spec.model.id} ({spec.model.dtype}, {spec.device})"),
        ("mode", _mode(result)),
        ("score", format_score(result)),
    ]
    if len(result.score.by_turn) > 1:
        rows.append(("by turn", "  ".join("-" if x.mean is None else f"{x.mean:.3f}" for x in result.score.by_turn)))
    rows += _agreement(result)
    if result.output.truncated:
        rows.append(("truncated", f"{result.output.truncated} of {spec.samples} prompts: too long, middle left out"))
    rows += _memory(result)
    if latency.mixed is not None or latency.untimed is not None:
        rows.append(("time", f"not reported: {latency.mixed or latency.untimed}"))
    elif result.diffusion is None:
        prefill = f"prefill {format_seconds(latency.prefill_s)} (compression {format_seconds(latency.compress_s)})"
        rows.append(("time", f"{prefill}, {format_seconds(latency.tpot_s)} per output token"))
    if result.diffusion is not None:
        rows += _diffusion(result.diffusion, latency)
    rows += _effect(result)
    rows.append(("run", str(folder)))
    if result.error:
        rows.append(("FAILED", result.error))
    print_table("", ("", result.status), rows)


def _mode(result: Result) -> str:
    parts = [str(result.mode), f"question {result.visibility}"]
    if result.mode == "multi-turn":
        parts.append(f"{result.history} history")
    if result.spec.recompress:
        parts.append("recompressed each turn")
    if result.task.chat_template_sha is not None:
        parts.append("in the chat template")
    return ", ".join(parts)


def _agreement(result: Result) -> list[tuple[str, str]]:
    """Top-1 agreement and KL divergence, and top-1 by distance from the start of the answer."""
    found = result.agreement
    if found is None:
        return []
    rows = [("agreement", f"top-1 {found.top1:.3f}, KL {found.kl:.3g} nats vs full cache, {found.n} reference tokens")]
    if found.by_distance:
        parts = "  ".join(f"from {x.start}: {x.top1:.3f}" for x in found.by_distance)
        rows.append(("top-1 by answer token", parts))
    return rows


def _memory(result: Result) -> list[tuple[str, str]]:
    """The budget that was requested, the bytes that were stored, and those that a decode step read."""
    memory = result.memory
    if memory is None:
        return []
    rows = [("budget", "none" if result.spec.budget is None else f"requested {result.spec.budget}")]
    host = f" and {format_bytes(memory.host_bytes)} in host memory" if memory.host_bytes else ""
    rows.append(("stored", (
        f"{format_bytes(memory.stored_bytes)}{host}: {memory.ratio_total:.1%} of the full cache's "
        f"{format_bytes(memory.full_bytes)}, peak {format_bytes(memory.peak_bytes)}"
    )))
    if result.diffusion is None:
        share = memory.read_bytes_per_step / memory.full_bytes
        rows.append(("read per step", f"{format_bytes(memory.read_bytes_per_step)}: {share:.1%} of the full cache"))
    return rows


def _effect(result: Result) -> list[tuple[str, str]]:
    """The effect check: in how many samples the method changed what is stored, read or computed."""
    effect = result.effect
    if effect is None:
        return []
    found = "none expected with these settings"
    if effect.n:
        found = f"observed in {effect.n_acted} of {effect.n} samples"
    done = "entries kept" if result.diffusion is None else "tokens computed per step"
    return [("effect", f"{found}, {effect.entries_kept:,.0f} of {effect.entries_seen:,} {done}")]


def _diffusion(found: DiffusionResult, latency: Latency) -> list[tuple[str, str]]:
    """The decoding settings of a diffusion run, what it computed, and the baselines without a cache."""
    how = f"tokens above probability {found.threshold:g}" if found.steps is None else (
        f"{found.steps:.0f} steps, {found.remasking}"
    )
    noise = f", temperature {found.temperature:g}" if found.temperature else ""
    rows = [
        ("response block", f"{found.response_length:.0f} tokens in blocks of {found.block:.0f}, {how}{noise}"),
        ("denoising steps", (
            f"{found.nfe:.1f} per answer, {found.computed_tokens_per_step:,.0f} tokens computed in each, "
            f"{found.computed_share:.1%} of those without a cache; {_per_second(latency.tokens_per_s)}"
        )),
    ]
    for name, x in found.baselines.items():
        score = "-" if x.mean is None else f"{x.mean:.3f}"
        rows.append((f"baseline {name}", (
            f"score {score}, {x.nfe:.1f} denoising steps, {_per_second(x.tokens_per_s)}; speedup of the method "
            f"{x.speedup:.2f}, {x.same_tokens:.1%} of the tokens equal"
        )))
    return rows


def _per_second(tokens: float | None) -> str:
    return "-" if tokens is None else f"{tokens:,.1f} answer tokens/s"


def score_cells(
    results: Sequence[Result], ranks: Sequence[int | None], differences: Sequence[Difference | None]
) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of a table with one run per row; None in `differences` marks the baseline."""
    columns = [
        "run", "method", "mode", "budget", "stored", "rank", "score", "95% CI", "difference", "95% CI", "p", "verdict",
        "top-1", "tokens", "stop reasons", "prefill", "per token",
    ]
    rows = []
    for result, rank, difference in zip(results, ranks, differences, strict=True):
        score, memory, latency = result.score, result.memory, result.latency
        rows.append([
            _short(result.run_id), result.method.name, f"{result.mode} {result.visibility}",
            result.budget.asked or "-",
            "-" if memory is None else f"{memory.ratio:.1%}", "-" if rank is None else str(rank),
            "failed" if result.status == "failed" else "-" if score.mean is None else f"{score.mean:.3f}",
            "-" if score.ci95 is None else format_interval(score.ci95),
            *(("baseline", "", "", "") if difference is None else format_difference(difference, score)),
            "-" if result.agreement is None else f"{result.agreement.top1:.3f}", *format_output(result.output),
            format_seconds(latency.prefill_s), format_seconds(latency.tpot_s),
        ])
    return columns, rows


def print_regressions(found: Sequence[Regressions]) -> None:
    """Print how many answers of each run score lower than the full cache's, and the worst of them."""
    rows = []
    for run in found:
        worst = [f"{x.sample} turn {x.turn}: {x.full:.3f} -> {x.score:.3f}" for x in run.samples[:LISTED]]
        if run.count > LISTED:
            worst.append(f"{run.count - LISTED} more with --json")
        rows.append([run.run_id, _short(run.full), f"{run.count} of {run.n}", "\n".join(worst)])
    print_table("", ("run", "full cache", "worse answers", "largest losses"), rows)


def format_output(output: Output) -> tuple[str, str]:
    """Mean tokens per answer, and the count of each stop reason."""
    answers = sum(output.stop_reasons.values())
    ended = ", ".join(f"{reason} {count}" for reason, count in sorted(output.stop_reasons.items()))
    return (f"{output.tokens / answers:.1f}", ended) if answers else ("-", "-")


def _short(run_id: str) -> str:
    """The hash at the end of a run id."""
    return run_id.rpartition("-")[2]
