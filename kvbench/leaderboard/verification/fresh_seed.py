"""Level L3: the same spec on examples that nobody but the verifier has seen, its mean against the submitted one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvbench.leaderboard.submission.bundle import Bundle
from kvbench.leaderboard.submission.records import Check, HiddenSeed
from kvbench.leaderboard.verification.lookup import StrangerError
from kvbench.leaderboard.verification.outcome import RefusedError, ok, refuse, show
from kvbench.leaderboard.verification.runnable import prepare_again, run_again
from kvbench.runs.examples import make_examples
from kvbench.runs.journal import Line
from kvbench.runs.summary import score_lines

if TYPE_CHECKING:
    from kvbench.hf import Model
    from kvbench.runs.runner import Progress

LEAST_CHANCE = 0.01
"""A fresh mean that is worse, and that chance makes as much worse less often than this, refutes the submitted one."""
DRAWS = 9_999
AT_ONCE = 100


def run_hidden(bundle: Bundle, model: Model, secret: str, progress: Progress) -> tuple[HiddenSeed, Check]:
    """Run as many samples under a seed that the secret makes, and compare the means.

    Raises:
        StrangerError: it cannot be run here, or has no examples but these.
        RefusedError: it is another run here, or samples fail.
    """
    score = bundle.result.score
    if score.mean is None or score.ci95 is None:
        raise StrangerError("it has no score to compare with")
    seed = int.from_bytes(hashlib.sha256(secret.encode()).digest()[:4]) >> 1
    job, _ = prepare_again(bundle.spec, model, seed)
    _, _, encoded = next(make_examples(job, [0]))
    if encoded.prompt_hash == next(x.prompt_hash for x in bundle.lines if x.index == 0):
        raise StrangerError(f"the examples of {bundle.spec.task.name} are the same under every seed")
    lines = run_again(job, range(bundle.spec.samples), progress)
    fresh = score_lines(job.scorer, lines, lambda x: x.score)
    if fresh.mean is None or fresh.ci95 is None:
        failed = next(x.error for x in lines if x.error is not None)
        raise RefusedError("hidden", f"samples fail under a fresh seed: {show(failed)}")
    sign = 1 if score.higher_is_better else -1
    p_value = _chance(*([sign * x for x in _contexts(some)] for some in (bundle.lines, lines)))
    found = HiddenSeed(
        samples=bundle.spec.samples, submitted_mean=score.mean, submitted_ci95=score.ci95, mean=fresh.mean,
        ci95=fresh.ci95, p_value=p_value,
    )
    said = f"{score.mean:.3f} submitted, {fresh.mean:.3f} under a fresh seed (p = {p_value:.3f})"
    if p_value < LEAST_CHANCE:
        return found, refuse("hidden", f"{said}: the score does not hold on examples that nobody has seen")
    return found, ok("hidden", said)


def _contexts(lines: Sequence[Line]) -> list[float]:
    """Mean score of each context: the turns of one are not independent."""
    found: dict[int, list[float]] = {}
    for x in lines:
        if x.score is not None:
            found.setdefault(x.index, []).append(x.score)
    return [fmean(x) for x in found.values()]


def _chance(submitted: Sequence[float], fresh: Sequence[float]) -> float:
    """How often contexts that are dealt out at random make the fresh mean as much worse (permutation test)."""
    from scipy.stats import permutation_test  # type: ignore[import-untyped]  # slow to import

    def differ(x: NDArray[np.float64], y: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
        return np.asarray(x.mean(axis=axis) - y.mean(axis=axis))

    found = permutation_test(
        (submitted, fresh), differ, vectorized=True, n_resamples=DRAWS, batch=AT_ONCE, alternative="greater",
        random_state=0,
    )
    return float(found.pvalue)
