"""Read the files of a run as untrusted input; write them so that no finished sample is lost.

runs/<run_id>/spec.json, samples.jsonl (or samples.jsonl.gz), result.json
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gzip
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from kvbench.errors import UserError, first_line
from kvbench.log import say
from kvbench.runs.journal import Answer, Line
from kvbench.runs.schema import SCHEMA_VERSION, exceeds, upgrade

T = TypeVar("T", bound=BaseModel)
L = TypeVar("L", Line, Answer)
MOST_UNPACKED = 1 << 30
"""Most bytes that are unpacked from a compressed journal, which may be hostile."""
MOST_NUMBER = 2**63 - 1
"""Largest integer of a file; a hostile one can be too large for a float."""
FULL = (errno.ENOSPC, errno.EDQUOT)
HINT = "Give the folder of a run, as `kvbench run` prints it."
RENEW = "Delete result.json and run the command again; no sample is lost."


class SaveError(UserError):
    """A file could not be written. Everything saved before stays."""

    exit_code = 1


class Journal:
    """samples.jsonl, open for appending complete samples.

    Opening it drops incomplete lines and incomplete samples that an interrupted run left, and unpacks a packed journal.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines = read_lines(path) if has_journal(path) else []
        self.finished = finished_samples(self.lines)
        self.lines = [x for x in self.lines if x.index in self.finished]
        text = "".join(f"{x.model_dump_json()}\n" for x in self.lines)
        packed = not path.exists()
        if text.encode() != (b"" if packed else path.read_bytes()):
            write_atomic(path, text)
        with saving(path):
            if packed:
                _packed(path).unlink(missing_ok=True)
            self._file = path.open("ab", buffering=0)

    def append(self, lines: Sequence[Line]) -> None:
        """Write all lines of one sample and flush them to disk.

        Raises:
            SaveError: the disk is full or read-only; no part of the sample is left.
        """
        data = "".join(f"{x.model_dump_json()}\n" for x in lines).encode()
        before = os.fstat(self._file.fileno()).st_size
        with saving(self.path):
            try:
                view = memoryview(data)
                while view:
                    view = view[self._file.write(view) :]
                os.fsync(self._file.fileno())
            except OSError:
                with contextlib.suppress(OSError):
                    self._file.truncate(before)
                raise
        self.lines += lines
        self.finished.add(lines[0].index)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def has_journal(path: Path) -> bool:
    """Whether a journal is there and not empty; curated results pack it as samples.jsonl.gz."""
    return any(x.is_file() and x.stat().st_size > 0 for x in (path, _packed(path)))


def _packed(path: Path) -> Path:
    return path.with_name(f"{path.name}.gz")


def read_lines(path: Path) -> list[Line]:
    """Read the lines of a journal, one per sample and turn. Broken lines are skipped and reported.

    Raises:
        UserError: the file cannot be read, or a line is of an unknown schema version.
    """
    return _read_lines(path, Line)


def read_answers(path: Path) -> list[Answer]:
    """As `read_lines`, with only the fields for comparisons, ten times as fast."""
    return _read_lines(path, Answer)


def _read_lines(path: Path, kind: type[L]) -> list[L]:
    try:
        *parts, tail = _read_journal(path).split(b"\n")
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read: {_reason(error)}. {HINT}") from error
    lines: dict[tuple[int, int], L] = {}
    for number, part in enumerate(parts, 1):
        try:
            line = _read_line(part, kind, path)
        except (ValueError, RecursionError) as error:
            say(f"{path}: line {number} is broken and skipped: {_reason(error)}.")
        else:
            lines.setdefault((line.index, line.turn), line)
    if tail:
        say(f"{path}: the last line is cut off and skipped; {len(parts)} complete lines are used.")
    return list(lines.values())


def _read_line(part: bytes, kind: type[L], path: Path) -> L:
    with contextlib.suppress(ValidationError):  # fast path; lines that fail are read again below
        line = kind.model_validate_json(part)
        if "schema_version" in line.model_fields_set:
            return line
    return kind.model_validate(_migrate(json.loads(part), path))


