"""A run as it is submitted: packed with its manifest, and read back as records that agree with one another."""

from __future__ import annotations

import gzip
import hashlib
import io
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from kvbench import __version__
from kvbench.errors import UserError
from kvbench.leaderboard.submission.archive import JOURNAL, LARGEST, read_files, within
from kvbench.leaderboard.submission.documents import parse
from kvbench.leaderboard.submission.records import MANIFEST, RESULT, SAMPLES, SPEC, FileEntry, Manifest, hash_content
from kvbench.leaderboard.verification.outcome import RefusedError, show
from kvbench.runs.files import finished_samples
from kvbench.runs.journal import Line
from kvbench.runs.results import Result
from kvbench.runs.spec import RunSpec

MOST = {"samples": 10_000, "turns": 1_000, "length": 1 << 21}
"""Of a spec; what is more is nothing that a verifier could make again."""
MOST_LINES = 100_000
LONGEST_LINE = 4 << 20
"""Bytes of a journal's line."""


@dataclass(frozen=True)
class Head:
    """What stands in the files beside the journal, its parts agreeing with one another."""

    files: Mapping[str, bytes]
    """By name, the manifest's among them."""
    manifest: Manifest | None
    """None: a run that nobody submitted."""
    content: str
    """As Manifest.content."""
    spec: RunSpec
    result: Result

    @property
    def submitter(self) -> str | None:
        """Who sent it."""
        return None if self.manifest is None else self.manifest.submitter


@dataclass(frozen=True)
class Bundle(Head):
    """All of it."""

    lines: tuple[Line, ...]
    """By sample and turn."""


def pack_run(folder: Path, submitter: str, tuned_on: tuple[str, ...]) -> dict[str, bytes]:
    """The files of a finished run, and their manifest.

    Raises:
        RefusedError: a file is missing or too large.
        UserError: no such name can stand in a manifest.
    """
    files = read_files(folder)
    if JOURNAL in files:
        files[SAMPLES] = gzip.compress(files.pop(JOURNAL), mtime=0)
    files.pop(MANIFEST, None)
    run_id = parse(files[SPEC], RunSpec, SPEC).run_id
    try:
        manifest = Manifest(
            run_id=run_id, submitter=submitter, tuned_on=tuned_on, kvbench=__version__, files=_list(files),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )
    except ValidationError as error:
        option = f"--{str(error.errors()[0]['loc'][0]).replace('_', '-')}"
        raise UserError(
            f"{option} {error.errors()[0]['input']!r} cannot stand in a manifest. A submitter is a name of plain "
            "letters, digits, '.', '_' and '-'; what settings were tuned on is TASK, TASK:dev or TASK:test."
        ) from error
    return {**files, MANIFEST: f"{manifest.model_dump_json(indent=1)}\n".encode()}


def open_bundle(files: Mapping[str, bytes]) -> Bundle:
    """The records in the files.

    Raises:
        RefusedError: the manifest lies, a file is not what it should be, or one does not agree with another.
    """
    head = open_head(files)
    return Bundle(head.files, head.manifest, head.content, head.spec, head.result, _read_lines(files, head.spec))


def open_head(files: Mapping[str, bytes]) -> Head:
    """As `open_bundle`, but for the journal, which takes a hundred times as long.

    Raises:
        RefusedError: as there.
    """
    manifest = parse(files[MANIFEST], Manifest, MANIFEST) if MANIFEST in files else None
    found = _list({name: data for name, data in files.items() if name != MANIFEST})
    if manifest is not None and manifest.files != found:
        wrong = [x for x in sorted(manifest.files | found) if manifest.files.get(x) != found.get(x)]
        raise RefusedError("manifest", f"the manifest is not of these files: {show(wrong[0])} differs")
    spec, result = parse(files[SPEC], RunSpec, SPEC), parse(files[RESULT], Result, RESULT)
    for name, value in (("samples", spec.samples), ("turns", spec.turns), ("length", spec.task.length)):
        if not 1 <= value <= MOST[name]:
            raise RefusedError("schema", f"{SPEC}: {name} {value} is not in 1 to {MOST[name]:,}")
    if wrong := [name for name, (said, true) in _repeated(spec, result).items() if said != true]:
        raise RefusedError("schema", f"{RESULT}: its {wrong[0]} is not what {SPEC} has")
    if manifest is not None and manifest.run_id != spec.run_id:
        raise RefusedError("schema", f"{MANIFEST}: run_id {show(manifest.run_id)} is not the spec's, {spec.run_id}")
    return Head(files, manifest, hash_content(found), spec, result)


