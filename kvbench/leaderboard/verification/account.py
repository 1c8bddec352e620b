"""A result against its own journal, and bytes against what the method declares: nothing is taken on trust."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from kvbench.errors import UndeclaredError
from kvbench.leaderboard.submission.records import Check
from kvbench.leaderboard.verification.outcome import RefusedError, blaming, flag, ok, refuse, show
from kvbench.leaderboard.verification.rebuilt import Replay, fit, shapes
from kvbench.method import Method
from kvbench.runs.journal import Line
from kvbench.runs.results import Result, Score
from kvbench.runs.summary import summarize

SUMMED = (
    "status", "error", "n_scored", "n_failed", "score", "scores", "agreement", "output", "memory", "latency",
    "diffusion", "effect",
)
"""Parts of a result that are a function of its journal; `kernels` too, where the journal says what ran."""
CLOSE = 1e-9
INTERVAL = 0.02
"""Most that the ends of an interval may be away from ours: draws differ between versions of kvbench and numpy."""


def check_summary(replay: Replay, result: Result, lines: Sequence[Line]) -> tuple[Score, Iterable[Check]]:
    """The score that the journal gives, and that the rest of the result is what it gives too.

    Raises:
        RefusedError: the submitted one is another, with both values.
    """
    with blaming("summary", "its journal cannot be summed up"):
        ours = summarize(replay.job, lines)
    noted = any(x.kernels for x in lines)
    names: dict[str, Any] = dict.fromkeys((*SUMMED, *(["kernels"] if noted else [])), True)
    names["environment"] = {"started", "seconds"}
    documents = [x.model_dump(mode="json", include=names) for x in (result, ours)]
    once, summed = _sum_distinct(lines), False
    for name, said, found in differences(documents[0], documents[1]):
        if name in once and once[name] == said:
            summed = True
            continue
        check = "scores" if name.startswith("score") else "summary"
        raise RefusedError(check, f"its {name} is {show(said)}, its samples give {show(found)}")
    checks = [ok("summary", "the result is what its samples give")]
    if summed:
        checks.append(flag("facts", "its effect adds up distinct codes over samples, as kvbench once did"))
    if result.kernels.ops and not noted:
        checks.append(flag("kernels", "which kernels ran is the result's own word: its journal does not say"))
    return ours.score, checks


def _sum_distinct(lines: Sequence[Line]) -> dict[str, int]:
    """What results once had for distinct codes, by name in the result: their sums over samples."""
    failed = {x.index for x in lines if x.error is not None}
    last = {x.index: x.effect for x in sorted(lines, key=lambda x: x.turn) if x.effect and x.index not in failed}
    facts = [(name, value) for x in last.values() for name, value in x.facts.items() if name.startswith("distinct")]
    return {f"effect.facts.{name}": sum(value for x, value in facts if x == name) for name, _ in facts}


def differences(said: object, found: object, name: str = "") -> Iterator[tuple[str, object, object]]:
    """Places where two documents are not the same, by their dotted names, with both values."""
    if isinstance(said, dict) and isinstance(found, dict):
        for key in sorted(said.keys() | found.keys()):
            yield from differences(said.get(key), found.get(key), f"{name}.{key}".lstrip("."))
    elif isinstance(said, list) and isinstance(found, list) and len(said) == len(found):
        for index, (one, other) in enumerate(zip(said, found, strict=True)):
            yield from differences(one, other, f"{name}.{index}")
    elif isinstance(said, int | float) and isinstance(found, int | float):
        slack = INTERVAL if ".ci95." in name else CLOSE
        if not math.isclose(said, found, rel_tol=CLOSE, abs_tol=slack):
            yield name, said, found
    elif said != found:
        yield name, said, found


def check_bytes(replay: Replay, method: Method | None, result: Result, lines: Sequence[Line], folder: Path) -> Check:
    """Bytes are those of the model's shape and the method's own declaration, and the budget came to what it says.

    Raises:
        RefusedError: with both numbers.
    """
    spec = replay.spec
    first = [x for x in lines if x.turn == 0 and x.bytes is not None and x.tokens is not None]
    lengths = {
        x.index: x.tokens.context if x.denoising is None else x.denoising.sequence_length for x in first if x.tokens
    }
    known = shapes(spec, folder, list(lengths.values()))
    undeclared: UndeclaredError | None = None
    more = 0
    for x in first:
        dense = known[lengths[x.index]].full_bytes
        if x.bytes is not None and x.bytes.full_bytes != dense:
            raise RefusedError(
                "bytes", f"sample {x.index}: a dense cache of its {lengths[x.index]} tokens is {dense} bytes, not "
                f"{x.bytes.full_bytes}"
            )
    if method is None or spec.model.kind == "diffusion":
        return (flag if method is None else ok)(
            "bytes", f"dense bytes are those of {spec.model.id}; what the method declares is not known without a run"
        )
    for x in first:
        shape = known[lengths[x.index]]
        with blaming("bytes", "what its budget was resolved to"):
            bound = method.rebind(result.budget.resolved, shape)
        fitted = fit(bound, spec, shape)
        assert x.bytes is not None and x.effect is not None, "lines with tokens have both"
        held = x.bytes.stored_bytes, x.bytes.host_bytes
        with blaming("bytes", f"what {spec.method.name} declares"):
            identity = fitted.identity(shape)
            try:
                declared = fitted.declared_bytes(shape), fitted.declared_host_bytes(shape)
            except UndeclaredError as error:
                undeclared, declared = error, held
        if spec.recompress and held != declared and min(held[0] - declared[0], held[1] - declared[1]) >= 0:
            more += 1
            continue  # it may keep what the next compression asks for, which is beside the declared rows
        if declared != held:
            raise RefusedError(
                "bytes", f"sample {x.index}: {spec.method.name} declares {declared[0]} bytes (and {declared[1]} on the "
                f"host) for {shape.length} tokens at this budget, its journal has {x.bytes.stored_bytes} (and "
                f"{x.bytes.host_bytes})"
            )
        if identity != x.effect.identity:
            raise RefusedError("bytes", f"sample {x.index}: at these settings the method loses nothing: {identity}")
        resolved = to_jsonable_python(fitted.resolution)
        if x.index == 0 and any(result.budget.resolved.get(key) != value for key, value in resolved.items()):
            raise RefusedError("bytes", "its budget did not come to what the result says it was resolved to")
    if undeclared is not None:
        return flag("bytes", f"dense bytes are those of {spec.model.id}, and of those held: {undeclared}")
    if more:
        return flag(
            "bytes", f"{more} of {len(first)} samples hold more than {spec.method.name} declares, as a method may that "
            "compresses again at each turn: how much more was compared with nothing"
        )
    return ok("bytes", f"those of {len(first)} samples are what {spec.method.name} declares on {spec.model.id}")


def check_machine(result: Result, now: datetime) -> Check:
    """Where it ran, from which commit, and when; refused from code that no commit has, or at no possible time."""
    place, versions = result.environment, result.spec.versions
    said = (place.kvbench, place.torch, place.transformers)
    if said != (versions.kvbench, versions.torch, versions.transformers):
        return refuse("machine", "its environment has other versions than its spec")
    if place.git is not None and place.git.dirty:
        commit = show(place.git.commit)
        return refuse("machine", f"it ran from code that differs from commit {commit}: commit, and run it again")
    try:
        late = datetime.fromisoformat(place.started) > now
    except (ValueError, TypeError):
        return refuse("machine", f"it started at {show(place.started)}, which is no time with a zone")
    if late:
        return refuse("machine", f"it started at {show(place.started)}, which is still to come")
    where = place.cpu if place.gpu is None else place.gpu
    if place.git is None:
        return flag("machine", f"kvbench {place.kvbench} on {where}, from no commit: its code is known by hashes only")
    return ok("machine", f"kvbench {place.kvbench} at {place.git.commit[:12]} on {where}")
