"""The verdict on a printed number, by the rules of docs/reproducing.md."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from kvbench.analysis.compare import compare_pair
from kvbench.analysis.load import FinishedRun
from kvbench.reproduce.claims import Claim
from kvbench.reproduce.plan import ClaimPlan, Missing, find_baseline
from kvbench.runs.options import Request
from kvbench.runs.results import Result

Verdict = Literal[
    "reproduced", "partly", "not reproduced", "not run", "shape only",
    "reproduced (bytes)", "not reproduced (bytes)",
]
ANCHOR = 1.0
"""Points by which our full cache may differ from the printed one before the table counts as not anchored."""


@dataclass(frozen=True)
class Number:
    """A value with its 95 % interval, as the paper prints it."""

    value: float
    ci95: tuple[float, float]

    def holds(self, printed: float, rounding: float) -> bool:
        """True if the interval, widened by the rounding, contains a printed value."""
        return self.ci95[0] - rounding <= printed <= self.ci95[1] + rounding


@dataclass(frozen=True)
class Judgment:
    """A printed number, ours, and the verdict."""

    claim: Claim
    verdict: Verdict
    ours: Number | None = None
    printed_difference: float | None = None
    """Printed difference to the baseline row."""
    difference: Number | None = None
    """Our difference, paired by question."""
    differs: tuple[str, ...] = ()
    """Deviations from the paper."""
    missing: tuple[Missing, ...] = ()
    runs: tuple[Path, ...] = ()
    regime: str = ""
    """For speeds and bytes: hardware and settings of the measurement or the prediction."""

    @property
    def direction(self) -> str:
        """For `shape only`: whether our score differs from the baseline in the printed direction."""
        if self.printed_difference is None or self.difference is None or not self.printed_difference:
            return ""
        low, high = self.difference.ci95
        if low <= 0 <= high:
            return "no significant difference"
        return "moves as printed" if (low > 0) == (self.printed_difference > 0) else "moves against the printed"

    @property
    def document(self) -> dict[str, Any]:
        """JSON document for `--json` and the site."""
        claim = self.claim
        return {
            "id": claim.id, "paper": claim.paper, "title": claim.source.title, "arxiv": claim.source.arxiv,
            "table": claim.table.name, "model": claim.model, "row": claim.row, "column": claim.column,
            "method": claim.method.method, "measure": claim.table.measure, "evidence": claim.evidence,
            "where": claim.table.where, "printed": claim.printed, "corrected": claim.value, "verdict": self.verdict,
            "notes": [x.text for x in claim.notes], "ours": _json(self.ours),
            "printed_difference": self.printed_difference, "difference": _json(self.difference),
            "differs": list(self.differs), "missing": [{"what": x.what, "why": x.why} for x in self.missing],
            "direction": self.direction, "runs": [str(x) for x in self.runs], "regime": self.regime,
        }


def judge(plan: ClaimPlan, runs: Mapping[Request, FinishedRun], baseline: ClaimPlan | None = None) -> Judgment:
    """The verdict on a score.

    Args:
        plan: of the number.
        runs: finished runs by request.
        baseline: the plan of the number that the difference is taken to.
    """
    claim, missing = plan.claim, list(plan.missing)
    found = [runs[x] for x in plan.requests if x in runs]
    lacking = len(plan.requests) - len(found)
    if lacking and not missing:
        missing.append(Missing("run", f"{lacking} of {len(plan.requests)} runs are not finished"))
    missing += [
        Missing("run", f"{x.result.run_id} has no score: {x.result.error or 'its weights are random'}")
        for x in found if x.result.status != "ok" or x.result.score.mean is None
    ]
    missing += [
        Missing("run", f"{x.result.run_id} has no interval: its answers do not vary")
        for x in found if x.result.score.mean is not None and x.result.score.ci95 is None
    ]
    if missing:
        return Judgment(claim, "not run", missing=tuple(missing))
    ours = _average([_score(x.result) for x in found], claim.table.scale)
    printed = difference = None
    other = find_baseline(claim)
    theirs = [] if baseline is None else [runs[x] for x in baseline.requests if x in runs]
    if other is not None and len(theirs) == len(found):
        printed, difference = claim.value - other.value, _differ(theirs, found, claim.table.scale)
    differs = tuple(_differences(claim, [x.result for x in found]))
    verdict: Verdict = "not reproduced"
    if not plan.whole:
        verdict = "shape only"
    elif ours.holds(claim.value, claim.rounding):
        verdict = "partly" if differs else "reproduced"
    elif printed is not None and difference is not None and difference.holds(printed, 2 * claim.rounding):
        verdict = "partly"
    return Judgment(
        claim, verdict, ours, printed, difference, differs, runs=tuple(x.folder for x in found)
    )


def find_unanchored(judgments: Sequence[Judgment]) -> dict[tuple[str, str, str], float]:
    """The largest difference of our full cache from the printed one by paper, table and model, if above ANCHOR.

    Speeds, bytes, batches and lengths are left out: they have no points.
    """
    found: dict[tuple[str, str, str], float] = {}
    for x in judgments:
        table = x.claim.table
        is_base = x.claim.row == table.baseline and x.verdict not in ("not run", "shape only")
        if table.measure == "score" and is_base and x.ours is not None:
            points = abs(x.ours.value - x.claim.value)
            if points > ANCHOR:
                key = (x.claim.paper, table.name, x.claim.model)
                found[key] = max(found.get(key, 0.0), points)
    return found


def _differences(claim: Claim, results: Sequence[Result]) -> list[str]:
    """Deviations of the runs from the paper's stated protocol."""
    asked = claim.protocol
    found = []
    for result in results:
        spec, room = result.spec, claim.room_of(result.task.name)
        whole = result.budget.kind == "none"
        ours = {
            "template": "none" if result.task.chat_template_sha is None else "own",
            "truncation": spec.task.length - (room or 0), "visibility": result.visibility, "history": result.history,
            "granularity": asked.granularity if whole else "KV head", "dtype": result.model.dtype,
        }
        for name, value in ours.items():
            paper = getattr(asked, name)
            if paper is not None and paper != value:
                found.append(f"{name}: {paper} in the paper, {value} here")
    found += list_doubts(claim)
    return list(dict.fromkeys([*found, *asked.differs]))


