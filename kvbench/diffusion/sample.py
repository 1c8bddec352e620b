"""One sample on a diffusion model: the answer of every turn by the policy and by baselines without a cache.

Every forward pass runs the whole conversation so far, so there is no prefill, and turns share no cache. The baselines
run in the same job, turn by turn: no cache with the same settings, and, because half as many denoising steps are the
real alternative to a cache that doubles the speed, no cache with half of the steps. The order rotates from turn to
turn, so first-run costs (memory allocation, CPU caches) do not always fall on the policy.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import ClassVar, cast

from kvbench.budget import BudgetKind
from kvbench.diffusion.policy import Denoised, Policy, denoise
from kvbench.diffusion.sampling import Sampling, plan_sampling
from kvbench.engine.timing import now, rotate
from kvbench.errors import UserError
from kvbench.method import Card
from kvbench.runs.job import Job, cap_new_tokens
from kvbench.runs.journal import BaselineLine, CacheBytes, DenoisingLine, Effect, Line, Times, TokenCounts
from kvbench.runs.lines import SampleFailedError, fail, score_answer, stop_if_lost, turn_facts
from kvbench.task import Encoded, Example, Turn


@dataclass(frozen=True)
class Uncached(Policy):
    """No cache, for the baselines of a run. Users select the method `none`."""

    card: ClassVar[Card] = Card(
        name="uncached-reference", title="No cache", models="diffusion",
        idea="Computes every token in every pass. Exact.", arxiv=None, year=None, family="diffusion",
        stages=(), budget=BudgetKind.NONE, heads="independent", upstream=None,
    )
    prefixed: ClassVar[bool] = True


def plan_turn(job: Job, turn: Turn) -> tuple[int, Sampling]:
    """Length of a turn's response block and its sampling settings.

    Raises:
        UserError: the turn has choices, or the settings do not fit the answer or the method, or the method the model.
    """
    if turn.choices:
        raise UserError(
            f"{job.spec.task.name} compares choices by log-probability, which a diffusion model does not have. "
            "Use an autoregressive model."
        )
    asked, policy = job.spec.generation.denoising, cast("Policy", job.method)
    assert asked is not None, "runs of diffusion models have these settings"
    policy.check_model(job.model)
    length, sampling = plan_sampling(asked, cap_new_tokens(turn.max_new_tokens, job.spec.generation))
    policy.check(sampling, length)
    return length, sampling


def fill_sample(job: Job, index: int, example: Example, encoded: Encoded) -> list[Line]:
    """Run one sample and return its journal lines.

    Raises:
        SampleFailedError: a turn raised an error.
        DeviceLostError: it made the GPU unusable.
    """
    lines: list[Line] = []
    started = datetime.now(UTC).isoformat(timespec="seconds")
    for number in range(len(example.turns)):
        wall = time.perf_counter()
        try:
            line = _run_turn(job, index, example, encoded, lines, started)
        except Exception as error:
            stop_if_lost(job, f"sample {index}", error)
            seconds = time.perf_counter() - wall
            lines.append(fail(example, index, number, error, encoded.prompt_hash, started, seconds))
            raise SampleFailedError(lines) from error
        lines.append(line.model_copy(update={"seconds": time.perf_counter() - wall}))
    return lines


def _run_turn(
    job: Job, index: int, example: Example, encoded: Encoded, earlier: list[Line], started: str
) -> Line:
    """Run the turn after `earlier`."""
    model, spec, number = job.model, job.spec, len(earlier)
    turn = example.turns[number]
    length, sampling = plan_turn(job, turn)
    prompt, limit = _prompt(job, encoded, earlier), cap_new_tokens(turn.max_new_tokens, spec.generation)
    made = _denoise_all(job, index, number, prompt, length, sampling)
    answers = {name: _cut(x.ids[0][:limit], job.stop_ids) for name, (x, _) in made.items()}
    texts = {name: _read(job, ids) for name, ids in answers.items()}
    scores = {name: score_answer(job, example, number, text, {}) for name, text in texts.items()}
    answer, (ours, seconds) = answers["method"], made["method"]
    facts = Counter(ours.facts)  # accumulated over the conversation, as in stores
    if earlier and (before := earlier[-1].effect) is not None:
        facts.update(before.facts)
    shape = model.shape(ours.sequence_length)
    return Line(
        sample=example.id, index=index, turn=number, turns=len(example.turns), prompt_hash=encoded.prompt_hash,
        prediction=texts["method"], ids=tuple(answer), question=turn.question, references=tuple(turn.references),
        score=scores["method"].get(job.scorer.id), scores=scores["method"],
        tokens=TokenCounts(
            context=len(prompt), query=0, generated=len(answer), reference=len(encoded.turns[number].answer)
        ),
        stop_reason="stop" if answer and answer[-1] in job.stop_ids else "length",
        times=Times(prefill_s=None, compress_s=None, ttft_s=seconds, decode_s=seconds, steps=len(answer)),
        bytes=count_bytes(ours, shape.full_bytes),
        effect=Effect(
            acted=any(ours.facts.values()), identity=job.method.identity(shape), entries_seen=ours.sequence_length,
            entries_kept=(ours.computed_tokens,), facts=dict(facts), maxima=(),
        ),
        agreement=None,
        denoising=DenoisingLine(
            response_length=length, steps=None if sampling.threshold is not None else sampling.steps,
            block=sampling.block, nfe=ours.nfe, computed_tokens=ours.computed_tokens,
            sequence_length=ours.sequence_length, committed_tokens=len(answer),
            baselines={
                name: BaselineLine(
                    score=scores[name].get(job.scorer.id), seconds=took, nfe=plain.nfe,
                    committed_tokens=len(answers[name]), same_tokens=_likeness(answer, answers[name], job.stop_ids),
                )
                for name, (plain, took) in made.items() if name != "method"
            },
        ),
        facts=turn_facts(example, number), started=started, seconds=0.0, error=None,
    )


def count_bytes(made: Denoised, full_bytes: int) -> CacheBytes:
    """Bytes of the cache of an answer. full_bytes: of the full cache of prompt and response block."""
    return CacheBytes(
        full_bytes=full_bytes, stored_bytes=made.peak_bytes, spare_bytes=0, host_bytes=0, end_bytes=made.peak_bytes,
        peak_bytes=made.peak_bytes, read_bytes_per_step=round(made.read_bytes / made.nfe),
    )


def _prompt(job: Job, encoded: Encoded, earlier: list[Line]) -> list[int]:
    """Context, questions and earlier answers: the reference answers, or the model's own without stop tokens."""
    ids = [*encoded.context, *encoded.turns[0].first]
    for line, turn, following in zip(earlier, encoded.turns, encoded.turns[1:], strict=False):
        ids += [x for x in line.ids if x not in job.stop_ids] if job.spec.history == "own" else turn.answer
        ids += following.later
    return ids


