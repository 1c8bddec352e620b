"""Writes the site: built next to the old one, then swapped in. Any other folder is left alone."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from kvbench.errors import UserError
from kvbench.runs.files import locked, saving

MARK = ".kvbench-site"
"""File that marks a folder as a site of kvbench."""


def check_output(results: Path, output: Path) -> None:
    """Refuse to overwrite anything but a site.

    Raises:
        UserError: the output is a file or another folder, or it and the results contain one another.
    """
    here, there = output.resolve(), results.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise UserError(f"the site '{output}' and the results '{results}' contain one another. Give another -o.")
    if output.is_symlink() or (output.exists() and not output.is_dir()):
        raise UserError(f"'{output}' is not a folder. Give another -o.")
    if output.is_dir() and any(output.iterdir()) and not (output / MARK).is_file():
        raise UserError(
            f"'{output}' is not empty and is not a site of kvbench. Give another -o, or "
            "remove it yourself."
        )


def write_site(files: Iterable[tuple[str, bytes]], output: Path) -> None:
    """Write all files to a temporary folder, then replace the old site in one step.

    Raises:
        SaveError: the disk is full or read-only; the old site stays.
        UserError: another process is building there.
    """
    output = output.resolve()
    work = output.parent / f".{output.name}.building"
    old, new = work / "old", work / "new"
    with locked(work, "-o"), saving(output):
        try:
            for left in (old, new):
                shutil.rmtree(left, ignore_errors=True)  # left by a build that was killed
            for name, content in files:
                path = new / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            (new / MARK).touch()
            if output.exists():
                output.rename(old)
            new.rename(output)
        finally:
            shutil.rmtree(work, ignore_errors=True)
