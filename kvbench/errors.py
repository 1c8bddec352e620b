"""One exception for everything a user can put right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A wrong request: printed as one message without a traceback, exit code 2.

    The message names the value, what is allowed and the next step.
    """


class UndeclaredError(UserError):
    """A method cannot say how many bytes it will hold: the text decides."""


def unknown(kind: str, name: str, allowed: Iterable[str], hint: str = "") -> UserError:
    """The error for a name that is not in a list, with the nearest names and the list itself."""
    names = sorted(allowed)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    message = f"unknown {kind} '{name}'."
    if close:
        message += f" Did you mean '{close[0]}'?"
    message += f" Allowed: {', '.join(names) if names else '(none)'}."
    return UserError(f"{message} {hint}".strip())
