"""Reads and writes the files of a bundle, as a folder or a plain tar. Everything read is untrusted."""

from __future__ import annotations

import io
import os
import shutil
import stat
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

from kvbench.leaderboard.submission.outcome import RefusedError, quote
from kvbench.leaderboard.submission.records import BUNDLED, MANIFEST, METHOD, RESULT, SAMPLES, SPEC, VERIFICATION
from kvbench.runs.files import saving

JOURNAL = "samples.jsonl"
"""The journal's name in a run's folder; a bundle holds it compressed."""
SCORES = "scores"
"""Folder that `kvbench score` writes next to the files of a run; it is no part of a bundle and never read."""
MIB = 1 << 20
MAX_BYTES = {
    SPEC: MIB, RESULT: MIB, MANIFEST: MIB, METHOD: MIB, VERIFICATION: MIB, SAMPLES: 64 * MIB, JOURNAL: 256 * MIB,
}
"""Maximum bytes of each file."""
MAX_TAR_BYTES = 68 * MIB
PART, TRASH = ".part-", ".gone-"
"""Beginnings of the names of folders that are being written or removed."""
PLAIN, EXTENDED = (tarfile.REGTYPE, tarfile.AREGTYPE), (tarfile.XHDTYPE, tarfile.XGLTYPE)
"""Types of the members of a tar: files, and headers that describe the next one or all."""


def find_bundles(path: Path) -> Iterator[Path]:
    """Yield the bundles below a path. Links are not followed, and folders whose names begin with a dot are skipped."""
    if path.is_file():
        yield path
    for folder, inner, names in os.walk(path):
        inner[:] = sorted(x for x in inner if not x.startswith("."))
        if {SPEC, RESULT, MANIFEST} & set(names):
            inner.clear()
            yield Path(folder)


def read_files(path: Path) -> dict[str, bytes]:
    """Read the files of a bundle from a folder or a tar; of an unpacked run, only spec, result and journal.

    Raises:
        RefusedError: a file is missing, too large, a link, or does not belong to a bundle.
    """
    try:
        return _read_folder(path) if path.is_dir() else _read_tar(path)
    except OSError as error:
        raise RefusedError("files", f"cannot be read: {error.strerror or type(error).__name__}") from error


def write_tar(files: Mapping[str, bytes], out: IO[bytes]) -> None:
    """Write a bundle as a plain tar; the same files give the same bytes."""
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name in (x for x in (*BUNDLED, METHOD, MANIFEST) if x in files):
            member = tarfile.TarInfo(name)
            member.size = len(files[name])
            tar.addfile(member, io.BytesIO(files[name]))


def write_folder(files: Mapping[str, bytes], folder: Path) -> None:
    """Write a new folder atomically: complete and synced to disk, or absent.

    Raises:
        SaveError: it cannot be written.
    """
    with saving(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=PART, dir=folder.parent))
        try:
            part.chmod(0o755)
            for name, data in files.items():
                with (part / name).open("wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
            _sync(part)
            part.rename(folder)
            _sync(folder.parent)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_size(name: str, data: bytes) -> bytes:
    """Return the data of a file, within its size limit.

    Raises:
        RefusedError: it is larger than such a file may be.
    """
    if len(data) > MAX_BYTES[name]:
        raise RefusedError("files", f"{name} is larger than {MAX_BYTES[name] // MIB} MiB")
    return data


def _read_folder(folder: Path) -> dict[str, bytes]:
    names = {x.name for x in os.scandir(folder)}
    journal = SAMPLES if SAMPLES in names else JOURNAL
    wanted = {SPEC, RESULT, journal}
    if MANIFEST in names:
        wanted |= {MANIFEST} | ({METHOD} & names)
        if extra := names - wanted - {VERIFICATION, SCORES}:
            raise RefusedError("files", f"{quote(min(extra))} is not a file of a bundle")
    if missing := wanted - names:
        raise RefusedError("files", f"{min(missing)} is missing")
    return {name: read_regular(folder / name) for name in sorted(wanted)}


def read_regular(path: Path) -> bytes:
    """Read a regular file of a name in MAX_BYTES, safe against replacement of the file between check and read.

    Raises:
        RefusedError: it is a link, not a regular file, or too large.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise RefusedError("files", f"{path.name} is a link, or cannot be read") from error
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise RefusedError("files", f"{path.name} is not a regular file")
        return check_size(path.name, file.read(MAX_BYTES[path.name] + 1))


def _read_tar(path: Path) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    if path.stat().st_size > MAX_TAR_BYTES:
        raise RefusedError("files", f"the tar is larger than {MAX_TAR_BYTES // MIB} MiB")
    try:
        with path.open("rb") as tar:
            for member, data in _read_members(tar):
                if member.name not in {*BUNDLED, METHOD, MANIFEST} or member.name in files:
                    raise RefusedError("files", f"{quote(member.name)} is not a file of a bundle, or occurs twice")
                if member.type not in PLAIN:
                    raise RefusedError("files", f"{member.name} is not a regular file")
                if len(data) < member.size:
                    raise RefusedError("files", f"{member.name} is incomplete")
                files[member.name] = check_size(member.name, data)
    except (tarfile.TarError, ValueError) as error:
        raise RefusedError("files", f"not a readable tar: {quote(str(error))}") from error
    if missing := {*BUNDLED, MANIFEST} - files.keys():
        raise RefusedError("files", f"{min(missing)} is missing")
    return files


def _read_members(tar: IO[bytes]) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
    """Yield members with their data. Extended headers are skipped: tarfile takes minutes and gigabytes for large ones.

    Raises:
        TarError, ValueError: a header is invalid.
    """
    while (block := tar.read(tarfile.BLOCKSIZE)).strip(b"\0") or tar.tell() == 0:  # an empty file has no header
        member = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        if not 0 <= member.size <= MAX_TAR_BYTES:
            raise tarfile.ReadError(f"a member of {member.size:,} bytes")
        padding = -member.size % tarfile.BLOCKSIZE
        if member.type in EXTENDED:
            tar.seek(member.size + padding, os.SEEK_CUR)
        else:
            yield member, tar.read(member.size)
            tar.seek(padding, os.SEEK_CUR)
