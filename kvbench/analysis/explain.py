"""Explains a score difference of two runs: which settings differ, and the effect of each one alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from kvbench.analysis.compare import PROTOCOL, compare_pair, get_field, require_one_task
from kvbench.analysis.load import FinishedRun
from kvbench.analysis.metrics import share_scale
from kvbench.analysis.significance import compare_scores
from kvbench.errors import UserError
from kvbench.registry import refuse_unregistered
from kvbench.runs.command import write_request
from kvbench.runs.files import read_lines
from kvbench.runs.options import Request
from kvbench.runs.request import check
from kvbench.runs.spec import show_value
from kvbench.settings import parse_pairs

PAIRS = ("method_settings", "task_settings", "generation")
"""Options of a request that hold several settings."""
WHERE = ("suite", "device", "device_map", "trackers", "out")
"""Options that do not affect answers, or that depend on the machine."""
FIXED = {
    "spec.versions": "package version", "spec.sources": "source code", "spec.device": "set by the machine",
    "environment": "set by the machine", "latency": "times vary", "model": "part of the model's files",
    "task.chat_template_sha": "part of the model's files", "task.bos": "part of the model's files",
    "task.stop": "part of the model's files", "task": "part of the task and its data",
}
"""Why a field of a result cannot be requested, by the start of its name."""
OPTIONS = {
    "task.settings": "task_settings", "spec.generation": "generation", "task.chat_template_sha": "template",
    "task.bos": "template",
}
"""The option of a request that sets a field of a result, where the names differ."""


@dataclass(frozen=True)
class Change:
    """One setting in which two runs differ."""

    name: str
    first: str
    other: str
    request: Request | None
    """The first run's request with the other run's value; None if no such run is possible."""
    why: str = ""
    """Why it is not possible."""


@dataclass(frozen=True)
class ScoreShift:
    """A difference of scores."""

    mean: float
    ci95: tuple[float, float] | None
    n: int
    """Common questions; 0: there are none, and the interval is that of two independent means."""


def find_changes(first: FinishedRun, other: FinishedRun) -> list[Change]:
    """The settings in which two runs differ, each with a request that changes only that one.

    Raises:
        UserError: the runs belong to different tasks.
    """
    require_one_task(x.result.task.name for x in (first, other))
    asked, wanted = (write_request(x.result.spec) for x in (first, other))
    changes = [_try(*x) for x in _differ(asked, wanted)]
    return [*changes, *_find_fixed(first, other, {x.name for x in changes})]


def find_rerun(first: FinishedRun) -> Change:
    """The first run with the current code."""
    return _try("rerun", "original code", "current code", write_request(first.result.spec))


def measure(first: FinishedRun, other: FinishedRun) -> ScoreShift | None:
    """The other run's score minus the first's, paired on common questions.

    None if one has no score, or their metrics have no common scale.
    """
    found = compare_pair(first, other)
    if found.mean is not None:
        return ScoreShift(found.mean, found.ci95, found.n)
    a, b = first.result.score, other.result.score
    failed = "failed" in (first.result.status, other.result.status)
    if failed or not share_scale(a, b) or a.mean is None or b.mean is None or a.ci95 is None or b.ci95 is None:
        return None
    mean = b.mean - a.mean
    down = math.hypot(b.mean - b.ci95[0], a.ci95[1] - a.mean)
    up = math.hypot(b.ci95[1] - b.mean, a.mean - a.ci95[0])
    return ScoreShift(mean, (mean - down, mean + up), 0)


def measure_scorer(first: FinishedRun, scorer: str) -> ScoreShift | None:
    """The effect of another scorer of the task on the same answers; None if the journal lacks its scores."""
    contexts: dict[str, list[tuple[float, float]]] = {}
    for line in read_lines(first.folder / "samples.jsonl"):
        if line.score is not None and scorer in line.scores:
            contexts.setdefault(line.sample, []).append((line.score, line.scores[scorer]))
    if not contexts:
        return None
    found = compare_scores(list(contexts.values()))
    return ScoreShift(found.mean, found.ci95, found.n)


def _differ(first: Request, other: Request) -> Iterator[tuple[str, object, object, Request]]:
    """Differing options: name, both values, and the first request with the other's value."""
    same_method = first.method == other.method
    for field in fields(Request):
        a, b = getattr(first, field.name), getattr(other, field.name)
        if a == b or field.name in WHERE or (field.name == "method_settings" and not same_method):
            continue
        if field.name == "method":  # together with its settings, which other methods do not have
            yield "method", a, b, replace(first, method=b, method_settings=other.method_settings)
        elif field.name in PAIRS:
            mine, theirs = parse_pairs(a, field.name), parse_pairs(b, field.name)
            for key in dict.fromkeys((*mine, *theirs)):
                if mine.get(key) != theirs.get(key):
                    flipped = {k: v for k, v in {**mine, key: theirs.get(key)}.items() if v is not None}
                    change: dict[str, Any] = {field.name: tuple(f"{k}={v}" for k, v in flipped.items())}
                    yield f"{field.name}.{key}", mine.get(key), theirs.get(key), replace(first, **change)
        else:
            yield field.name, a, b, replace(first, **{field.name: b})


def _try(name: str, first: object, other: object, request: Request) -> Change:
    """A change, with its request if its names are registered and it passes all checks that need no model."""
    again = "Repeat the run from its own file with kvbench run."
    try:
        refuse_unregistered("method", request.method, again)
        refuse_unregistered("task", request.task, again)
        check(request)
    except UserError as error:
        reason = str(error).partition(". ")[0].removesuffix(".")
        return Change(name, _text(first), _text(other), None, f"not allowed: {reason}")
    return Change(name, _text(first), _text(other), request)


def _find_fixed(first: FinishedRun, other: FinishedRun, asked: set[str]) -> Iterator[Change]:
    """Differing fields of the results that no option of the request explains."""
    documents = [x.result.model_dump(mode="json") for x in (first, other)]
    code = [f"spec.{group}.{x}" for group in ("versions", "sources") for x in documents[0]["spec"][group]]
    for place in (*PROTOCOL, *code):
        a, b = (get_field(x, place) for x in documents)
        if a != b and not _follows(place, asked):
            yield Change(place, _text(a), _text(b), None, _reason(place) or "follows from another difference")


def _follows(place: str, asked: set[str]) -> bool:
    """True if a field of a result repeats a differing option, or belongs to a differing model or method."""
    option = OPTIONS.get(place, place.rpartition(".")[2])
    said = any(x == option or x.startswith(f"{option}.") for x in asked)
    by_method = "method" in asked and place in ("spec.sources.method", "spec.sources.kernels")
    return said or by_method or ("model" in asked and _reason(place) == FIXED["model"])


def _reason(place: str) -> str | None:
    return next((text for start, text in FIXED.items() if place.startswith(start)), None)


def _text(value: object) -> str:
    return "-" if value is None else show_value(value)
