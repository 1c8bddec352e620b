"""The folder of a site: written whole beside the old one, which it then replaces; nothing else is ever replaced."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from kvbench.errors import UserError
from kvbench.runs.files import locked, saving

MARK = ".kvbench-site"
"""A file by which a folder is known as a site of ours."""


def check_output(results: Path, output: Path) -> None:
    """Refuse to write where something else is.

    Raises:
        UserError: the output is a file, a folder of something else, or one that holds the results or lies in them.
    """
    here, there = output.resolve(), results.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise UserError(f"the site '{output}' and the results '{results}' lie in one another. Give another -o.")
    if output.is_symlink() or (output.exists() and not output.is_dir()):
        raise UserError(f"'{output}' is no folder. Give another -o.")
    if output.is_dir() and any(output.iterdir()) and not (output / MARK).is_file():
        raise UserError(
            f"'{output}' holds something that is no site of kvbench's, and is left as it is. Give another -o, or "
            "remove it yourself."
        )


def write_site(files: Iterable[tuple[str, bytes]], output: Path) -> None:
    """Write all files, then put them in the place of what was there: nobody sees half a site.

    Raises:
        SaveError: the disk is full or read-only; the old site stays.
        UserError: somebody else is building there.
    """
    output = output.resolve()
    work = output.parent / f".{output.name}.building"
    old, new = work / "old", work / "new"
    with locked(work), saving(output):
        try:
            for left in (old, new):
                shutil.rmtree(left, ignore_errors=True)  # of a build that was killed
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
