"""Level L3: runs the spec on new examples under a secret seed, and compares the mean with the submitted one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvbench.leaderboard.submission.bundle import Bundle
from kvbench.leaderboard.submission.records import Check, FreshSeedResult
from kvbench.leaderboard.verification.lookup import UnverifiableError
from kvbench.leaderboard.verification.outcome import RefusedError, ok, quote, refuse
from kvbench.leaderboard.verification.rerun_job import prepare_rerun, rerun_samples
from kvbench.runs.examples import make_examples
from kvbench.runs.journal import Line
from kvbench.runs.summary import score_lines

if TYPE_CHECKING:
    from kvbench.hf import Model
    from kvbench.runs.progress import Progress

ALPHA = 0.01
"""Significance level: a fresh mean that is worse with a smaller p-value refutes the submitted one."""
RESAMPLES = 9_999
BATCH = 100


def run_fresh_seed(bundle: Bundle, model: Model, secret: str, progress: Progress) -> tuple[FreshSeedResult, Check]:
    """Run as many samples under a seed derived from the secret, and compare the means.

    Raises:
        UnverifiableError: it cannot run here, or the task has the same examples under every seed.
        RefusedError: the run differs from the submission, its samples fail, or its mean is significantly worse.
    """
    score = bundle.result.score
    if score.mean is None or score.ci95 is None:
        raise UnverifiableError("it has no score with an interval to compare with")
    seed = int.from_bytes(hashlib.sha256(secret.encode()).digest()[:4]) >> 1
    job, _ = prepare_rerun(bundle.spec, model, seed)
    _, _, encoded = next(make_examples(job, [0]))
    if encoded.prompt_hash == next(x.prompt_hash for x in bundle.lines if x.index == 0):
        raise UnverifiableError(f"the examples of {bundle.spec.task.name} are the same under every seed")
    lines = rerun_samples(job, range(bundle.spec.samples), progress)
    fresh = score_lines(job.scorer, lines, lambda x: x.score)
    if fresh.mean is None:
        failed = next(x.error for x in lines if x.error is not None)
        raise RefusedError("hidden", f"samples fail under a fresh seed: {quote(failed)}")
    if fresh.ci95 is None:
        raise UnverifiableError("its answers under a fresh seed do not vary, so their score has no interval")
    sign = 1 if score.higher_is_better else -1
    p_value = _permutation_p(*([sign * x for x in _context_means(some)] for some in (bundle.lines, lines)))
    found = FreshSeedResult(
        samples=bundle.spec.samples, submitted_mean=score.mean, submitted_ci95=score.ci95, mean=fresh.mean,
        ci95=fresh.ci95, p_value=p_value,
    )
    stated = f"{score.mean:.3f} submitted, {fresh.mean:.3f} under a fresh seed (p = {p_value:.3f})"
    if p_value < ALPHA:
        return found, refuse("hidden", f"{stated}: the score does not hold on new examples")
    return found, ok("hidden", stated)


def _context_means(lines: Sequence[Line]) -> list[float]:
    """Mean score of each context, because the turns of one context are not independent."""
    found: dict[int, list[float]] = {}
    for x in lines:
        if x.score is not None:
            found.setdefault(x.index, []).append(x.score)
    return [fmean(x) for x in found.values()]


def _permutation_p(submitted: Sequence[float], fresh: Sequence[float]) -> float:
    """One-sided p-value of a permutation test over contexts, for a fresh mean this much worse."""
    from scipy.stats import permutation_test  # type: ignore[import-untyped]  # slow to import

    def differ(x: NDArray[np.float64], y: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
        return np.asarray(x.mean(axis=axis) - y.mean(axis=axis))

    found = permutation_test(
        (submitted, fresh), differ, vectorized=True, n_resamples=RESAMPLES, batch=BATCH, alternative="greater",
        random_state=0,
    )
    return float(found.pvalue)
