"""Summarize the lines of a journal into a result. Nothing here depends on the process that ran the samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, median

from kvbench.kernels.choice import join
from kvbench.log import count
from kvbench.runs.environment import find_environment
from kvbench.runs.job import Job
from kvbench.runs.journal import Agreement, AgreementPart, CacheBytes, Effect, Line, Machine, add_forks, total_facts
from kvbench.runs.results import (
    BaselineResult,
    BatchResult,
    BudgetResult,
    DiffusionResult,
    EffectResult,
    Environment,
    IntervalMethod,
    Kernels,
    Latency,
    LosslessResult,
    MemoryResult,
    MethodResult,
    Output,
    Result,
    ReuseResult,
    Score,
    TurnScore,
)
from kvbench.runs.schema import in_16_bits
from kvbench.runs.spec import RunSpec
from kvbench.runs.stats import INTERVAL, find_interval, quantile
from kvbench.task import Mode, Scorer


def summarize(
    job: Job, lines: Sequence[Line], environment: Environment | None = None, interval: IntervalMethod = INTERVAL
) -> Result:
    """The result of a run whose samples are all in the journal.

    environment: of the run; None: this process, with the machine of the samples if they name one, not several.
    interval: of the score; an earlier method recomputes an earlier result.
    """
    spec = job.spec
    started, seconds = min((x.started for x in lines), default=""), sum(x.seconds for x in lines)
    if environment is None:
        environment = find_environment(
            spec.device, started=started, seconds=seconds, device_map=job.model.device_map
        )
        machines = find_machines(lines)
        if len(machines) == 1:
            environment = environment.model_copy(update=machines[0].model_dump())
    lines = sorted(lines, key=lambda x: (x.index, x.turn))
    failed = {x.index: x.error for x in lines if x.error is not None}
    good = [x for x in lines if x.index not in failed]
    forks = spec.mode is Mode.MULTI_REQUEST
    effect = summarize_effect(job.method.budget_kind.value, good, forks=forks)
    error = _find_error(spec, failed, effect)
    others = {} if failed else {
        x.id: fmean(found) for x in job.task.scorers
        if (found := [line.scores[x.id] for line in good if x.id in line.scores])
    }
    return Result(
        run_id=spec.run_id, status="failed" if error else "ok", error=error, suite=spec.suite, spec=spec,
        model=spec.model,
        method=MethodResult(**spec.method.model_dump(), card=job.method.own_card.model_dump(mode="json")),
        task=spec.task, mode=spec.mode, visibility=spec.visibility, history=spec.history,
        budget=BudgetResult(asked=spec.budget, kind=job.method.budget_kind.value, resolved=job.resolution),
        n_samples=spec.samples, n_scored=len({x.index for x in good if x.score is not None}), n_failed=len(failed),
        n_questions=sum(x.stop_reason is not None for x in good),
        score=score_lines(job.scorer, lines, lambda x: x.score, interval), scores=others, agreement=_agreement(good),
        output=Output(
            tokens=sum(x.tokens.generated for x in good if x.tokens is not None),
            stop_reasons=dict(Counter(x.stop_reason for x in good if x.stop_reason)),
            truncated=sum(bool(x.facts.get("cut_tokens")) for x in good if x.turn == 0),
            reference_tokens=_mean([x.tokens.reference for x in good if x.tokens is not None]),
        ),
        memory=summarize_bytes(good, spec.model.dtype, forks=forks), latency=_latency(good),
        diffusion=_diffusion(job, good), effect=effect, lossless=_lossless(good), reuse=_reuse(good),
        batch=_batch(good), kernels=_kernels(spec.kernels, lines),
        environment=environment.model_copy(update={"started": started, "seconds": seconds}),
    )


def _find_error(spec: RunSpec, failed: Mapping[int, str], effect: EffectResult | None) -> str | None:
    """Why a run failed; None: it did not. failed: the errors of samples."""
    if failed:
        return f"{len(failed)} of {spec.samples} samples failed; the first: {failed[min(failed)]}"
    if effect is not None and effect.n_acted < _required_acted(spec, effect.n):
        return (
            f"{spec.method.name} acted in {effect.n_acted} of {effect.n} samples, and it does not declare these "
            "settings lossless: the run does not measure the method."
        )
    return None


def _required_acted(spec: RunSpec, n: int) -> int:
    """The number of samples, of n, in which a method must have acted: all of them.

    One if a threshold decides on the number of steps: an answer that is finished in the first step skips nothing.
    """
    denoising = spec.generation.denoising
    return n if denoising is None or denoising.threshold is None else min(n, 1)


def _agreement(lines: Sequence[Line]) -> Agreement | None:
    """Means over turns; None if a turn was not compared."""
    found = [x.agreement for x in lines if x.agreement is not None]
    if not found or len(found) < len(lines):
        return None
    parts: dict[int, list[AgreementPart]] = {}
    for part in (part for x in found for part in x.by_distance):
        parts.setdefault(part.start, []).append(part)
    return Agreement(
        top1=fmean(x.top1 for x in found), kl=fmean(x.kl for x in found), n=sum(x.n for x in found),
        by_distance=tuple(
            AgreementPart(
                start=start, top1=fmean(x.top1 for x in some), kl=fmean(x.kl for x in some), n=sum(x.n for x in some)
            )
            for start, some in sorted(parts.items())
        ),
    )


def score_lines(
    scorer: Scorer, lines: Sequence[Line], value: Callable[[Line], float | None], interval: IntervalMethod = INTERVAL
) -> Score:
    """Mean and confidence interval of a metric; None, not zero, if a sample failed."""
    failed = {x.index for x in lines if x.error is not None}
    values: dict[int, dict[int, float]] = {}
    for x in lines:
        got = None if x.index in failed else value(x)
        if got is not None:
            values.setdefault(x.index, {})[x.turn] = got
    clusters = [list(x.values()) for x in values.values()]
    partial = fmean(x for cluster in clusters for x in cluster) if clusters else None
    whole = partial if not failed else None
    turns = range(1 + max((turn for x in values.values() for turn in x), default=-1))
    return Score(
        metric=scorer.metric, higher_is_better=scorer.higher_is_better, mean=whole, partial_mean=partial,
        ci95=find_interval(clusters, interval) if whole is not None else None, interval=interval,
        by_turn=tuple(
            TurnScore(mean=fmean(got) if got else None, n=len(got))
            for got in ([x[turn] for x in values.values() if turn in x] for turn in turns)
        ),
    )


def summarize_effect(kind: str, lines: Sequence[Line], *, forks: bool = False) -> EffectResult | None:
    """The effect check over samples. The method acted in a sample if it acted in any of its turns.

    forks: whether every turn ran on its own fork of the context; otherwise the counters of the last one cover all.
    Settings that are lossless for the context may evict later, if a question or an answer exceeds the budget.
    """
    samples: dict[int, list[Effect]] = {}
    for x in lines:
        if x.effect is not None:
            samples.setdefault(x.index, []).append(x.effect)
    if not samples:
        return None
    bound = [x for x in samples.values() if not all(turn.identity and not turn.acted for turn in x)]
    kept = [x[0].entries_kept for x in samples.values()]
    layers = tuple(fmean(layer) for layer in zip(*kept, strict=True))
    return EffectResult(
        kind=kind, n_acted=sum(any(turn.acted for turn in x) for x in bound), n=len(bound),
        n_identity=len(samples) - len(bound), entries_seen=round(fmean(x[0].entries_seen for x in samples.values())),
        entries_kept=fmean(layers), entries_kept_by_layer=layers,
        facts=total_facts(add_forks(x) if forks else x[-1] for x in samples.values()),
    )


def _diffusion(job: Job, lines: Sequence[Line]) -> DiffusionResult | None:
    """Means over answers, and over the baselines that ran for all of them."""
    asked = job.spec.generation.denoising
    made = [(x.denoising, x.times.decode_s) for x in lines if x.denoising is not None and x.times is not None]
    if asked is None or not made:
        return None
    answers = [x for x, _ in made]
    seconds = sum(x for _, x in made)
    passes, computed = sum(x.nfe for x in answers), sum(x.computed_tokens * x.nfe for x in answers)
    timed = _are_timed(lines)
    baselines = {}
    for name in answers[0].baselines:
        found = [x.baselines[name] for x in answers if name in x.baselines]
        if len(found) < len(answers):
            continue
        scores, took = [x.score for x in found if x.score is not None], sum(x.seconds for x in found)
        baselines[name] = BaselineResult(
            mean=fmean(scores) if scores else None,
            tokens_per_s=sum(x.committed_tokens for x in found) / took if timed else None,
            speedup=took / seconds, nfe=fmean(x.nfe for x in found),
            same_tokens=fmean(x.same_tokens for x in found),
        )
    return DiffusionResult(
        steps=None if asked.threshold is not None else fmean(x.steps or 0 for x in answers),
        block=fmean(x.block for x in answers), response_length=fmean(x.response_length for x in answers),
        remasking=asked.remasking, threshold=asked.threshold, temperature=asked.temperature, nfe=passes / len(answers),
        computed_tokens_per_step=computed / passes,
        computed_share=computed / sum(x.sequence_length * x.nfe for x in answers),
        recomputed_tokens=(computed - sum(x.sequence_length for x in answers)) / len(answers),
        committed_tokens=fmean(x.committed_tokens for x in answers), baselines=baselines,
    )


def summarize_bytes(lines: Sequence[Line], dtype: str, *, forks: bool) -> MemoryResult | None:
    """Means over samples.

    forks: whether every turn ran on its own fork of the context.
    """
    samples: dict[int, list[CacheBytes]] = {}
    tokens: dict[int, int] = {}
    for x in lines:
        if x.bytes is not None and x.tokens is not None:
            samples.setdefault(x.index, []).append(x.bytes)
            tokens[x.index] = x.tokens.context if x.denoising is None else x.denoising.sequence_length
    if not samples:
        return None
    measured = [x for turns in samples.values() for x in turns]
    names = [name for name in CacheBytes.model_fields if all(getattr(x, name) is not None for x in measured)]
    means = {name: _mean_bytes(name, samples.values(), forks=forks) for name in names}
    total = means["stored_bytes"] + means["host_bytes"] + means["file_bytes"]
    full = round(means["full_bytes"])
    return MemoryResult(
        **{name: round(x) for name, x in means.items()},
        ratio=means["stored_bytes"] / means["full_bytes"], ratio_total=total / means["full_bytes"],
        bytes_per_token=means["stored_bytes"] / fmean(tokens.values()), full_16bit_bytes=in_16_bits(full, dtype),
    )


def _mean_bytes(name: str, samples: Iterable[Sequence[CacheBytes]], *, forks: bool) -> float:
    """One field's mean over samples, each with its turns.

    Within a sample, the most of any turn; for fields of a turn's end, of which shares compare two, the last turn's, or
    the mean over forks. Turns without a decode step have no reads.
    """
    found = []
    for turns in samples:
        counts = [getattr(x, name) for x in turns if "read" not in name or x.full_read_bytes_per_step != 0]
        if counts and ("read" in name or name in ("end_stored_bytes", "end_full_bytes")):
            found.append(fmean(counts) if forks else counts[-1])
        elif counts:
            found.append(max(counts))
    return fmean(found) if found else 0


def find_machines(lines: Sequence[Line]) -> list[Machine]:
    """The machines that the samples ran on, each once, in order."""
    return list(dict.fromkeys(x.machine for x in lines if x.machine is not None))


def describe_mixed(machines: Sequence[Machine]) -> str | None:
    """Names the machines if there are several, whose times must not be mixed; None: there is one."""
    names = [
        f"{f'{x.gpu}, ' if x.gpu else ''}{x.cpu} with {count(x.threads, 'thread')}"
        for x in dict.fromkeys(machines)
    ]
    return f"samples ran on {' and on '.join(names)}" if len(names) > 1 else None


def _latency(lines: Sequence[Line]) -> Latency:
    mixed, untimed = describe_mixed(find_machines(lines)), _describe_untimed(lines)
    times = [x.times for x in lines if x.times is not None and mixed is None and untimed is None]
    first = [x for x in times if x.prefill_s is not None]
    per_token = [x.decode_s / x.steps for x in times if x.steps]
    seconds, steps = sum(x.decode_s for x in times), sum(x.steps for x in times)
    return Latency(
        timing="end-to-end",
        prefill_s=_middle([x.prefill_s for x in first if x.prefill_s is not None]),
        compress_s=_middle([x.compress_s for x in first if x.compress_s is not None]),
        ttft_s=_middle([x.ttft_s for x in first]), tpot_s=_middle(per_token),
        tokens_per_s=steps / seconds if steps else None,
        p50=quantile(per_token, 0.5), p95=quantile(per_token, 0.95), n=len(per_token), mixed=mixed,
        untimed=untimed,
    )


def _describe_untimed(lines: Sequence[Line]) -> str | None:
    """Why the times of the samples are not those of a user of the method; None: they are."""
    shared = len({x.index for x in lines if x.shared_prefill})
    if shared:
        return f"{count(shared, 'context')} took a prefill that other runs of the sweep share"
    found = _batch(lines)
    if found is None:
        return None
    if found.size == 1:
        return f"a batch was asked for, but {found.alone or 'only one answer was left to decode'}"
    return f"answers were decoded in batches of up to {found.size}"


def _are_timed(lines: Sequence[Line]) -> bool:
    """Whether the result has times: the samples ran on one machine, one at a time, each with its own prefill."""
    return describe_mixed(find_machines(lines)) is None and _describe_untimed(lines) is None


def _lossless(lines: Sequence[Line]) -> LosslessResult | None:
    """Sums over answers, and their ratios."""
    answers = [(x, x.lossless) for x in lines if x.lossless is not None]
    if not answers:
        return None
    found = [x for _, x in answers]
    rounds, drafted, accepted = (sum(getattr(x, name) for x in found) for name in ("rounds", "drafted", "accepted"))
    tokens = sum(len(x.ids) for x, _ in answers)
    later = max(1, tokens - len(answers))
    seconds = sum(x.times.decode_s for x, _ in answers if x.times is not None) if _are_timed(lines) else 0.0
    stored = {x.index: x.bytes.stored_bytes for x, _ in answers if x.bytes is not None}
    return LosslessResult(
        accepted_per_round=accepted / max(1, rounds), tokens_per_round=(tokens - len(answers)) / max(1, rounds),
        acceptance=accepted / drafted if drafted else None,
        resident_bytes=round(fmean(stored.values())),
        reloaded_bytes_per_token=sum(x.reloaded_bytes for x in found) / later,
        different=sum(x.different for x in found), tokens=tokens,
        speedup=sum(x.plain_s for x in found) / seconds if seconds else None,
    )


def _reuse(lines: Sequence[Line]) -> ReuseResult | None:
    """Sums over samples, their ratios, and medians of times."""
    found = [x.reuse for x in lines if x.reuse is not None]
    if not found:
        return None
    tokens = sum(x.tokens for x in found)
    times = [(x.times.ttft_s, x.reuse.build_s) for x in lines if x.times is not None and x.reuse is not None]
    times = times if _are_timed(lines) else []
    return ReuseResult(
        computed_share=sum(x.computed for x in found) / tokens, reused_share=sum(x.reused for x in found) / tokens,
        hits=sum(x.hits for x in found), misses=sum(x.misses for x in found),
        mismatched=sum(x.mismatched for x in found), refused=sum(x.refused for x in found),
        loaded=sum(x.loaded for x in found), chunk_bytes=round(fmean(x.chunk_bytes for x in found)),
        moved_bytes=round(fmean(x.moved_bytes for x in found)),
        ttft_in_hand_s=_middle([whole - build for whole, build in times]),
        build_s=_middle([build for _, build in times]),
    )


def _batch(lines: Sequence[Line]) -> BatchResult | None:
    found = [x.batch for x in lines if x.batch is not None]
    if not found:
        return None
    compared = [(x.tokens, x.different or 0) for x in found if x.tokens is not None]
    return BatchResult(
        size=max(x.size for x in found), alone=next((x.alone for x in found if x.alone is not None), None),
        tokens=sum(x for x, _ in compared) if compared else None,
        different=sum(x for _, x in compared) if compared else None,
    )


def _mean(values: Sequence[int | None]) -> float | None:
    """None if there are no values, or one of them is None."""
    found = [x for x in values if x is not None]
    return fmean(found) if found and len(found) == len(values) else None


def _middle(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _kernels(implementation: str, lines: Sequence[Line]) -> Kernels:
    ran: dict[str, str] = {}
    for name, found in (x for line in lines for x in line.kernels.items()):
        ran[name] = join(ran.get(name, found), found)
    ops = sorted({x.partition(".")[0] for x in ran})
    return Kernels(implementation=implementation, ops=tuple(ops), ran=dict(sorted(ran.items())))
