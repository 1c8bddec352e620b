"""Checks a result against its journal, its bytes against the method's declaration, and its environment."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from kvbench.errors import UndeclaredError
from kvbench.leaderboard.submission.records import Check
from kvbench.leaderboard.verification.outcome import RefusedError, flag, ok, quote, refuse, refusing_errors
from kvbench.leaderboard.verification.replay import Replay, find_shapes, fit_budget
from kvbench.method import Method
from kvbench.runs.journal import Line
from kvbench.runs.results import Result, Score
from kvbench.runs.summary import find_machines, summarize

RECOMPUTED = (
    "status", "error", "n_scored", "n_failed", "score", "scores", "agreement", "output", "memory", "latency",
    "diffusion", "effect",
)
"""Parts of a result that its journal determines; `kernels` too, if the journal records them."""
TOLERANCE = 1e-9
CI_TOLERANCE = 0.02
"""Maximum difference of an interval's ends: bootstrap draws differ between versions of kvbench and numpy."""


def check_summary(replay: Replay, result: Result, lines: Sequence[Line]) -> tuple[Score, Iterable[Check]]:
    """Recompute the result from the journal and compare every number.

    Raises:
        RefusedError: a number differs; the reason states both.
    """
    with refusing_errors("summary", "its journal cannot be summarized"):
        ours = summarize(replay.job, lines, result.environment)
    noted = any(x.kernels for x in lines)
    names: dict[str, Any] = dict.fromkeys((*RECOMPUTED, *(["kernels"] if noted else [])), True)
    names["environment"] = {"started", "seconds"}
    documents = [x.model_dump(mode="json", include=names) for x in (result, ours)]
    once, summed = _sum_distinct(lines), False
    for name, stated, found in differences(documents[0], documents[1]):
        if name in once and once[name] == stated:
            summed = True
            continue
        check = "scores" if name.startswith("score") else "summary"
        raise RefusedError(check, f"its {name} is {quote(stated)}, its journal gives {quote(found)}")
    checks = [ok("summary", "all numbers of the result follow from its journal")]
    if summed:
        checks.append(flag("facts", "its effect sums distinct codes over samples, as old versions of kvbench did"))
    if result.kernels.ops and not noted:
        checks.append(flag("kernels", "the kernels are those that its result names: its journal does not record any"))
    return ours.score, checks


def _sum_distinct(lines: Sequence[Line]) -> dict[str, int]:
    """Counts of distinct codes summed over samples, by name in the result, as old versions of kvbench wrote them."""
    failed = {x.index for x in lines if x.error is not None}
    last = {x.index: x.effect for x in sorted(lines, key=lambda x: x.turn) if x.effect and x.index not in failed}
    facts = [(name, value) for x in last.values() for name, value in x.facts.items() if name in x.maxima]
    return {f"effect.facts.{name}": sum(value for x, value in facts if x == name) for name, _ in facts}


def differences(stated: object, found: object, name: str = "") -> Iterator[tuple[str, object, object]]:
    """Yield the dotted name and both values of every place where two documents differ."""
    if isinstance(stated, dict) and isinstance(found, dict):
        for key in sorted(stated.keys() | found.keys()):
            yield from differences(stated.get(key), found.get(key), f"{name}.{key}".lstrip("."))
    elif isinstance(stated, list) and isinstance(found, list) and len(stated) == len(found):
        for index, (one, other) in enumerate(zip(stated, found, strict=True)):
            yield from differences(one, other, f"{name}.{index}")
    elif isinstance(stated, int | float) and isinstance(found, int | float):
        slack = CI_TOLERANCE if ".ci95." in name else TOLERANCE
        if not math.isclose(stated, found, rel_tol=TOLERANCE, abs_tol=slack):
            yield name, stated, found
    elif stated != found:
        yield name, stated, found


