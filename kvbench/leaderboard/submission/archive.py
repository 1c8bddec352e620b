"""The files of a bundle, in a folder or in a plain tar: read from whoever sent them, and written."""

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

from kvbench.leaderboard.submission.records import BUNDLED, MANIFEST, RESULT, SAMPLES, SPEC, VERIFICATION
from kvbench.leaderboard.verification.outcome import RefusedError, show
from kvbench.runs.files import saving

JOURNAL = "samples.jsonl"
"""As a run writes it; a bundle has it packed."""
MIB = 1 << 20
LARGEST = {SPEC: MIB, RESULT: MIB, MANIFEST: MIB, VERIFICATION: MIB, SAMPLES: 64 * MIB, JOURNAL: 256 * MIB}
"""Most bytes of each file."""
LARGEST_TAR = 68 * MIB
PLAIN = (tarfile.REGTYPE, tarfile.AREGTYPE)


def find_bundles(path: Path) -> Iterator[Path]:
    """A bundle, or all below a folder; links are not followed, and folders whose name begins with a dot not entered."""
    if path.is_file():
        yield path
    for folder, inner, names in os.walk(path):
        inner[:] = sorted(x for x in inner if not x.startswith("."))
        if {SPEC, RESULT, MANIFEST} & set(names):
            inner.clear()
            yield Path(folder)


def read_files(path: Path) -> dict[str, bytes]:
    """The files of a bundle by name, from its folder or its tar; of a run that was never packed, those that matter.

    Raises:
        RefusedError: one is missing, too large, a link, or not to be there.
    """
    try:
        return _read_folder(path) if path.is_dir() else _read_tar(path)
    except OSError as error:
        raise RefusedError("files", f"cannot be read: {error.strerror or type(error).__name__}") from error


def write_tar(files: Mapping[str, bytes], out: IO[bytes]) -> None:
    """A bundle's files as one plain tar, the same bytes for the same files."""
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name in (*BUNDLED, MANIFEST):
            member = tarfile.TarInfo(name)
            member.size = len(files[name])
            tar.addfile(member, io.BytesIO(files[name]))


def write_folder(files: Mapping[str, bytes], folder: Path) -> None:
    """A folder with these files, whole or not at all, and on the disk when this returns; there is none yet.

    Raises:
        SaveError: it cannot be written.
    """
    with saving(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=".", dir=folder.parent))
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


def within(name: str, data: bytes) -> bytes:
    """The data of a file.

    Raises:
        RefusedError: it is larger than such a file may be.
    """
    if len(data) > LARGEST[name]:
        raise RefusedError("files", f"{name} has more than {LARGEST[name] // MIB} MiB")
    return data


def _read_folder(folder: Path) -> dict[str, bytes]:
    names = {x.name for x in os.scandir(folder)}
    journal = SAMPLES if SAMPLES in names else JOURNAL
    wanted = {SPEC, RESULT, journal}
    if MANIFEST in names:
        wanted |= {MANIFEST}
        if extra := names - wanted - {VERIFICATION}:
            raise RefusedError("files", f"{show(min(extra))} is no file of a bundle")
    if missing := wanted - names:
        raise RefusedError("files", f"{min(missing)} is missing")
    return {name: read_regular(folder / name) for name in sorted(wanted)}


def read_regular(path: Path) -> bytes:
    """A regular file of one of the names in LARGEST, whatever the name has become since it was looked at.

    Raises:
        RefusedError: it is a link or no regular file, or larger than such a file may be.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise RefusedError("files", f"{path.name} is a link, or cannot be read") from error
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise RefusedError("files", f"{path.name} is no regular file")
        return within(path.name, file.read(LARGEST[path.name] + 1))


def _read_tar(path: Path) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    if path.stat().st_size > LARGEST_TAR:
        raise RefusedError("files", f"the tar has more than {LARGEST_TAR // MIB} MiB")
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                if member.name not in {*BUNDLED, MANIFEST} or member.name in files:
                    raise RefusedError("files", f"{show(member.name)} is no file of a bundle, or comes twice")
                file = tar.extractfile(member) if member.type in PLAIN and member.sparse is None else None
                if file is None:
                    raise RefusedError("files", f"{member.name} is no regular file")
                data = file.read(LARGEST[member.name] + 1)
                if len(data) < min(member.size, LARGEST[member.name]):
                    raise RefusedError("files", f"{member.name} is cut off")
                files[member.name] = within(member.name, data)
    except (tarfile.TarError, ValueError, EOFError, RecursionError) as error:  # headers of headers of headers
        raise RefusedError("files", f"no readable tar: {show(str(error))}") from error
    if missing := {*BUNDLED, MANIFEST} - files.keys():
        raise RefusedError("files", f"{min(missing)} is missing")
    return files
