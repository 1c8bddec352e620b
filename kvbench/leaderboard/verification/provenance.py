"""Checks where, when and with which code a run says that it was made. Reads the submission only, not this machine."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta

from kvbench import __version__
from kvbench.leaderboard.submission.outcome import flag, ok, quote, refuse
from kvbench.leaderboard.submission.records import Check, Manifest
from kvbench.machine import find_version
from kvbench.runs.journal import Line
from kvbench.runs.results import Environment, Result
from kvbench.runs.spec import RunSpec
from kvbench.runs.summary import find_machines

FIRST_COMMIT = datetime(2026, 11, 21, tzinfo=UTC)
"""Day of kvbench's first commit: no run is older."""
PYTHONS = (3, 11), (3, 14)
"""The first with which kvbench runs, and the first with which it does not."""
OLDEST = {"kvbench": (0, 1), "torch": (2, 11), "transformers": (5, 17), "triton": (3, 6)}
"""The first kvbench, and the oldest packages with which it runs."""
MOST_THREADS = 4096
PLACE = re.compile(r"[ -~]{1,200}")
"""A processor's name."""
MODULE, DEVICE = re.compile(r"[A-Za-z0-9_.]{0,200}"), re.compile(r"cpu|disk|(cuda:?)?[0-9]{1,3}|cuda")
"""Names in a device map."""
TRITON = "3.9.0"
"""The latest known release, for verifiers without it."""
VERSION = re.compile(r"([0-9]{1,9}+)\.([0-9]{1,9}+)(?:\.([0-9]{1,9}+))?+(?:[.+-]?[0-9A-Za-z]++)*+")
"""Possessive: a version that does not match takes one pass, not as many as there are ways to split its digits."""
COMMIT, SHA256, TEMPLATE = (re.compile(f"[0-9a-f]{{{n}}}") for n in (40, 64, 16))


def check_machine(result: Result, lines: Sequence[Line], manifest: Manifest | None, now: datetime) -> Check:
    """Check versions, commit, hashes, device and dates."""
    place, spec = result.environment, result.spec
    for reasons in (
        _list_wrong_hashes(spec, place), _list_wrong_versions(spec, place, lines),
        _list_wrong_hardware(spec, place, lines), _list_wrong_dates(place, lines, manifest, now),
    ):
        if (reason := next(reasons, None)) is not None:
            return refuse("machine", reason)
    where = place.cpu if place.gpu is None else place.gpu
    packages = _list_packages(spec, place)
    later = [f"{name} {stated}" for name, stated, here in packages if _read_version(stated) > _read_version(here)]
    if later:
        return flag("machine", f"{' and '.join(later)} on {where}: later than the verifier's")
    if manifest is not None and not find_machines(lines):
        return flag("machine", f"kvbench {place.kvbench} on {where}, as its result says: its journal names no machine")
    if place.git is None:
        return flag("machine", f"kvbench {place.kvbench} on {where}, without a git commit: only hashes show its code")
    return ok("machine", f"kvbench {place.kvbench} at {place.git.commit[:12]} on {where}")


def _list_wrong_hashes(spec: RunSpec, place: Environment) -> Iterator[str]:
    """Hashes without the form that kvbench writes, and uncommitted code."""
    hashes = {
        "model.sha256": spec.model.sha256, "model.tokenizer_sha256": spec.model.tokenizer_sha256,
        **{f"sources.{name}": value for name, value in spec.sources}, "method.code": spec.method.code,
        "task.code": spec.task.code,
    }
    for name, value in hashes.items():
        if value is not None and not SHA256.fullmatch(value):
            yield f"its {name} {quote(value)} is not a SHA-256 of 64 hexadecimal digits"
    template = spec.task.chat_template_sha
    if template is not None and not TEMPLATE.fullmatch(template):
        yield f"its task.chat_template_sha {quote(template)} is not a hash of 16 hexadecimal digits"
    if place.git is None:
        return
    if not COMMIT.fullmatch(place.git.commit):
        yield f"its commit {quote(place.git.commit)} is not a hash of 40 hexadecimal digits"
    if place.git.dirty:
        yield f"it ran uncommitted code on top of commit {place.git.commit}: commit, and run it again"


def _list_packages(spec: RunSpec, place: Environment) -> list[tuple[str, str, str]]:
    """Name, version in the run and version here of the packages that may be later than the verifier's."""
    found = [(name, getattr(spec.versions, name), find_version(name) or "0.0") for name in ("torch", "transformers")]
    return found if place.triton is None else [*found, ("triton", place.triton, find_version("triton") or TRITON)]


