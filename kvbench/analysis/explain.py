"""Why two runs of a task score differently: what was asked otherwise, and how much each of it alone moves the score."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from kvbench.analysis.compare import PROTOCOL, compare_pair, look
from kvbench.analysis.load import FinishedRun
from kvbench.analysis.significance import compare_scores
from kvbench.errors import UserError
from kvbench.runs.command import write_request
from kvbench.runs.files import read_lines
from kvbench.runs.request import Request, check
from kvbench.settings import parse_pairs

PAIRS = ("method_settings", "task_settings", "generation")
"""Options of a request that are several settings."""
WHERE = ("suite", "device", "device_map", "trackers", "out")
"""Options that no answer depends on, or that are a machine's."""
FIXED = {
    "spec.versions": "these packages ran", "spec.sources": "this code ran", "spec.device": "this machine ran",
    "environment": "this machine ran", "latency": "times vary", "model": "it comes with the model's files",
    "task.chat_template_sha": "it comes with the model's files", "task.bos": "it comes with the model's files",
    "task.stop": "it comes with the model's files", "task": "it comes with the task and its data",
}
"""Why something is as it was, by the beginning of its name in a result."""
OPTIONS = {
    "task.settings": "task_settings", "spec.generation": "generation", "task.chat_template_sha": "template",
    "task.bos": "template",
}
"""What was asked for to have it, where a result has another name for it."""


@dataclass(frozen=True)
class Change:
    """One thing in which two runs differ."""

    name: str
    first: str
    other: str
    request: Request | None
    """The first run with the other's value; None: there is no such run."""
    why: str = ""
    """Why not."""


@dataclass(frozen=True)
class ScoreShift:
    """How far the score moves."""

    mean: float
    ci95: tuple[float, float]
    n: int
    """Questions that both answered; 0: they were asked others, and the interval is of two separate means."""


def find_changes(first: FinishedRun, other: FinishedRun) -> list[Change]:
    """What differs, each with the run that has it alone.

    Raises:
        UserError: the runs are of different tasks.
    """
    names = [first.result.task.name, other.result.task.name]
    if names[0] != names[1]:
        raise UserError(f"these runs are of different tasks ({', '.join(names)}): their scores cannot be compared.")
    asked, wanted = (write_request(x.result.spec) for x in (first, other))
    changes = [_try(*x) for x in _differ(asked, wanted)]
    return [*changes, *_find_fixed(first, other, {x.name for x in changes})]


def find_rerun(first: FinishedRun) -> Change:
    """The first run as it is: another one where the code has changed since."""
    return _try("run again", "the code of then", "the code of now", write_request(first.result.spec))


def measure(first: FinishedRun, other: FinishedRun) -> ScoreShift | None:
    """The other's score minus the first's: paired where they were asked the same; None: one failed or has none."""
    found = compare_pair(first, other)
    if found.mean is not None and found.ci95 is not None:
        return ScoreShift(found.mean, found.ci95, found.n)
    a, b = first.result.score, other.result.score
    failed = "failed" in (first.result.status, other.result.status)
    if failed or a.mean is None or b.mean is None or a.ci95 is None or b.ci95 is None:
        return None
    mean = b.mean - a.mean
    down = math.hypot(b.mean - b.ci95[0], a.ci95[1] - a.mean)
    up = math.hypot(b.ci95[1] - b.mean, a.mean - a.ci95[0])
    return ScoreShift(mean, (mean - down, mean + up), 0)


def rescore(first: FinishedRun, scorer: str) -> ScoreShift | None:
    """What another scorer of the task says of the same answers; None: it was not there when they were scored."""
    contexts: dict[str, list[tuple[float, float]]] = {}
    for line in read_lines(first.folder / "samples.jsonl"):
        if line.score is not None and scorer in line.scores:
            contexts.setdefault(line.sample, []).append((line.score, line.scores[scorer]))
    if not contexts:
        return None
    found = compare_scores(list(contexts.values()))
    return ScoreShift(found.mean, found.ci95, found.n)


def _differ(first: Request, other: Request) -> Iterator[tuple[str, object, object, Request]]:
    """Options with both values, and the first request with the other's; several settings one by one."""
    same_method = first.method == other.method
    for field in fields(Request):
        a, b = getattr(first, field.name), getattr(other, field.name)
        if a == b or field.name in WHERE or (field.name == "method_settings" and not same_method):
            continue
        if field.name == "method":  # with its settings, which are no other method's
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
    """Whether kvbench would run it; what only the model can tell comes later."""
    try:
        check(request)
    except UserError as error:
        reason = str(error).partition(". ")[0].removesuffix(".")
        return Change(name, _text(first), _text(other), None, f"kvbench refuses it: {reason}")
    return Change(name, _text(first), _text(other), request)


def _find_fixed(first: FinishedRun, other: FinishedRun, asked: set[str]) -> Iterator[Change]:
    """What was not asked for and is otherwise all the same."""
    documents = [x.result.model_dump(mode="json") for x in (first, other)]
    code = [f"spec.{group}.{x}" for group in ("versions", "sources") for x in documents[0]["spec"][group]]
    for place in (*PROTOCOL, *code):
        a, b = (look(x, place) for x in documents)
        if a != b and not _follows(place, asked):
            yield Change(place, _text(a), _text(b), None, _reason(place) or "it follows from what was asked")


def _follows(place: str, asked: set[str]) -> bool:
    """Whether a place in a result says again what was asked for, or what comes with a model that was."""
    option = OPTIONS.get(place, place.rpartition(".")[2])
    said = any(x == option or x.startswith(f"{option}.") for x in asked)
    by_method = "method" in asked and place in ("spec.sources.method", "spec.sources.kernels")
    return said or by_method or ("model" in asked and _reason(place) == FIXED["model"])


def _reason(place: str) -> str | None:
    return next((text for start, text in FIXED.items() if place.startswith(start)), None)


def _text(value: Any) -> str:
    """A value, of a hash the beginning."""
    text = "-" if value is None else str(value)
    return text[:12] if re.fullmatch(r"[0-9a-f]{64}", text) else text
