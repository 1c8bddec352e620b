"""The share of a context's benefit that reuse keeps: (score - no context) / (full prefill - no context).

The measure is KVShareArena's PGR (2026). All three scores are of the same questions, and the bootstrap draws contexts
with all three.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from kvbench.analysis.compare import find_alike, is_full
from kvbench.analysis.load import FinishedRun
from kvbench.analysis.metrics import share_scale
from kvbench.runs.results import Result
from kvbench.runs.stats import CONFIDENCE, draw_clusters

DRAWS = 10_000
SEED = 20260730
"""KVShareArena's number of draws and seed."""
ROUNDING = 1e-9
"""Shares that differ by less are the same."""


@dataclass(frozen=True)
class Recovery:
    """The recovered share of a run, and the gap that it is a share of."""

    run_id: str
    share: float | None
    """None: full prefills are not better than no context, so there is nothing to recover."""
    ci95: tuple[float, float] | None
    """Paired bootstrap over contexts; None where some draws have no gap, or all draws the same share."""
    gap: float
    """Score of full prefills minus score without context."""
    contexts: int
    full: str
    """Id of the run of full prefill."""


def find_recoveries(runs: Sequence[FinishedRun]) -> list[Recovery]:
    """The recovered share of each run that reuses entries; none without runs of full prefill and of no context.

    Of several such runs those of its own protocol count.
    """
    whole = [x for x in runs if x.result.status == "ok"]
    full, floor = ([x for x in whole if fits(x.result)] for fits in (is_full, is_floor))
    if not full or not floor:
        return []
    ends = ((x, find_alike(x, floor), find_alike(x, full)) for x in whole if x.result.reuse is not None)
    found = (_recover(*x) for x in ends if x[0] not in x[1:])
    return [x for x in found if x is not None]


def is_floor(result: Result) -> bool:
    """Whether a run computed a part of the prompts and took nothing over: it never saw the documents."""
    return result.reuse is not None and not result.reuse.reused_share and result.reuse.computed_share < 1


def _recover(run: FinishedRun, floor: FinishedRun, full: FinishedRun) -> Recovery | None:
    score = run.result.score
    if not all(share_scale(score, x.result.score) for x in (floor, full)):
        return None
    sign = 1 if score.higher_is_better else -1
    rows: list[tuple[str, float, float, float]] = []
    for key in sorted(run.lines.keys() & floor.lines.keys() & full.lines.keys()):
        several = [x.lines[key] for x in (run, floor, full)]
        a, b, c = (x.score for x in several)
        if a is not None and b is not None and c is not None and len({x.prompt_hash for x in several}) == 1:
            rows.append((key[0], sign * a, sign * b, sign * c))
    if not rows:
        return None
    sums = np.array([
        np.array([(*scores, 1.0) for _, *scores in group]).sum(0) for _, group in groupby(rows, key=lambda x: x[0])
    ])  # [contexts, 4]
    ours, lower, upper = sums[:, :3].sum(0) / sums[:, 3].sum()
    gap = float(upper - lower)
    drawn = np.concatenate([sums[x].sum(1) for x in draw_clusters(len(sums), DRAWS, SEED)])  # [draws, 4]
    gaps = drawn[:, 2] - drawn[:, 1]
    ends = None
    shares = (drawn[:, 0] - drawn[:, 1]) / gaps if gaps.min() > 0 else np.zeros(1)
    if np.ptp(shares) > ROUNDING:  # contexts that all agree say nothing about how far others may lie
        low, high = np.quantile(shares, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
        ends = float(low), float(high)
    share = float(ours - lower) / gap if gap > 0 else None
    return Recovery(run.result.run_id, share, ends, gap, len(sums), full.result.run_id)
