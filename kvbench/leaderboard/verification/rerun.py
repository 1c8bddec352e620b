"""Levels L1 and L2: reruns samples of a submission and compares the answers token by token."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterator, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from kvbench.leaderboard.submission.bundle import Bundle
from kvbench.leaderboard.submission.records import Check, RerunResult
from kvbench.leaderboard.verification.answers import LOGPROBS
from kvbench.leaderboard.verification.outcome import flag, ok, refuse
from kvbench.leaderboard.verification.rerun_job import prepare_rerun, rerun_samples
from kvbench.machine import cpu_name
from kvbench.runs.journal import Line

if TYPE_CHECKING:
    from kvbench.hf import Model
    from kvbench.runs.job import Job
    from kvbench.runs.progress import Progress

MIN_AGREEMENT = 0.95
"""Minimum share of equal tokens. Greedy answers of one model rarely differ between processors."""
LOGPROB_TOLERANCE = 0.05
"""Maximum difference of log-probabilities, in nats."""


def draw_samples(samples: int, share: float, seed: int) -> list[int]:
    """Draw a random share of the samples, at least one."""
    return sorted(random.Random(seed).sample(range(samples), math.ceil(share * samples)))


def rerun(
    bundle: Bundle, model: Model, wanted: Collection[int], seed: int, progress: Progress
) -> tuple[RerunResult, list[Check]]:
    """Rerun the drawn samples and compare them with the submitted ones.

    Raises:
        UnverifiableError: it cannot run here.
        RefusedError: the rerun has another spec than the submission.
    """
    job, differs = prepare_rerun(bundle.spec, model)
    submitted = [x for x in bundle.lines if x.index in wanted]
    lines = rerun_samples(job, wanted, progress)
    ours = {(x.index, x.turn): x for x in lines if x.error is None}
    pairs = [(x, ours[x.index, x.turn]) for x in submitted if x.error is None and (x.index, x.turn) in ours]
    agreed = [_count_same(x, y) for x, y in pairs]
    found = RerunResult(
        share=len(wanted) / bundle.spec.samples, seed=seed, samples=len(wanted), answers=len(pairs),
        same_answers=sum(same == n for same, n in agreed), tokens=sum(n for _, n in agreed),
        same_tokens=sum(same for same, _ in agreed), submitted_mean=_mean(submitted), mean=_mean(lines),
        differs=differs, cpu=cpu_name(), gpu=_gpu(job),
    )
    failed = [sum(x.error is not None for x in some) for some in (submitted, lines)]
    return found, [*_check_agreement(found, failed), *_check_stored_bytes(pairs)]


def _count_same(submitted: Line, ours: Line) -> tuple[int, int]:
    """Number of equal tokens and of all tokens; for choices, of log-probabilities within LOGPROB_TOLERANCE."""
    if LOGPROBS in ours.facts:
        both = [[y for x in line.facts[LOGPROBS] for y in x] for line in (submitted, ours)]
        return sum(abs(x - y) <= LOGPROB_TOLERANCE for x, y in zip(*both, strict=True)), len(both[0])
    same = sum(x == y for x, y in zip(submitted.ids, ours.ids, strict=False))
    return same, max(len(submitted.ids), len(ours.ids))


def _check_agreement(found: RerunResult, failed: Sequence[int]) -> Iterator[Check]:
    """Check the share of equal tokens. failed: number of failed samples in the journal, and here."""
    stated = (
        f"{found.samples} samples rerun: {found.same_tokens} of {found.tokens} tokens and {found.same_answers} of "
        f"{found.answers} answers are equal"
    )
    if found.mean is not None and found.submitted_mean is not None:
        stated += f", mean {found.mean:.3f}, {found.submitted_mean:.3f} submitted"
    if found.differs:
        stated += f"; fields that differ here: {', '.join(found.differs)}"
    if failed[0] != failed[1]:
        yield refuse("rerun", f"{failed[1]} samples fail here and {failed[0]} in its journal; {stated}")
    elif found.same_tokens < MIN_AGREEMENT * found.tokens:
        yield refuse("rerun", f"{stated}; at least {MIN_AGREEMENT:.0%} of the tokens must be equal")
    else:
        yield ok("rerun", stated)


def _check_stored_bytes(pairs: Sequence[tuple[Line, Line]]) -> Iterator[Check]:
    """Flag the first sample whose stored bytes differ."""
    for x, y in pairs:
        if x.turn == 0 and x.bytes is not None and y.bytes is not None and x.bytes.stored_bytes != y.bytes.stored_bytes:
            here, there = y.bytes.stored_bytes, x.bytes.stored_bytes
            yield flag("rerun", f"sample {x.index} stores {here} bytes here, {there} in its journal")
            return


def _mean(lines: Sequence[Line]) -> float | None:
    scores = [x.score for x in lines if x.score is not None]
    return fmean(scores) if scores else None


def _gpu(job: Job) -> str | None:
    if job.spec.device != "cuda":
        return None
    import torch

    return str(torch.cuda.get_device_name())
