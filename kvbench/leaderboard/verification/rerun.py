"""Levels L1 and L2: reruns samples of a submission and compares the answers token by token."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence
from itertools import zip_longest
from statistics import fmean
from typing import TYPE_CHECKING

from kvbench.leaderboard.submission.bundle import Bundle
from kvbench.leaderboard.submission.outcome import RefusedError, ok, refuse
from kvbench.leaderboard.submission.records import Check, OtherScore, RerunResult
from kvbench.leaderboard.verification.answers import LOGPROBS
from kvbench.leaderboard.verification.measurements import check_measurements
from kvbench.leaderboard.verification.rerun_job import prepare_rerun, rerun_samples
from kvbench.log import count
from kvbench.machine import cpu_name
from kvbench.runs.journal import Line
from kvbench.runs.results import Score
from kvbench.runs.summary import score_lines

if TYPE_CHECKING:
    from kvbench.hf import Model
    from kvbench.runs.job import Job
    from kvbench.runs.progress import Progress

DIVERGENCE_RATE = 0.02
"""Most divergences per token that honest reruns have. After its first other token an answer is not compared further.

The largest rate between processors: `mini` in bfloat16 between AVX-512 and SSE kernels. Between AVX-512 and AVX2 it is
0.4 %, and in float32 none (scripts/measure_divergence.py, docs/submitting.md).
"""
ALPHA = 0.01
"""Significance of both tests: of the number of divergences, and of the signs of the scores that differ."""
LOGPROB_TOLERANCE = 0.05
"""Maximum difference of log-probabilities, in nats."""


def draw_samples(samples: int, share: float, seed: int) -> list[int]:
    """Draw a random share of the samples, at least one."""
    return sorted(random.Random(seed).sample(range(samples), math.ceil(share * samples)))


def rerun(
    bundle: Bundle, model: Model, wanted: Collection[int], seed: int, progress: Progress
) -> tuple[RerunResult, Score, list[Check]]:
    """Rerun the drawn samples and compare answers and measurements with the submitted ones.

    Also returns the run's score with the rerun's answers in place of the submitted ones.

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
        other_scores=tuple(
            OtherScore(index=x.index, turn=x.turn, score=y.score) for x, y in pairs if x.score != y.score
        ),
        differs=(*differs, *_list_other_parts(bundle, job)), cpu=cpu_name(), gpu=_gpu(job),
    )
    failed = [sum(x.error is not None for x in some) for some in (submitted, lines)]
    sign = 1 if job.scorer.higher_is_better else -1
    checks = [_check_agreement(found, failed, *count_divergences(pairs), _list_score_gains(pairs, sign))]
    try:
        check_measurements(pairs, [same == n for same, n in agreed])
        checks.append(ok("bytes", f"stored bytes of {found.samples} samples equal those of the rerun"))
    except RefusedError as error:
        checks.append(error.check)
    kept = [x for x in bundle.lines if x.index not in wanted]
    merged = sorted([*kept, *lines], key=lambda x: (x.index, x.turn))
    return found, score_lines(job.scorer, merged, lambda x: x.score), checks


def _list_other_parts(bundle: Bundle, job: Job) -> list[str]:
    """Resolved texts that differ here, such as the hash of a trained part and the data that it was trained on."""
    return [
        f"budget.resolved.{name}" for name, value in bundle.result.budget.resolved.items()
        if isinstance(value, str) and value != job.resolution.get(name)
    ]


def _count_same(submitted: Line, ours: Line) -> tuple[int, int]:
    """Number of equal tokens and of all tokens; for choices, of log-probabilities within LOGPROB_TOLERANCE."""
    if LOGPROBS in ours.facts:
        both = [[y for x in line.facts[LOGPROBS] for y in x] for line in (submitted, ours)]
        return sum(abs(x - y) <= LOGPROB_TOLERANCE for x, y in zip(*both, strict=True)), len(both[0])
    same = sum(x == y for x, y in zip(submitted.ids, ours.ids, strict=False))
    return same, max(len(submitted.ids), len(ours.ids))


def count_divergences(pairs: Sequence[tuple[Line, Line]]) -> tuple[int, int]:
    """Number of answers with another token than the rerun, and of tokens up to the first one of each answer."""
    divergences = compared = 0
    for x, y in pairs:
        if LOGPROBS in y.facts:
            same, n = _count_same(x, y)
            divergences, compared = divergences + n - same, compared + n
            continue
        both = zip_longest(x.ids, y.ids)
        first = next((i for i, (one, other) in enumerate(both) if one != other), None)
        divergences += first is not None
        compared += len(y.ids) if first is None else first + 1
    return divergences, compared


def _list_score_gains(pairs: Sequence[tuple[Line, Line]], sign: int) -> list[float]:
    """How much better the submitted score is, for the answers whose scores differ. sign: -1 if lower is better."""
    scores = [(x.score, y.score) for x, y in pairs if x.score is not None and y.score is not None]
    return [sign * (x - y) for x, y in scores if x != y]


def _check_agreement(
    found: RerunResult, failed: Sequence[int], divergences: int, compared: int, gains: Sequence[float]
) -> Check:
    """Check how often answers diverge, and that those that do are not better.

    failed: number of failed samples in the journal, and here. gains: in score, where it differs.
    """
    better = sum(x > 0 for x in gains)
    p_value = sum(math.comb(len(gains), k) for k in range(better, len(gains) + 1)) / 2 ** len(gains)
    stated = (
        f"{count(found.samples, 'sample')} rerun: {found.same_tokens} of {found.tokens} tokens "
        f"and {found.same_answers} of {found.answers} answers are equal"
    )
    if found.mean is not None and found.submitted_mean is not None:
        stated += f", mean {found.mean:.3f}, {found.submitted_mean:.3f} submitted"
    if found.differs:
        stated += f"; fields that differ here: {', '.join(found.differs)}"
    if failed[0] != failed[1]:
        fail = "sample fails" if failed[1] == 1 else "samples fail"
        return refuse("rerun", f"{failed[1]} {fail} here, and {failed[0]} in its journal; {stated}")
    if divergences and (chance := _find_chance(divergences, compared)) < ALPHA:
        return refuse(
            "rerun", f"{stated}; {divergences} divergences in {compared} tokens, which honest reruns have with "
            f"probability {chance:.1g}",
        )
    if p_value < ALPHA:
        return refuse("rerun", f"{stated}; {better} of {len(gains)} scores that differ are better than here")
    return ok("rerun", stated)


def _find_chance(divergences: int, compared: int) -> float:
    """Probability of at least this many divergences, if each token diverges with DIVERGENCE_RATE."""
    from scipy.stats import binom  # type: ignore[import-untyped]  # slow to import

    return float(binom.sf(divergences - 1, compared, DIVERGENCE_RATE))


def _mean(lines: Sequence[Line]) -> float | None:
    scores = [x.score for x in lines if x.score is not None]
    return fmean(scores) if scores else None


def _gpu(job: Job) -> str | None:
    if job.spec.device != "cuda":
        return None
    import torch

    return str(torch.cuda.get_device_name())
