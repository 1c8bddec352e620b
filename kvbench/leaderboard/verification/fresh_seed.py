"""Level L3: runs the spec on new examples under a secret seed, and compares the mean with the submitted one.

It runs as many contexts as it takes to refute a wholly false answer sheet: one whose method gets everything wrong.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvbench.leaderboard.submission.bundle import Bundle
from kvbench.leaderboard.submission.outcome import RefusedError, ok, quote, refuse
from kvbench.leaderboard.submission.records import Check, FreshSeedResult
from kvbench.leaderboard.verification.lookup import UnverifiableError, find_known_task
from kvbench.leaderboard.verification.rerun_job import prepare_rerun, rerun_samples
from kvbench.runs.journal import Line
from kvbench.runs.summary import score_lines

if TYPE_CHECKING:
    from kvbench.hf import Model
    from kvbench.runs.progress import Progress

ALPHA = 0.01
"""Significance level: a fresh mean that is worse with a smaller p-value refutes the submitted one."""
RESAMPLES = 9_999
BATCH = 100
MAX_CONTEXTS = 1_000
"""Most contexts that a fresh seed runs."""


def run_fresh_seed(
    bundle: Bundle, model: Model, secret: str, show_progress: Callable[[int], AbstractContextManager[Progress]]
) -> tuple[FreshSeedResult, Check]:
    """Run new contexts under a seed derived from the secret, and compare the means.

    Raises:
        UnverifiableError: it cannot run here, the task has the same examples under every seed, or no number of contexts
            could refute the score.
        RefusedError: the run differs from the submission, its samples fail, or its mean is significantly worse.
    """
    score = bundle.result.score
    if find_known_task(bundle.spec).fixed_examples:
        raise UnverifiableError(f"the examples of {bundle.spec.task.name} are the same under every seed")
    if score.mean is None:
        raise UnverifiableError("it has no score to compare with")
    submitted = _context_means(bundle.lines)
    contexts = count_contexts(submitted, higher_is_better=score.higher_is_better)
    seed = int.from_bytes(hashlib.sha256(secret.encode()).digest()[:4]) >> 1
    job, _ = prepare_rerun(bundle.spec.model_copy(update={"seed": seed, "samples": contexts}), model)
    with show_progress(contexts) as progress:
        lines = rerun_samples(job, range(contexts), progress)
    fresh = score_lines(job.scorer, lines, lambda x: x.score)
    if fresh.mean is None:
        failed = next(x.error for x in lines if x.error is not None)
        raise RefusedError("hidden", f"samples fail under a fresh seed: {quote(failed)}")
    sign = 1 if score.higher_is_better else -1
    p_value = _permutation_p(*([sign * x for x in some] for some in (submitted, _context_means(lines))))
    found = FreshSeedResult(
        samples=contexts, submitted_mean=score.mean, submitted_ci95=score.ci95, mean=fresh.mean, ci95=fresh.ci95,
        p_value=p_value,
    )
    stated = f"{score.mean:.3f} submitted, {fresh.mean:.3f} on {contexts} contexts of a fresh seed (p = {p_value:.3f})"
    if p_value < ALPHA:
        return found, refuse("hidden", f"{stated}: the score does not hold on new examples")
    return found, ok("hidden", stated)


def count_contexts(submitted: Sequence[float], *, higher_is_better: bool) -> int:
    """Contexts of a fresh seed that refute these scores if all of them get the worst score, and as many as given.

    At most MAX_CONTEXTS.

    The worst score is 0, or, where lower is better, worse than all of these. If k of n contexts are better than the
    worst, chance alone puts all k among the submitted n of n + m with probability C(n, k) / C(n + m, k). Half of ALPHA
    leaves room for the error of the random permutations.

    Raises:
        UnverifiableError: MAX_CONTEXTS are too few, or there is only one context to compare with.
    """
    n = len(submitted)
    if n == 1:
        raise UnverifiableError("it has one context, and a permutation needs two")
    k = sum(x > 0 for x in submitted) if higher_is_better else n
    for m in range(min(n, MAX_CONTEXTS), MAX_CONTEXTS + 1):
        if math.comb(n, k) / math.comb(n + m, k) < ALPHA / 2:
            return m
    raise UnverifiableError(
        f"{k} of {n} contexts score above the worst: {MAX_CONTEXTS} new contexts could not refute them"
    )


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
