"""One exception for everything a user can put right."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path

FILE = re.compile(r"\w\.[A-Za-z]{2,4}$")
"""Names that end like a file name."""


class UserError(Exception):
    """A wrong request: printed as one message without a traceback, exit code 2.

    The message names the value, what is allowed and the next step.
    """


class UndeclaredError(UserError):
    """A method cannot say how many bytes it will hold: the text decides."""


def unknown(kind: str, name: str, allowed: Iterable[str], hint: str = "") -> UserError:
    """The error for a name that is not in a list, with the nearest name and the list itself.

    For a name that looks like a file the suggestion is a file of the same folder, and the list is left out.
    """
    names = sorted(allowed)
    message = f"unknown {kind} '{name}'."
    if FILE.search(name):
        return UserError(f"{message}{suggest_file(Path(name))} {hint}".strip())
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        message += f" Did you mean '{close[0]}'?"
    if names:
        message += f" Allowed: {', '.join(names)}."
    return UserError(f"{message} {hint}".strip())


def suggest_file(path: Path) -> str:
    """A sentence that names the existing file with the most similar name, with a leading space; or nothing."""
    try:
        others = [x.name for x in path.expanduser().parent.iterdir() if x.is_file()]
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, others, n=1, cutoff=0.75)
    return f" Did you mean '{path.with_name(close[0])}'?" if close else ""
