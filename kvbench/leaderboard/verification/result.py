"""Checks a result against its journal: every number must follow from its lines."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeGuard

from kvbench.leaderboard.submission.outcome import RefusedError, flag, ok, quote, refusing_errors
from kvbench.leaderboard.submission.records import Check
from kvbench.leaderboard.verification.replay import Replay
from kvbench.runs.journal import Line
from kvbench.runs.results import Result, Score
from kvbench.runs.summary import score_lines, summarize

RECOMPUTED = (
    "status", "error", "n_scored", "n_failed", "n_questions", "score", "scores", "agreement", "output", "memory",
    "latency", "diffusion", "lossless", "reuse", "batch", "effect",
)
"""Parts of a result that its journal determines; `kernels` too, if the journal records them."""
TOLERANCE = 1e-9
CI_TOLERANCE = 0.02
"""Maximum difference of an interval's ends: bootstrap draws differ between versions of kvbench and numpy."""


def check_summary(replay: Replay, result: Result, lines: Sequence[Line]) -> tuple[Score, Iterable[Check]]:
    """Recompute the result from the journal and compare every number; the score has today's interval.

    Raises:
        RefusedError: a number differs; the reason states both.
    """
    with refusing_errors("summary", "its journal cannot be summarized"):
        ours = summarize(replay.job, lines, result.environment, result.score.interval)
    noted = any(x.kernels for x in lines)
    names: dict[str, Any] = dict.fromkeys((*RECOMPUTED, *(["kernels"] if noted else [])), True)
    names["environment"] = {"started", "seconds"}
    documents = [x.model_dump(mode="json", include=names) for x in (result, ours)]
    once, summed = _sum_distinct(lines), False
    for name, stated, found in differences(documents[0], documents[1], allow_rounding):
        if name in once and once[name] == stated:
            summed = True
            continue
        check = "scores" if name.startswith("score") else "summary"
        raise RefusedError(check, f"its {name} is {quote(stated)}, its journal gives {quote(found)}")
    checks = [ok("summary", "all numbers of the result follow from its journal")]
    if summed:
        checks.append(flag("facts", "its effect sums distinct codes over samples, as old versions of kvbench did"))
    if result.agreement is None and result.n_failed == 0 and _compares(replay):
        checks.append(flag("agreement", "it has no agreement with the full cache, which did not fit, as it says"))
    if replay.spec.method.family != "lossless" and any(_is_exact_copy(x) for x in lines):
        checks.append(flag("agreement", "a KL divergence of exactly 0, where entries were changed"))
    if result.kernels.implementation != replay.spec.kernels:
        raise RefusedError(
            "summary", f"its kernels are {result.kernels.implementation}, those of its spec {replay.spec.kernels}"
        )
    if (result.kernels.ops or result.kernels.ran) and not noted:
        checks.append(flag("kernels", "the kernels are those that its result names: its journal does not record any"))
    return score_lines(replay.scorer, lines, lambda x: x.score), checks


def _is_exact_copy(x: Line) -> bool:
    """Whether its logits are said to be those of the full cache, to the last bit, although the method acted."""
    return x.agreement is not None and x.agreement.kl == 0 and x.effect is not None and x.effect.acted


def _compares(replay: Replay) -> bool:
    """Whether its answers were compared with the full cache's."""
    return replay.spec.model.kind == "autoregressive" and not (replay.method.exact or replay.model.random)


def _sum_distinct(lines: Sequence[Line]) -> dict[str, int]:
    """Counts of distinct codes summed over samples, by name in the result, as old versions of kvbench wrote them."""
    failed = {x.index for x in lines if x.error is not None}
    last = {x.index: x.effect for x in sorted(lines, key=lambda x: x.turn) if x.effect and x.index not in failed}
    facts = [(name, value) for x in last.values() for name, value in x.facts.items() if name in x.maxima]
    return {f"effect.facts.{name}": sum(value for x, value in facts if x == name) for name, _ in facts}


def differences(
    stated: object, found: object, tolerance: Callable[[str], tuple[float, float]], name: str = ""
) -> Iterator[tuple[str, object, object]]:
    """Yield the dotted name and both values of every place where two documents differ.

    tolerance: the relative and the absolute difference that a number of this name may have.
    """
    if isinstance(stated, dict) and isinstance(found, dict):
        for key in sorted(stated.keys() | found.keys()):
            yield from differences(stated.get(key), found.get(key), tolerance, f"{name}.{key}".lstrip("."))
    elif isinstance(stated, list) and isinstance(found, list) and len(stated) == len(found):
        for index, (one, other) in enumerate(zip(stated, found, strict=True)):
            yield from differences(one, other, tolerance, f"{name}.{index}")
    elif _is_number(stated) and _is_number(found):
        relative, absolute = tolerance(name)
        if not math.isclose(stated, found, rel_tol=relative, abs_tol=absolute):
            yield name, stated, found
    elif stated != found:
        yield name, stated, found


def _is_number(value: object) -> TypeGuard[float]:
    """Whether differences of it may be tolerated, which those of truth values may not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def allow_rounding(name: str) -> tuple[float, float]:
    """The differences that numbers of one machine may have: `differences`."""
    return TOLERANCE, CI_TOLERANCE if ".ci95." in name else TOLERANCE
