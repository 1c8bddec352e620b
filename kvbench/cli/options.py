"""Options that several commands share."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from kvbench.errors import UserError


def expand_home(path: Path | None) -> Path | None:
    """A path whose first part may be `~`, which a shell leaves as it is in `--out=~/runs`."""
    return None if path is None else path.expanduser()


Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON line, last on standard output.")]
Out = Annotated[Path, typer.Option(help="Folder in which run ids are looked up.", callback=expand_home)]
RunsOut = Annotated[Path, typer.Option(help="Folder of runs.", callback=expand_home)]
Baseline = Annotated[str | None, typer.Option(
    help="Method or id of the run that the others are compared with. Default: the full cache."
)]


def check_results(folders: Iterable[Path]) -> None:
    """Refuse a folder of --results that does not exist.

    Raises:
        UserError: there is none of this name.
    """
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"folder '{folder}' does not exist. Give a folder of runs with --results.")


def read_seconds(option: str, text: str, example: str, *, positive: bool = False) -> tuple[float, float]:
    """Two declared times, separated by a comma.

    Raises:
        UserError: the text is anything else.
    """
    try:
        first, second = map(float, text.split(","))
    except ValueError:
        raise UserError(f"{option} '{text}' must be two numbers such as {example}.") from None
    if not all(math.isfinite(x) and (x > 0 or (x == 0 and not positive)) for x in (first, second)):
        rule = "two positive numbers" if positive else "two numbers of 0 or more"
        raise UserError(f"{option} '{text}' must be {rule}, such as {example}.")
    return first, second


def refuse_file(option: str, path: Path) -> None:
    """Refuse a path that is no folder; it may be new (`UserError`)."""
    if path.exists() and not path.is_dir():
        raise UserError(f"{option} {path} is not a folder. Give a folder, which may be new.")