def check_bytes(replay: Replay, method: Method | None, result: Result, lines: Sequence[Line], folder: Path) -> Check:
    """Compare the journal's bytes with the model's shape and with the bytes that the method declares for its budget.

    Raises:
        RefusedError: bytes differ; the reason states both numbers.
    """
    spec = replay.spec
    first = [x for x in lines if x.turn == 0 and x.bytes is not None and x.tokens is not None]
    lengths = {
        x.index: x.tokens.context if x.denoising is None else x.denoising.sequence_length for x in first if x.tokens
    }
    known = find_shapes(spec, folder, list(lengths.values()))
    undeclared: UndeclaredError | None = None
    more = 0
    for x in first:
        full = known[lengths[x.index]].full_bytes
        if x.bytes is not None and x.bytes.full_bytes != full:
            raise RefusedError(
                "bytes", f"sample {x.index}: a full cache of {lengths[x.index]} tokens has {full} bytes, not "
                f"{x.bytes.full_bytes}"
            )
    if method is None or spec.model.kind == "diffusion":
        return (flag if method is None else ok)(
            "bytes", f"full-cache bytes match {spec.model.id}; the method's declared bytes are not known"
        )
    for x in first:
        shape = known[lengths[x.index]]
        with refusing_errors("bytes", "its resolved budget"):
            bound = method.rebind(result.budget.resolved, shape)
        fitted = fit_budget(bound, spec, shape)
        assert x.bytes is not None and x.effect is not None, "lines with tokens have both"
        stored = x.bytes.stored_bytes, x.bytes.host_bytes
        with refusing_errors("bytes", f"the bytes that {spec.method.name} declares"):
            identity = fitted.identity(shape)
            try:
                declared = fitted.declared_bytes(shape), fitted.declared_host_bytes(shape)
            except UndeclaredError as error:
                undeclared, declared = error, stored
        if spec.recompress and stored != declared and min(stored[0] - declared[0], stored[1] - declared[1]) >= 0:
            more += 1
            continue  # it may keep data for the next compression, on top of the declared bytes
        if declared != stored:
            raise RefusedError(
                "bytes", f"sample {x.index}: {spec.method.name} declares {declared[0]} bytes (and {declared[1]} on the "
                f"host) for {shape.length} tokens at this budget, its journal has {x.bytes.stored_bytes} (and "
                f"{x.bytes.host_bytes})"
            )
        if identity != x.effect.identity:
            raise RefusedError(
                "bytes", f"sample {x.index}: its journal has identity {x.effect.identity}, not {identity}"
            )
        resolved = to_jsonable_python(fitted.resolution)
        if x.index == 0 and any(result.budget.resolved.get(key) != value for key, value in resolved.items()):
            raise RefusedError("bytes", "its budget does not resolve to the values in its result")
    if undeclared is not None:
        return flag("bytes", f"full-cache bytes match {spec.model.id}; stored bytes were not checked: {undeclared}")
    if more:
        return flag(
            "bytes", f"{more} of {len(first)} samples store more than {spec.method.name} declares, as is allowed with "
            "--recompress: the excess was not checked"
        )
    return ok("bytes", f"stored bytes of {len(first)} samples equal those that {spec.method.name} declares")


def check_machine(result: Result, lines: Sequence[Line], now: datetime) -> Check:
    """Check versions, commit, device and start time; refuse uncommitted code and impossible times.

    Reads the submission only: this machine need not have the run's device.
    """
    place, versions = result.environment, result.spec.versions
    stated = (place.kvbench, place.torch, place.transformers)
    if stated != (versions.kvbench, versions.torch, versions.transformers):
        return refuse("machine", "the versions in its environment differ from its spec")
    device = result.spec.device
    if (device == "cuda") != (place.gpu is not None):
        return refuse("machine", f"it ran on device {quote(device)}, its environment names GPU {quote(place.gpu)}")
    if place.git is not None and place.git.dirty:
        commit = quote(place.git.commit)
        return refuse("machine", f"it ran uncommitted code on top of commit {commit}: commit, and run it again")
    try:
        late = datetime.fromisoformat(place.started) > now
    except (ValueError, TypeError):
        return refuse("machine", f"it started at {quote(place.started)}, which is not a time with a time zone")
    if late:
        return refuse("machine", f"it started at {quote(place.started)}, which is in the future")
    where = place.cpu if place.gpu is None else place.gpu
    machines = {x.gpu or x.cpu for x in find_machines(lines)}
    if machines and where not in machines:
        return flag("machine", f"its result names {quote(where)}, its journal {quote(', '.join(sorted(machines)))}")
    if place.git is None:
        return flag("machine", f"kvbench {place.kvbench} on {where}, without a git commit: only hashes show its code")
    return ok("machine", f"kvbench {place.kvbench} at {place.git.commit[:12]} on {where}")