def list_doubts(claim: Claim) -> list[str]:
    """The remark that a number, or the settings behind it, were not read in the original source."""
    return {
        "verified": [], "secondary": ["the number was read in a copy of the paper"],
        "memory": ["the number or its settings are from memory"],
    }[claim.evidence]


def _score(result: Result) -> Number:
    mean, ci95 = result.score.mean, result.score.ci95
    assert mean is not None and ci95 is not None
    return Number(mean, ci95)


def _differ(first: Sequence[FinishedRun], other: Sequence[FinishedRun], scale: float) -> Number | None:
    """Ours minus the baseline's, paired by question."""
    pairs = [compare_pair(a, b) for a, b in zip(first, other, strict=True)]
    found = [Number(x.mean, x.ci95) for x in pairs if x.mean is not None and x.ci95 is not None]
    return _average(found, scale) if len(found) == len(pairs) else None


def _average(numbers: Sequence[Number], scale: float) -> Number:
    """The mean of independent runs; half-widths of their intervals add in squares."""
    mean, n = fmean(x.value for x in numbers), len(numbers)
    down = math.hypot(*(x.value - x.ci95[0] for x in numbers)) / n
    up = math.hypot(*(x.ci95[1] - x.value for x in numbers)) / n
    return Number(scale * mean, (scale * (mean - down), scale * (mean + up)))


def _json(number: Number | None) -> dict[str, Any] | None:
    return None if number is None else {"value": number.value, "ci95": list(number.ci95)}
