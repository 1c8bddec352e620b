"""Prints the summary of one run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.analysis.doubts import find_strict, list_doubts
from kvbench.analysis.formatting import (
    format_bytes,
    format_score,
    format_seconds,
    format_settings,
    format_share,
    print_table,
)
from kvbench.analysis.load import refer_to
from kvbench.analysis.metrics import Metric
from kvbench.analysis.shares import (
    conversation_share,
    distinct_read_share,
    read_share,
    reference_width,
    stored_share,
)
from kvbench.log import count
from kvbench.report.group import VISIBILITIES

if TYPE_CHECKING:
    from kvbench.runs.results import DiffusionResult, EffectResult, Latency, Result

ENDINGS = {
    "stop": "ended by a stop token", "length": "cut by the length limit", "choice": "scored by log-probability",
}
"""How an answer ended, by stop reason."""


def print_result(result: Result, folder: Path) -> None:
    """Print the summary of one run."""
    spec, latency = result.spec, result.latency
    rows = [
        ("method", f"{spec.method.name} {format_settings(spec.method.settings)}".strip()),
        *([("calibration", calibration)] if (calibration := result.method.card.get("calibration")) else []),
        ("task", f"{spec.task.name}, {spec.task.length} tokens, {spec.split} split"),
        ("samples", format_samples(result)),
        ("model", f"{spec.model.id} ({spec.model.dtype}, {spec.device})"),
        ("mode", _mode(result)),
        ("score", format_score(result)),
    ]
    if len(result.score.by_turn) > 1:
        write = Metric.of(result.score).write
        rows.append(("by turn", "  ".join("-" if x.mean is None else write(x.mean) for x in result.score.by_turn)))
    if (strict := find_strict(result)) is not None:
        rows.append(("strict", f"{strict:.3f} if the first value named counts"))
    rows.append(("answers", format_output(result)))
    rows += _agreement(result)
    if result.output.truncated:
        rows.append(("truncated", f"{result.output.truncated} of {spec.samples} prompts: too long, middle left out"))
    rows += _memory(result)
    if latency.mixed is not None or latency.untimed is not None:
        rows.append(("time", f"not reported: {latency.mixed or latency.untimed}"))
    elif result.diffusion is None:
        prefill = f"prefill {format_seconds(latency.prefill_s)} (compression {format_seconds(latency.compress_s)})"
        rows.append(("time", f"{prefill}, {format_seconds(latency.tpot_s)} per token"))
    if result.diffusion is not None:
        rows += _diffusion(result.diffusion, latency)
    rows += _batch(result)
    rows += [*_lossless(result), *_reuse(result)]
    rows += _effect(result)
    rows.append(("run", str(folder)))
    rows += [("WARNING", f"{x} See kvbench answers {refer_to(folder)}.") for x in list_doubts(result)]
    if result.error:
        idle = result.n_failed == 0  # the method had no effect
        hint = f" Try other settings (kvbench show {result.method.name}), a smaller budget or a longer context."
        rows.append(("FAILED", f"{result.error}{hint if idle else ''}"))
    print_table("", ("", result.status), rows)


def _mode(result: Result) -> str:
    parts = [str(result.mode), VISIBILITIES[result.visibility]]
    if result.mode == "multi-turn":
        parts.append(f"{result.history} history")
    if result.spec.recompress:
        parts.append("recompressed each turn")
    if result.spec.parts is not None:
        parts.append(f"context in parts of {result.spec.parts} tokens")
    if result.task.chat_template_sha is not None:
        parts.append("in the chat template")
    return ", ".join(parts)


def _batch(result: Result) -> list[tuple[str, str]]:
    """How many answers were decoded together, and the tokens that this changed."""
    found = result.batch
    if found is None:
        return []
    text = f"{count(found.size, 'answer')} at a time"
    if found.alone is not None:
        text += f"; one at a time where {found.alone}"
    if found.tokens is not None:
        text += f"; {found.different} of {found.tokens} tokens of the first context differ from one at a time"
    return [("batch", text)]


def _agreement(result: Result) -> list[tuple[str, str]]:
    """Top-1 agreement and KL divergence, and top-1 by distance from the start of the answer."""
    found = result.agreement
    if found is None:
        return []
    rows = [("agreement", f"top-1 {found.top1:.3f}, KL {found.kl:.3g} nats vs full cache, {found.n} tokens")]
    if found.by_distance:
        parts = "  ".join(f"from {x.start}: {x.top1:.3f}" for x in found.by_distance)
        rows.append(("top-1 by answer token", parts))
    return rows


def _memory(result: Result) -> list[tuple[str, str]]:
    """The requested budget, the bytes at the end of the context and of the conversation, spare bytes, and reads.

    The harness's spare bytes are in none of the shares.
    """
    memory = result.memory
    if memory is None:
        return []
    whole = "of the full cache" if reference_width(result) == 1 else "of the full cache in 16 bits"
    tiers = ((memory.host_bytes, "in host memory"), (memory.file_bytes, "in files"))
    host = "".join(f", of which {format_bytes(x)} {where}" for x, where in tiers if x)
    held = memory.stored_bytes + memory.off_device_bytes
    rows = [
        ("budget", "none" if result.spec.budget is None else f"requested {result.spec.budget}"),
        ("stored", f"{format_bytes(held)}{host}: {format_share(stored_share(result))} {whole}"),
    ]
    if memory.end_stored_bytes is not None:
        held = memory.end_stored_bytes + memory.off_device_bytes
        share = format_share(conversation_share(result))
        rows.append(("at end", f"{format_bytes(held)}{host}: {share} {whole}, questions included"))
    spare, peak = format_bytes(memory.spare_bytes), format_bytes(memory.peak_bytes)
    rows.append(("spare", f"{spare} for later tokens (the harness's), peak {peak}"))
    if result.diffusion is None:
        reads = read_share(result)
        part = "" if reads is None else f": {reads:.1%} of the reads {whole}"
        rows.append(("read per step", f"{format_bytes(memory.read_bytes_per_step)}{part}"))
        distinct = memory.distinct_read_bytes_per_step
        if distinct is not None and distinct != memory.read_bytes_per_step:
            rows.append(("distinct", (
                f"{format_bytes(distinct)}: {format_share(distinct_read_share(result))}, entries that several query "
                "heads read counted once"
            )))
    return rows


def _lossless(result: Result) -> list[tuple[str, str]]:
    """Accepted tokens per round, what moved, and the comparison with plain decoding."""
    found = result.lossless
    if found is None:
        return []
    share = "" if found.acceptance is None else f" ({found.acceptance:.1%} of those drafted)"
    moved = f", {format_bytes(round(found.reloaded_bytes_per_token))} reloaded per token"
    speed = "" if found.speedup is None else f"; {found.speedup:.2f} times the speed of plain decoding in this run"
    return [
        ("drafts", (
            f"{found.accepted_per_round:.2f} tokens accepted per round{share}, {found.tokens_per_round:.2f} generated; "
            f"{format_bytes(found.resident_bytes)} resident{moved if found.reloaded_bytes_per_token else ''}"
        )),
        ("verified", f"{found.different} of {found.tokens} tokens differ from plain decoding{speed}"),
    ]


def _reuse(result: Result) -> list[tuple[str, str]]:
    """Shares computed and taken over, bytes moved, and the two clocks."""
    found = result.reuse
    if found is None:
        return []
    rows = [("reuse", (
        f"{found.computed_share:.1%} of a full prefill's tokens times layers computed, {found.reused_share:.1%} taken "
        f"over; chunks of {format_bytes(found.chunk_bytes)}, {format_bytes(found.moved_bytes)} moved; {found.misses} "
        f"built, {found.hits} look-ups found one"
    ))]
    if found.mismatched or found.refused or found.loaded:
        rows.append(("chunks", (
            f"{found.loaded} from files, {found.mismatched} of other owners or damaged, {found.refused} not written"
        )))
    if found.ttft_in_hand_s is not None and result.latency.ttft_s is not None:
        building = "" if found.loaded else f", {result.latency.ttft_s:.2f} s with building them"
        rows.append(("first token", f"{found.ttft_in_hand_s:.2f} s with the chunks in hand{building}"))
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
    kept = f"{effect.entries_kept:,.0f} of {effect.entries_seen:,} {done}"
    return [("effect", f"{found}, {kept}"), *describe_prompt(effect)]


def describe_prompt(effect: EffectResult) -> list[tuple[str, str]]:
    """The share of the prompt's attention that a method with sparse prefill computed, and the mass that it lost."""
    computed, sampled = effect.facts.get("prompt_pairs_computed"), effect.facts.get("sampled_queries")
    if not computed or not sampled:
        return []
    share = computed / (computed + effect.facts["prompt_pairs_skipped"])
    lost = effect.facts["lost_mass_millionths"] / sampled / 1e6
    worst = effect.facts["worst_lost_mass_millionths"] / 1e6
    mass = f"a sample of queries lost {lost:.2%} of their mass on average, {worst:.1%} at most"
    return [("prompt", f"{share:.1%} of its attention computed; {mass}")]


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


def format_output(result: Result) -> str:
    """Mean tokens per answer, and how the answers ended."""
    output = result.output
    answers = sum(output.stop_reasons.values())
    ended = ", ".join(
        f"{output.stop_reasons[x]} {ENDINGS[x]}" for x in ENDINGS if output.stop_reasons.get(x)
    )
    if not answers:
        return "-"
    reference = "" if output.reference_tokens is None else f" (reference {output.reference_tokens:.1f} tokens)"
    return f"{output.tokens / answers:.1f} tokens{reference}; {ended}" if output.tokens else f"{ended}{reference}"


def format_samples(result: Result) -> str:
    """Contexts, and the questions that were asked."""
    contexts = count(result.spec.samples, "context")
    asked = result.n_questions
    if not asked or asked == (result.n_samples - result.n_failed) * result.spec.turns:
        turns = result.spec.turns
        return f"{contexts} x {count(turns, 'question')}"
    return f"{contexts}, {asked} questions in total, at most {result.spec.turns} each"
