"""Checks that the numbers of a journal can have been measured together. Needs no method, task or model.

Every rule holds by the way in which kvbench measures, so it has no tolerance other than that of rounding.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence

from kvbench.engine.agreement import FIRST_PART
from kvbench.leaderboard.submission.outcome import RefusedError, ok, quote
from kvbench.leaderboard.submission.records import Check
from kvbench.leaderboard.verification.journal import ADDED
from kvbench.leaderboard.verification.reuse import LEAST_PASS_S, list_wrong_reuse
from kvbench.registry import list_ops
from kvbench.runs.journal import (
    Agreement,
    AgreementPart,
    CacheBytes,
    DenoisingLine,
    Effect,
    Line,
    LosslessLine,
    Times,
    TokenCounts,
)
from kvbench.runs.spec import RunSpec

ROUNDING = 1e-6
ALONE = re.compile(r"[a-z0-9.+-]+ generates answers in its own way|a batch raised an error")
"""Why answers are decoded one at a time in a run with `--batch`."""
PREFIX = "prefix_entries"
"""The counter of a method of family reuse that puts entries before a prompt, and takes over none of its parts."""
SDPA = ("sdpa_flash", "sdpa_math")
WITHIN = {"torch": SDPA, "triton": SDPA, "flash": (*SDPA, "flash_attn")}
"""Kernels among which an implementation chooses, recorded by function."""
KERNEL = re.compile(r"[a-z0-9][a-z0-9_.+-]{0,63}")


def check_plausibility(spec: RunSpec, lines: Sequence[Line]) -> Check:
    """Check that bytes, times, counters and agreement of every line are possible.

    Raises:
        RefusedError: they are not; the reason states the numbers.
    """
    for x in lines:
        for reason in _list_impossible(spec, x):
            raise RefusedError("measurements", f"sample {x.index} turn {x.turn}: {reason}")
    together = any((x.index, x.turn) == (0, 0) and x.batch is not None and x.batch.size > 1 for x in lines)
    compared = any(x.batch is not None and x.batch.tokens is not None for x in lines)
    if together and spec.model.dtype != "float32" and not compared:
        raise RefusedError("measurements", f"no comparison with single answers, in {spec.model.dtype}")
    times = [x.times.decode_s for x in lines if x.times is not None and x.times.steps]
    if len(times) >= 4 and 2 * len(set(times)) < len(times):
        raise RefusedError("measurements", f"{len(times)} measured times are only {len(set(times))} different numbers")
    return ok("measurements", f"bytes, times, counters and agreement of {len(lines)} lines are possible")


def _list_impossible(spec: RunSpec, x: Line) -> Iterator[str]:
    if x.tokens is None or x.bytes is None or x.effect is None:
        return  # a failed sample; `check_answers` refuses any other line without them
    if (x.times is None) is not (x.shared_prefill or x.batch is not None):
        yield "a line has times unless its sample took the prefill of another run or was decoded in a batch"
    yield from _list_wrong_bytes(x.bytes, x.times, recompress=spec.recompress)
    yield from _list_wrong_kernels(spec, x)
    yield from _list_wrong_batch(spec, x)
    if x.lossless is not None:
        yield from _list_wrong_drafts(spec, x, x.lossless, x.tokens)
    elif spec.method.family == "lossless" and x.stop_reason != "choice":
        yield "no record of drafts, and a method that drafts"
    reuses = spec.method.family == "reuse" and x.turn == 0 and not x.effect.facts.get(PREFIX)
    if (x.reuse is not None) is not reuses:
        yield f"{'no' if x.reuse is None else 'a'} record of reuse in a run of family {spec.method.family}"
    elif x.reuse is not None:
        yield from list_wrong_reuse(x.reuse, x.tokens, x.effect, x.times, x.bytes)
    yield from _list_wrong_counters(x.effect)
    if x.agreement is not None:
        yield from _list_wrong_agreement(x.agreement)
    if (x.denoising is None) is (spec.model.kind == "diffusion"):
        yield f"a {spec.model.kind} model, and {'no' if x.denoising is None else 'a'} record of denoising steps"
    elif x.times is None:
        return
    elif x.denoising is None:
        yield from _list_wrong_times(x, x.times, x.tokens)
    else:
        yield from _list_wrong_denoising(x, x.denoising, x.tokens, x.times, x.bytes, x.effect)


def _list_wrong_bytes(found: CacheBytes, times: Times | None, *, recompress: bool) -> Iterator[str]:
    """The peak is a maximum that includes the end of the context and the end of the turn."""
    after = found.stored_bytes + found.spare_bytes
    for when, size in (("context", after), ("turn", found.end_bytes)):
        if found.peak_bytes < size:
            yield f"its peak of {found.peak_bytes} bytes is below the {size} that it had at the end of the {when}"
    if found.end_bytes < found.stored_bytes and not recompress:
        yield f"it ends with {found.end_bytes} bytes, fewer than the {found.stored_bytes} that it stores of the context"
    if times is not None and times.steps and not found.read_bytes_per_step and found.stored_bytes:
        yield f"it reads no bytes in {times.steps} decode steps"
    fetched = (found.host_read_bytes_per_step or 0) + (found.file_read_bytes_per_step or 0)
    if fetched > (found.read_bytes_per_step if found.off_device_bytes else 0):
        yield f"it fetches {fetched} bytes per step of {found.off_device_bytes} that are off the device"


def _list_wrong_kernels(spec: RunSpec, x: Line) -> Iterator[str]:
    """Operations run as the spec says, or in plain PyTorch where they have no such implementation."""
    for label, implementation in x.kernels.items():
        if not KERNEL.fullmatch(label) or not KERNEL.fullmatch(implementation):
            yield f"its kernels name {quote(implementation)} for {quote(label)}, which is no name of a kernel"
        elif label.partition(".")[0] not in list_ops():
            yield f"its kernels name {quote(label)}, which is no operation of kvbench"
        elif not {spec.kernels, "torch", *(WITHIN[spec.kernels] if "." in label else ())}.issuperset(
            implementation.split("+")
        ):
            yield f"{label} ran as {implementation}, and its kernels are {spec.kernels}"


def _list_wrong_batch(spec: RunSpec, x: Line) -> Iterator[str]:
    """In 16 bits a first answer is decoded alone, too, and compared."""
    found = x.batch
    if (found is None) is (spec.batch > 1):
        yield f"{'no' if found is None else 'a'} record of a batch, and batches of {spec.batch}"
    if found is None:
        return
    if not 1 <= found.size <= spec.batch:
        yield f"a batch of {found.size} answers, where at most {spec.batch} are decoded together"
    if found.alone is not None and (found.size > 1 or not ALONE.fullmatch(found.alone)):
        yield f"its {found.size} answers were decoded one at a time because {quote(found.alone)}"
    if (found.different or 0) > (found.tokens or 0):
        yield f"{found.different} of {found.tokens} tokens differ from those of single answers"
    if found.tokens is not None and spec.model.dtype == "float32":
        yield f"a comparison with single answers, in {spec.model.dtype}"


def _list_wrong_drafts(spec: RunSpec, x: Line, found: LosslessLine, tokens: TokenCounts) -> Iterator[str]:
    """A round gives the accepted tokens and one more; the first token comes from the prompt.

    Plain decoding is a part of the turn, and as fast as a forward pass per token at most.
    """
    if spec.method.family != "lossless":
        yield f"a record of drafts, and a method of family {spec.method.family}"
    if found.accepted > found.drafted or found.different > 2 * tokens.generated:
        yield f"{found.accepted} of {found.drafted} drafted tokens accepted, {found.different} different"
    if tokens.generated != 1 + found.rounds + found.accepted:
        yield f"{found.rounds} rounds with {found.accepted} accepted tokens do not give {tokens.generated} tokens"
    most = spec.method.settings.get("draft_length")
    if isinstance(most, int) and found.drafted > found.rounds * most:
        yield f"{found.rounds} rounds of at most {most} drafted tokens have {found.drafted}"
    if found.reloaded_bytes and x.bytes is not None and not x.bytes.off_device_bytes:
        yield f"it reloads {found.reloaded_bytes} bytes from a host that stores nothing"
    rest = x.seconds - (0.0 if x.times is None else x.times.ttft_s + x.times.decode_s)
    if not tokens.generated * LEAST_PASS_S <= found.plain_s <= rest + ROUNDING:
        yield f"plain decoding of {tokens.generated} tokens took {found.plain_s:g} s of {rest:g} s that are left"


def _list_wrong_counters(found: Effect) -> Iterator[str]:
    least = min(found.facts.values(), default=0)
    if least < 0:
        yield f"a counter of {least} entries"
    if max(found.entries_kept, default=0.0) > found.entries_seen:
        yield f"it keeps {max(found.entries_kept):g} entries of {found.entries_seen}"
    if found.acted and not any(value for name, value in found.facts.items() if name not in found.maxima):
        yield "the method acted, but no counter is above 0"


def _list_wrong_agreement(found: Agreement) -> Iterator[str]:
    parts: tuple[Agreement | AgreementPart, ...] = (found, *found.by_distance)
    for x in parts:
        share = x.top1 * x.n
        if not 0 <= x.top1 <= 1 or abs(share - round(share)) > ROUNDING * max(1, x.n):
            yield f"a top-1 agreement of {x.top1:g} is not a share of {x.n} positions"
        if x.kl < -ROUNDING or x.n < 1:
            yield f"a KL divergence of {x.kl:g} over {x.n} positions"
    if (found.n >= FIRST_PART) is not bool(found.by_distance):
        yield f"its agreement over {found.n} positions has {len(found.by_distance)} parts by distance"
    if found.by_distance:
        starts = [x.start for x in found.by_distance]
        if starts[0] or starts != sorted(set(starts)) or sum(x.n for x in found.by_distance) != found.n:
            yield f"its agreement by distance does not cover its {found.n} positions once each"
        for name in ("top1", "kl"):
            mean = sum(getattr(x, name) * x.n for x in found.by_distance) / found.n
            if abs(mean - getattr(found, name)) > ROUNDING * max(1.0, mean):
                yield f"its agreement by distance has a mean {name} of {mean:g}, not {getattr(found, name):g}"


def _list_wrong_times(x: Line, found: Times, tokens: TokenCounts) -> Iterator[str]:
    prefill, compress = found.prefill_s, found.compress_s
    if (prefill is None, compress is None) != ((True, True) if x.turn else (False, False)):
        yield "the context is timed on the first turn and on no other"
    if found.steps != (0 if x.stop_reason == "choice" else max(0, tokens.generated - 1)):
        yield f"{found.steps} decode steps do not give {tokens.generated} tokens"
    if prefill is not None and compress is not None and compress > prefill:
        yield f"its compression took {compress:g} s of a prefill of {prefill:g} s"
    if not LEAST_PASS_S <= (found.ttft_s if prefill is None else prefill) <= found.ttft_s + ROUNDING:
        yield f"its first token came after {found.ttft_s:g} s, its prefill took {prefill or 0:g} s"
    if found.decode_s < found.steps * LEAST_PASS_S:
        yield f"{found.steps} decode steps in {found.decode_s:g} s are faster than any machine"
    if (least := found.ttft_s + found.decode_s) > x.seconds + ROUNDING:
        yield f"its turn took {x.seconds:g} s, first token and decode steps {least:g} s"


def _list_wrong_denoising(
    x: Line, found: DenoisingLine, tokens: TokenCounts, times: Times, size: CacheBytes, effect: Effect
) -> Iterator[str]:
    if found.sequence_length != tokens.context + found.response_length:
        yield f"{tokens.context} prompt and {found.response_length} response tokens are not {found.sequence_length}"
    if not times.steps == tokens.generated == found.committed_tokens <= found.response_length:
        yield f"{found.committed_tokens} committed tokens do not fit {tokens.generated} generated ones"
    if not 0 < found.computed_tokens <= found.sequence_length + ROUNDING:
        yield f"it computes {found.computed_tokens:g} of {found.sequence_length} tokens per step"
    if effect.entries_seen != found.sequence_length or effect.entries_kept != (found.computed_tokens,):
        yield f"its effect check counts {effect.entries_kept} of {effect.entries_seen} tokens"
    most = found.response_length + math.ceil(found.response_length / max(1, found.block))
    if not 1 <= found.nfe <= most:  # a pass commits a token, but for one at the beginning of a block
        yield f"{found.nfe} forward passes for {found.response_length} response tokens"
    if found.steps is not None:
        yield from _list_wrong_passes(found, found.steps, effect.facts)
    skipped = effect.facts.get("tokens_skipped", 0)
    if x.turn == 0 and abs(skipped - _count_skipped(found)) > 1:
        yield f"it counts {skipped} tokens as skipped, its passes {_count_skipped(found):.0f}"
    if any(getattr(size, name) is not None for name in ADDED):
        yield "bytes at the end of a conversation, and a diffusion model keeps no cache between answers"
    if (size.spare_bytes, size.host_bytes) != (0, 0) or not size.stored_bytes == size.end_bytes == size.peak_bytes:
        yield "its stored bytes are not its peak, as for every diffusion run"
    timed = [("the answer", times.decode_s, found.nfe)]
    for name, plain in found.baselines.items():
        timed.append((f"baseline {name}", plain.seconds, plain.nfe))
        if not 0 <= plain.same_tokens <= 1 or not 0 <= plain.committed_tokens <= found.response_length:
            yield f"baseline {name} has a share of {plain.same_tokens:g} equal tokens of {plain.committed_tokens}"
        if (plain.score is None) is not (x.score is None):
            yield f"its score is {x.score}, that of baseline {name} {plain.score}"
    for name, seconds, passes in timed:
        if passes < 1 or seconds < passes * LEAST_PASS_S:
            yield f"{passes} forward passes of {name} in {seconds:g} s are faster than any machine"
    if (times.prefill_s, times.compress_s) != (None, None) or times.ttft_s != times.decode_s:
        yield "a diffusion model has no prefill and one time per answer"
    if (least := sum(seconds for _, seconds, _ in timed)) > x.seconds + ROUNDING:
        yield f"its turn took {x.seconds:g} s, its answers {least:g} s"


def _list_wrong_passes(found: DenoisingLine, steps: int, facts: Mapping[str, int]) -> Iterator[str]:
    """The schedule commits an equal share of a block per pass, and the policy may commit some tokens early."""
    blocks = math.ceil(found.response_length / max(1, found.block))
    share = math.ceil(found.block / max(1, steps // blocks))
    if found.nfe * share + facts.get("tokens_early", 0) < found.response_length:
        yield f"{found.nfe} forward passes of {share} tokens do not give {found.response_length}, few of them early"
    for name, plain in found.baselines.items():
        least = found.response_length / (2 * share if name == "half-steps" else share)
        if not math.floor(least) <= plain.nfe <= steps:
            yield f"baseline {name} took {plain.nfe} forward passes for {found.response_length} tokens in {steps} steps"


def _count_skipped(found: DenoisingLine) -> float:
    """Tokens that the passes of the first answer did not compute."""
    return found.nfe * (found.sequence_length - found.computed_tokens)