def _list_wrong_versions(spec: RunSpec, place: Environment, lines: Sequence[Line]) -> Iterator[str]:
    versions = spec.versions
    if (place.kvbench, place.torch, place.transformers) != (versions.kvbench, versions.torch, versions.transformers):
        yield "the versions in its environment differ from its spec"
    stated = {"python": place.python, **dict(versions), "triton": place.triton}
    for name, value in stated.items():
        if value is not None and not VERSION.fullmatch(value):
            yield f"its version of {name} is {quote(value)}, which is not a version"
            return
    if not PYTHONS[0] <= _read_version(place.python) < PYTHONS[1]:
        yield f"it ran on Python {quote(place.python)}, on which kvbench does not run"
    if _read_version(versions.kvbench) > _read_version(__version__):
        yield f"kvbench {quote(versions.kvbench)} is later than the verifier's, {__version__}"
    for name, least in OLDEST.items():
        if (old := stated[name]) is not None and _read_version(old) < least:
            yield f"{name} {quote(old)} is older than any with which kvbench runs"
    ran = {name for x in lines for names in x.kernels.values() for name in names.split("+")}
    if place.triton is None and "triton" in {spec.kernels, *ran}:
        yield "operations ran in Triton, and its environment has no triton"
    for name, value, here in _list_packages(spec, place):
        if _read_version(value)[0] > _read_version(here)[0]:
            yield f"{name} {quote(value)} is not known: the verifier has {here}"


def _list_wrong_hardware(spec: RunSpec, place: Environment, lines: Sequence[Line]) -> Iterator[str]:
    """Hardware that contradicts the run's device, and a result of another machine than its journal's."""
    if (spec.device == "cuda") != (place.gpu is not None):
        yield f"it ran on device {quote(spec.device)}, its environment names GPU {quote(place.gpu)}"
    if spec.device == "cpu" and (there := sorted({*(place.device_map or {}).values()} - {"cpu", "disk"})):
        yield f"it ran on device 'cpu', parts of its model on {quote(there[0])}"
    for part, device in (place.device_map or {}).items():
        if not MODULE.fullmatch(part) or not DEVICE.fullmatch(device):
            yield f"its device map puts {quote(part)} on {quote(device)}, which is no part of a model or no device"
    machines = find_machines(lines)
    for x in machines:
        if (spec.device == "cuda") != (x.gpu is not None):
            yield f"it ran on device {quote(spec.device)}, its journal names GPU {quote(x.gpu)}"
    for cpu, gpu, threads in [(place.cpu, place.gpu, place.threads), *((x.cpu, x.gpu, x.threads) for x in machines)]:
        if not 1 <= threads <= MOST_THREADS:
            yield f"it ran on {threads} threads, possible are 1 to {MOST_THREADS}"
        if not PLACE.fullmatch(cpu) or (gpu is not None and not PLACE.fullmatch(gpu)):
            yield f"its processor {quote(cpu)} or GPU {quote(gpu)} is not the name of one"
    first = [x.machine is not None for x in lines if x.turn == 0 and x.error is None]
    if any(first) and not all(first):
        yield f"its journal names the machine of {sum(first)} of {len(first)} samples"
    if machines and not any((x.cpu, x.gpu, x.threads) == (place.cpu, place.gpu, place.threads) for x in machines):
        names = ", ".join(sorted({f"{x.gpu or x.cpu} with {x.threads} threads" for x in machines}))
        where = f"{place.gpu or place.cpu} with {place.threads} threads"
        yield f"its result names {quote(where)}, its journal {quote(names)}"


def _list_wrong_dates(
    place: Environment, lines: Sequence[Line], manifest: Manifest | None, now: datetime
) -> Iterator[str]:
    """Dates before kvbench or in the future, and samples that would not have ended yet."""
    packed = now
    if manifest is not None:
        found = _read_date(manifest.created)
        if found is None or found > now:
            yield f"it was packed at {quote(manifest.created)}, which is not a past time with a time zone"
            return
        packer = _read_version(manifest.kvbench)
        if not VERSION.fullmatch(manifest.kvbench) or not OLDEST["kvbench"] <= packer <= _read_version(__version__):
            yield f"kvbench {quote(manifest.kvbench)} packed it, which the verifier, {__version__}, does not know"
        packed = found
    took: dict[tuple[str, int], float] = {(place.started, -1): 0.0}
    for x in lines:
        took[x.started, x.index] = took.get((x.started, x.index), 0.0) + x.seconds
    for (text, index), seconds in took.items():
        what = "it" if index < 0 else f"sample {index}"
        started = _read_date(text)
        if started is None:
            yield f"{what} started at {quote(text)}, which is not a time with a time zone"
        elif started > now:
            yield f"{what} started at {quote(text)}, which is in the future"
        elif started < FIRST_COMMIT:
            yield f"{what} started at {quote(text)}, before the first commit of kvbench on {FIRST_COMMIT.date()}"
        elif seconds > (packed - started + timedelta(seconds=1)).total_seconds():  # times are cut to whole seconds
            yield f"{what} started at {quote(text)} and took {seconds:.0f} s: it had not ended when it was packed"


def _read_date(text: str) -> datetime | None:
    """A time with a time zone; None if the text is none."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return None if found.tzinfo is None else found


def _read_version(text: str) -> tuple[int, ...]:
    """The release of a version, of three numbers."""
    found = VERSION.fullmatch(text)
    return tuple(int(x or 0) for x in found.groups()) if found is not None else (0, 0, 0)