def _denoise_all(
    job: Job, index: int, number: int, prompt: list[int], length: int, sampling: Sampling
) -> dict[str, tuple[Denoised, float]]:
    """Answer and seconds of the method, of no cache, and of no cache with half of the steps where that is possible."""
    ways: list[tuple[str, Policy, Sampling]] = [
        ("method", cast("Policy", job.method), sampling), ("none", Uncached(), sampling)
    ]
    if (half := sampling.halved(length)) is not None:
        ways.append(("half-steps", Uncached(), half))
    seed = random.Random(f"{job.spec.seed}/{index}/{number}").getrandbits(63)
    banned = sorted(job.stop_ids) if job.task.nonempty else ()
    made = {}
    for name, method, how in rotate(ways, index + number):
        before = now(job.model.device)
        found = denoise(job.model, method, prompt, length, how, seed, never_first=banned)
        made[name] = found, now(job.model.device) - before
    return {name: made[name] for name, _, _ in ways}


def _read(job: Job, ids: list[int]) -> str:
    """Decode an answer to text."""
    text = job.model.tokenizer.decode([x for x in ids if x not in job.stop_ids], skip_special_tokens=True)
    return str(text)


def _likeness(ids: list[int], others: list[int], stop: frozenset[int]) -> float:
    """Share of the longer answer's positions with the same token, stop tokens excluded; 1 for two empty answers.

    Padding after the stop token does not count: it is equal for all answers.
    """
    ours, theirs = ([x for x in answer if x not in stop] for answer in (ids, others))
    longer = max(len(ours), len(theirs))
    return sum(a == b for a, b in zip(ours, theirs, strict=False)) / longer if longer else 1.0


def _cut(ids: list[int], stop: frozenset[int]) -> list[int]:
    """An answer up to and including its first stop token."""
    for i, x in enumerate(ids):
        if x in stop:
            return ids[: i + 1]
    return ids
