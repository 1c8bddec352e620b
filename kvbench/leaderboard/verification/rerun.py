"""Levels L1 and L2: samples of a submission run again under the verifier's hands, token against token."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterator, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from kvbench.leaderboard.submission.bundle import Bundle
from kvbench.leaderboard.submission.records import Check, Rerun
from kvbench.leaderboard.verification.answers import LOGPROBS
from kvbench.leaderboard.verification.outcome import flag, ok, refuse
from kvbench.leaderboard.verification.runnable import prepare_again, run_again
from kvbench.machine import cpu_name
from kvbench.runs.journal import Line

if TYPE_CHECKING:
    from kvbench.hf import Model
    from kvbench.runs.job import Job
    from kvbench.runs.runner import Progress

LEAST_AGREEMENT = 0.95
"""Share of tokens that must be the same: greedy answers of one model differ between processors, and seldom."""
NEAR = 0.05
"""Nats that a log-probability may be away."""


def draw(samples: int, share: float, seed: int) -> list[int]:
    """A random share of so many samples, one at least."""
    return sorted(random.Random(seed).sample(range(samples), math.ceil(share * samples)))


def rerun(
    bundle: Bundle, model: Model, wanted: Collection[int], seed: int, progress: Progress
) -> tuple[Rerun, list[Check]]:
    """Run samples again, which this seed drew.

    Raises:
        StrangerError: it cannot be run here.
        RefusedError: it is another run here.
    """
    job, differs = prepare_again(bundle.spec, model)
    submitted = [x for x in bundle.lines if x.index in wanted]
    lines = run_again(job, wanted, progress)
    ours = {(x.index, x.turn): x for x in lines if x.error is None}
    pairs = [(x, ours[x.index, x.turn]) for x in submitted if x.error is None and (x.index, x.turn) in ours]
    agreed = [_agree(x, y) for x, y in pairs]
    found = Rerun(
        share=len(wanted) / bundle.spec.samples, seed=seed, samples=len(wanted), answers=len(pairs),
        same_answers=sum(same == n for same, n in agreed), tokens=sum(n for _, n in agreed),
        same_tokens=sum(same for same, _ in agreed), submitted_mean=_mean(submitted), mean=_mean(lines),
        differs=differs, cpu=cpu_name(), gpu=_gpu(job),
    )
    failed = [sum(x.error is not None for x in some) for some in (submitted, lines)]
    return found, [*_judge(found, failed), *_weigh(pairs)]


def _agree(submitted: Line, ours: Line) -> tuple[int, int]:
    """Tokens that are the same, of how many; where choices were weighed, log-probabilities that are near."""
    if LOGPROBS in ours.facts:
        both = [[y for x in line.facts[LOGPROBS] for y in x] for line in (submitted, ours)]
        return sum(abs(x - y) <= NEAR for x, y in zip(*both, strict=True)), len(both[0])
    same = sum(x == y for x, y in zip(submitted.ids, ours.ids, strict=False))
    return same, max(len(submitted.ids), len(ours.ids))


def _judge(found: Rerun, failed: Sequence[int]) -> Iterator[Check]:
    """failed: samples in the journal, and here."""
    said = (
        f"{found.samples} samples run again: {found.same_tokens} of {found.tokens} tokens and {found.same_answers} of "
        f"{found.answers} answers are the same"
    )
    if found.mean is not None and found.submitted_mean is not None:
        said += f", mean {found.mean:.3f} for {found.submitted_mean:.3f}"
    if found.differs:
        said += f"; not the same here: {', '.join(found.differs)}"
    if failed[0] != failed[1]:
        yield refuse("rerun", f"{failed[1]} samples fail here and {failed[0]} in its journal; {said}")
    elif found.same_tokens < LEAST_AGREEMENT * found.tokens:
        yield refuse("rerun", f"{said}; at least {LEAST_AGREEMENT:.0%} of the tokens must be")
    else:
        yield ok("rerun", said)


def _weigh(pairs: Sequence[tuple[Line, Line]]) -> Iterator[Check]:
    """The first sample that does not hold as much here."""
    for x, y in pairs:
        if x.turn == 0 and x.bytes is not None and y.bytes is not None and x.bytes.stored_bytes != y.bytes.stored_bytes:
            here, there = y.bytes.stored_bytes, x.bytes.stored_bytes
            yield flag("rerun", f"sample {x.index} holds {here} bytes here, {there} in its journal")
            return


def _mean(lines: Sequence[Line]) -> float | None:
    scores = [x.score for x in lines if x.score is not None]
    return fmean(scores) if scores else None


def _gpu(job: Job) -> str | None:
    if job.spec.device != "cuda":
        return None
    import torch

    return str(torch.cuda.get_device_name())
