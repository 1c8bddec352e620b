"""Bundles: packs a run with its manifest, and reads it back as records that agree with each other."""

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
from kvbench.leaderboard.submission.archive import JOURNAL, MAX_BYTES, check_size, read_files
from kvbench.leaderboard.submission.outcome import RefusedError, quote
from kvbench.leaderboard.submission.records import (
    BUNDLED,
    HANDLE_RULE,
    MANIFEST,
    METHOD,
    RESULT,
    SAMPLES,
    SPEC,
    BundledFile,
    Manifest,
    hash_content,
)
from kvbench.leaderboard.submission.strict_json import MAX_NUMBER, parse
from kvbench.runs.files import finished_samples
from kvbench.runs.journal import Line
from kvbench.runs.protocol import resolve_protocol
from kvbench.runs.provenance import hash_contents
from kvbench.runs.results import Result
from kvbench.runs.spec import RunSpec

LIMITS = {"samples": (1, 10_000), "turns": (1, 1_000), "length": (1, 1 << 21), "seed": (0, MAX_NUMBER)}
"""Limits of a spec; a verifier cannot reproduce larger runs."""
LINK_RULE = "A link is an https:// address of at most 200 characters, with a host name and no user name or port."
RULES = {
    "submitter": HANDLE_RULE,
    "source": "A source's name consists of ASCII letters, digits, '.', '_' and '-', and ends in .py.",
    "tuned_on": "Tuning data are TASK, TASK:dev or TASK:test, at most 64 of them.",
    "code_url": LINK_RULE, "paper_url": LINK_RULE,
}
"""Rules of the fields of a manifest that a submitter writes."""
MAX_LINES = 100_000
MAX_LINE_BYTES = 4 << 20
"""Bytes of one line of the journal."""


@dataclass(frozen=True)
class Head:
    """The files of a bundle without the journal, parsed and consistent."""

    files: Mapping[str, bytes]
    """By name, including the manifest."""
    manifest: Manifest | None
    """None: a run that is not a submission."""
    content: str
    """As Manifest.content."""
    spec: RunSpec
    result: Result

    @property
    def submitter(self) -> str | None:
        """Name of the submitter, if it is a submission."""
        return None if self.manifest is None else self.manifest.submitter

    @property
    def manifest_sha256(self) -> str | None:
        """SHA-256 of the manifest, if it is a submission."""
        return hashlib.sha256(self.files[MANIFEST]).hexdigest() if MANIFEST in self.files else None


@dataclass(frozen=True)
class Bundle(Head):
    """A bundle with its journal."""

    lines: tuple[Line, ...]
    """Sorted by sample and turn."""


def pack_run(
    folder: Path, submitter: str, tuned_on: tuple[str, ...], source: Path | None = None, *,
    code_url: str | None = None, paper_url: str | None = None,
) -> dict[str, bytes]:
    """Pack a finished run and its manifest. source: the file of the method, for runs whose method is not kvbench's.

    Raises:
        RefusedError: a file is missing, too large or invalid.
        UserError: the source is missing, or not the code that ran; or a manifest does not allow the name of the
            submitter, of the tuning data or of the source, or a link.
    """
    files = read_files(folder)
    if JOURNAL in files:
        files[SAMPLES] = gzip.compress(files.pop(JOURNAL), mtime=0)
    files = {name: files[name] for name in BUNDLED}
    spec = parse(files[SPEC], RunSpec, SPEC)
    parse(files[RESULT], Result, RESULT)
    if (content := _read_source(spec, source)) is not None:
        files[METHOD] = check_size(METHOD, content)
    try:
        manifest = Manifest(
            run_id=spec.run_id, submitter=submitter, tuned_on=tuned_on, kvbench=__version__, files=_list(files),
            source=source.name if source is not None and METHOD in files else None,
            code_url=code_url, paper_url=paper_url, created=datetime.now(UTC).isoformat(timespec="seconds"),
        )
    except ValidationError as error:
        name, given = str(error.errors()[0]["loc"][0]), error.errors()[0]["input"]
        option = f"--{name.replace('_', '-')}"
        raise UserError(f"{option} {given!r} is not allowed in a manifest. {RULES[name]}") from error
    return {**files, MANIFEST: f"{manifest.model_dump_json(indent=1)}\n".encode()}


def _read_source(spec: RunSpec, source: Path | None) -> bytes | None:
    """The content of the method's source; None: the method is one of kvbench's."""
    name, code = spec.method.name, spec.method.code
    if code is None:
        return None
    if source is None:
        raise UserError(f"method {name} is a file of your own. Give it with --source: it is shown next to the run.")
    try:
        content = source.read_bytes()
    except OSError as error:
        raise UserError(f"--source {source} cannot be read: {error.strerror}. Give the method's file.") from error
    if hash_contents([(source.name, content)]) != code:
        raise UserError(
            f"--source {source} is not the code that ran. Give the unchanged file of method {name}; a submitted method "
            "is one file and imports no other file of yours."
        )
    return content


def open_bundle(files: Mapping[str, bytes]) -> Bundle:
    """Parse the files of a bundle, journal included.

    Raises:
        RefusedError: the manifest does not match, a file is invalid, or files contradict each other.
    """
    head = open_head(files)
    return Bundle(head.files, head.manifest, head.content, head.spec, head.result, _read_lines(files, head.spec))