def _list(files: Mapping[str, bytes]) -> dict[str, FileEntry]:
    return {
        name: FileEntry(sha256=hashlib.sha256(data).hexdigest(), size=len(data)) for name, data in sorted(files.items())
    }


def _repeated(spec: RunSpec, result: Result) -> dict[str, tuple[object, object]]:
    """What a result repeats of its spec, with what the spec says."""
    return {
        "spec": (result.spec, spec), "run_id": (result.run_id, spec.run_id), "suite": (result.suite, spec.suite),
        "model": (result.model, spec.model), "task": (result.task, spec.task),
        "method": (result.method.model_dump(exclude={"card"}), spec.method.model_dump()),
        "mode": (result.mode, spec.mode), "visibility": (result.visibility, spec.visibility),
        "history": (result.history, spec.history), "budget": (result.budget.asked, spec.budget),
        "n_samples": (result.n_samples, spec.samples),
    }


def _read_lines(files: Mapping[str, bytes], spec: RunSpec) -> tuple[Line, ...]:
    """All lines, each (sample, turn) once, and every sample whole.

    Raises:
        RefusedError: they are not.
    """
    lines = sorted(
        (parse(part, Line, f"{JOURNAL} line {number}") for number, part in enumerate(split_journal(files), 1)),
        key=lambda x: (x.index, x.turn),
    )
    seen: set[tuple[int, int]] = set()
    ended: set[int] = set()
    for x in lines:
        where = f"sample {x.index} turn {x.turn}"
        if not (0 <= x.index < spec.samples and 0 <= x.turn < x.turns <= MOST["turns"]):
            raise RefusedError("journal", f"{where} is none of the run's")
        if (x.index, x.turn) in seen or x.index in ended:
            raise RefusedError("journal", f"{where} comes twice, or after the error that ended its sample")
        if (least := min(_amounts(x))) < 0:
            raise RefusedError("journal", f"{where} has a negative amount, {least:g}")
        seen.add((x.index, x.turn))
        ended |= {x.index} if x.error is not None else set()
    if missing := set(range(spec.samples)) - finished_samples(lines):
        raise RefusedError("journal", f"sample {min(missing)} is not there with all of its turns")
    return tuple(lines)


def _amounts(line: Line) -> Iterator[float]:
    """Numbers of a line that count or measure something."""
    yield line.seconds
    for part in (line.bytes, line.tokens, line.times):
        if part is not None:
            yield from (x for x in part.model_dump().values() if x is not None)
    if line.effect is not None:
        yield from (line.effect.entries_seen, *line.effect.entries_kept)


def split_journal(files: Mapping[str, bytes]) -> list[bytes]:
    """The journal's lines, each not yet looked at.

    Raises:
        RefusedError: they are too many or too long, the last is cut off, or the journal cannot be unpacked.
    """
    *parts, tail = _read_journal(files).split(b"\n", MOST_LINES)
    if tail:
        raise RefusedError("journal", f"its last line is cut off, or it has more than {MOST_LINES:,}")
    if (longest := max(map(len, parts), default=0)) > LONGEST_LINE:
        raise RefusedError("journal", f"a line of {longest:,} bytes; at most {LONGEST_LINE:,} are read")
    return parts


def _read_journal(files: Mapping[str, bytes]) -> bytes:
    """The journal's text, packed or not.

    Raises:
        RefusedError: it cannot be unpacked, or comes to too much.
    """
    if JOURNAL in files:
        return files[JOURNAL]
    try:
        with gzip.open(io.BytesIO(files[SAMPLES])) as file:
            return within(JOURNAL, file.read(LARGEST[JOURNAL] + 1))
    except (OSError, EOFError, zlib.error) as error:
        raise RefusedError("files", f"{SAMPLES} cannot be unpacked") from error