def _read_journal(path: Path) -> bytes:
    """The bytes of a journal, packed or not."""
    packed = _packed(path)
    if path.exists() or not packed.exists():
        return path.read_bytes()
    with gzip.open(packed) as file:
        data = file.read(MOST_UNPACKED + 1)
    if len(data) > MOST_UNPACKED:
        raise UserError(f"{packed} unpacks to more than {MOST_UNPACKED >> 20} MiB: not read.")
    return data


def finished_samples(lines: Sequence[Line]) -> set[int]:
    """Indices of samples that have all turns, or an error, and no line beyond them."""
    turns: dict[int, set[int]] = {}
    wanted: dict[int, int] = {}
    for x in lines:
        turns.setdefault(x.index, set()).add(x.turn)
        wanted[x.index] = x.turn + 1 if x.error is not None else x.turns
    # A hostile line may want more turns than fit into memory: their number is compared first.
    return {i for i, n in wanted.items() if i >= 0 and len(turns[i]) == n and turns[i] == set(range(n))}


def read_file(path: Path, kind: type[T]) -> T:
    """Read a JSON file of a run.

    Raises:
        UserError: missing, not JSON, of an unknown schema version, or not a valid record.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {_reason(error)}. {HINT}") from error
    try:
        return kind.model_validate(_migrate(json.loads(text, parse_int=_read_int), path))
    except (ValueError, RecursionError) as error:
        hint = f" {RENEW}" if path.name == "result.json" else ""
        raise UserError(f"{path} is not a valid file of kvbench: {_reason(error)}.{hint}") from error


def _read_int(text: str) -> int:
    if exceeds(text, MOST_NUMBER):
        raise ValueError(f"number {text[:20]}... is too large")
    return int(text)


def _migrate(data: Any, path: Path) -> Any:
    """Upgrade a document to the current names, and refuse unknown schema versions."""
    if not isinstance(data, dict) or "schema_version" not in data:
        raise ValueError("no schema_version")
    version = data["schema_version"]
    if version not in (1, SCHEMA_VERSION):
        raise UserError(
            f"{path} has schema version {version!r}; this kvbench reads 1 and {SCHEMA_VERSION}. "
            "Use the kvbench that wrote it."
        )
    return upgrade(data)


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return first_line(error)


def write_atomic(path: Path, text: str) -> None:
    """Write a file atomically.

    Raises:
        SaveError: the disk is full or read-only.
    """
    with saving(path):
        replace_file(path, text.encode())


def replace_file(path: Path, data: bytes) -> None:
    """Write a file completely, or leave the one that is there and raise an OSError."""
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def write_record(path: Path, record: BaseModel) -> None:
    """Write a model as indented JSON, atomically."""
    write_atomic(path, json.dumps(record.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n")


@contextlib.contextmanager
def saving(path: Path) -> Iterator[None]:
    """Turn an OSError into a SaveError with the next step."""
    try:
        yield
    except OSError as error:
        remedy = "free disk space" if error.errno in FULL else "correct that"
        raise SaveError(
            f"cannot save {path}: {_reason(error)}. Everything saved before is kept: {remedy}, then run the same "
            "command."
        ) from error


@contextlib.contextmanager
def locked(folder: Path, option: str = "--out") -> Iterator[None]:
    """Lock a run's folder against other processes. option: names the place in messages.

    Raises:
        UserError: another process holds the lock, or the folder cannot be created or locked.
    """
    with saving(folder):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if error.errno in FULL:
                raise
            raise UserError(f"folder {folder} cannot be created: {_reason(error)}. Give another {option}.") from error
    with holding(folder / ".lock", folder, option):
        yield


@contextlib.contextmanager
def holding(lock: Path, place: Path, option: str) -> Iterator[None]:
    """Hold a lock file against other processes. place, option: what it locks, and how to give another, for messages.

    Raises:
        UserError: another process holds the lock, or the place cannot be locked.
    """
    with saving(place):
        file = lock.open("a")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another process is working on {place}. Wait for it, or give another {option}."
            ) from None
        except OSError as error:  # of a file system without locks
            raise UserError(
                f"{place} cannot be locked against other processes: {_reason(error)}. Give {option} on another file "
                "system."
            ) from error
        yield