def open_head(files: Mapping[str, bytes]) -> Head:
    """Parse the files of a bundle without the journal, which takes a hundred times as long.

    Raises:
        RefusedError: as for `open_bundle`.
    """
    manifest = parse(files[MANIFEST], Manifest, MANIFEST) if MANIFEST in files else None
    found = _list({name: data for name, data in files.items() if name != MANIFEST})
    if manifest is not None and manifest.files != found:
        wrong = [x for x in sorted(manifest.files | found) if manifest.files.get(x) != found.get(x)]
        raise RefusedError("manifest", f"the manifest does not match the files: {quote(wrong[0])} differs")
    if manifest is not None and (manifest.source is None) is (METHOD in files):
        raise RefusedError("manifest", f"its source is {quote(manifest.source)}, which does not fit its files")
    spec, result = parse(files[SPEC], RunSpec, SPEC), parse(files[RESULT], Result, RESULT)
    asked = {"samples": spec.samples, "turns": spec.turns, "length": spec.task.length, "seed": spec.seed}
    for name, value in asked.items():
        least, most = LIMITS[name]
        if not least <= value <= most:
            raise RefusedError("schema", f"{SPEC}: {name} {value} is not between {least} and {most:,}")
    if spec.model.kind == "autoregressive":  # a diffusion model has one visibility in every mode
        try:
            resolve_protocol(
                spec.mode, spec.visibility, spec.history, spec.turns, recompress=spec.recompress, default_turns=1
            )
        except UserError as error:
            raise RefusedError("schema", f"{SPEC}: {error}") from error
    if wrong := [name for name, (stated, true) in _list_copied_fields(spec, result).items() if stated != true]:
        raise RefusedError("schema", f"{RESULT}: its {wrong[0]} differs from {SPEC}")
    if manifest is not None and manifest.run_id != spec.run_id:
        raise RefusedError(
            "schema", f"{MANIFEST}: run_id {quote(manifest.run_id)} differs from the spec's, {spec.run_id}"
        )
    return Head(files, manifest, hash_content(found), spec, result)


def _list(files: Mapping[str, bytes]) -> dict[str, BundledFile]:
    return {
        name: BundledFile(sha256=hashlib.sha256(data).hexdigest(), size=len(data))
        for name, data in sorted(files.items())
    }


def _list_copied_fields(spec: RunSpec, result: Result) -> dict[str, tuple[object, object]]:
    """Fields that a result copies from its spec, each with both values."""
    return {
        "spec": (result.spec, spec), "run_id": (result.run_id, spec.run_id), "suite": (result.suite, spec.suite),
        "model": (result.model, spec.model), "task": (result.task, spec.task),
        "method": (result.method.model_dump(exclude={"card"}), spec.method.model_dump()),
        "mode": (result.mode, spec.mode), "visibility": (result.visibility, spec.visibility),
        "history": (result.history, spec.history), "budget": (result.budget.asked, spec.budget),
        "n_samples": (result.n_samples, spec.samples),
    }


def _read_lines(files: Mapping[str, bytes], spec: RunSpec) -> tuple[Line, ...]:
    """Parse all lines: each (sample, turn) once, and every sample complete.

    Raises:
        RefusedError: a line is invalid, repeated or missing.
    """
    lines = sorted(
        (parse(part, Line, f"{JOURNAL} line {number}") for number, part in enumerate(split_journal(files), 1)),
        key=lambda x: (x.index, x.turn),
    )
    seen: set[tuple[int, int]] = set()
    ended: set[int] = set()
    for x in lines:
        where = f"sample {x.index} turn {x.turn}"
        if not (0 <= x.index < spec.samples and 0 <= x.turn < x.turns <= LIMITS["turns"][1]):
            raise RefusedError("journal", f"{where} is not part of the run")
        if (x.index, x.turn) in seen or x.index in ended:
            raise RefusedError("journal", f"{where} occurs twice, or after the error that ended its sample")
        if (least := min(_list_amounts(x))) < 0:
            raise RefusedError("journal", f"{where} has a negative amount, {least:g}")
        seen.add((x.index, x.turn))
        ended |= {x.index} if x.error is not None else set()
    if missing := set(range(spec.samples)) - finished_samples(lines):
        raise RefusedError("journal", f"sample {min(missing)} is missing, or lacks some of its turns")
    return tuple(lines)


def _list_amounts(line: Line) -> Iterator[float]:
    """All numbers of a line that count or measure something."""
    yield line.seconds
    for part in (line.bytes, line.tokens, line.times, line.lossless, line.reuse, line.batch):
        if part is not None:
            yield from (x for x in part.model_dump().values() if isinstance(x, int | float))
    if line.effect is not None:
        yield from (line.effect.entries_seen, *line.effect.entries_kept)


def split_journal(files: Mapping[str, bytes]) -> list[bytes]:
    """Split the journal into lines without parsing them.

    Raises:
        RefusedError: too many or too long lines, an incomplete last line, or a journal that cannot be decompressed.
    """
    *parts, tail = _read_journal(files).split(b"\n", MAX_LINES)
    if tail:
        raise RefusedError("journal", f"its last line is incomplete, or it has more than {MAX_LINES:,} lines")
    if (longest := max(map(len, parts), default=0)) > MAX_LINE_BYTES:
        raise RefusedError("journal", f"a line has {longest:,} bytes; the limit is {MAX_LINE_BYTES:,}")
    return parts


def _read_journal(files: Mapping[str, bytes]) -> bytes:
    """Return the decompressed journal.

    Raises:
        RefusedError: it cannot be decompressed, or is too large.
    """
    if JOURNAL in files:
        return files[JOURNAL]
    try:
        with gzip.open(io.BytesIO(files[SAMPLES])) as file:
            return check_size(JOURNAL, file.read(MAX_BYTES[JOURNAL] + 1))
    except (OSError, EOFError, zlib.error) as error:
        raise RefusedError("files", f"{SAMPLES} cannot be decompressed") from error
