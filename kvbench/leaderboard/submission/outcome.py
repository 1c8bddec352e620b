"""Check outcomes: ok, flag (shown next to the row), refused (not listed). Each has a reason of one plain line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvbench.leaderboard.submission.records import Check, Outcome

MAX_VALUE_CHARS = 60
"""Characters of a submitted value that a reason shows."""
MAX_REASON_CHARS = 500
"""Characters of a reason."""


class RefusedError(Exception):
    """A check refused the submission."""

    def __init__(self, check: str, reason: str) -> None:
        super().__init__(reason)
        self.check = refuse(check, reason)


def ok(check: str, reason: str) -> Check:
    """The check passed; the reason states the observed values."""
    return _conclude(check, "ok", reason)


def flag(check: str, reason: str) -> Check:
    """The check found something that readers of the row must know."""
    return _conclude(check, "flag", reason)


def refuse(check: str, reason: str) -> Check:
    """The check failed: the submission is not listed. Other checks may still run."""
    return _conclude(check, "refused", reason)


def quote(value: object) -> str:
    """Format a submitted value for a reason: short, in printable ASCII."""
    text = ascii(value)
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}..."


@contextmanager
def refusing_errors(check: str, what: str, *, but: type[Exception] = RefusedError) -> Iterator[None]:
    """Turn any error that a submission's values cause in our code into a refusal by this check.

    but: errors that are passed on.
    """
    try:
        yield
    except (RefusedError, but):
        raise
    except Exception as error:
        raise RefusedError(check, f"{what}: {type(error).__name__}: {str(error).strip() or 'no message'}") from error


def _conclude(check: str, outcome: Outcome, reason: str) -> Check:
    """Restrict the reason to printable ASCII on one line of limited length."""
    text = " ".join(reason.split()).encode("ascii", "backslashreplace").decode()
    text = "".join(x if x.isprintable() else ascii(x)[1:-1] for x in text)
    if len(text) > MAX_REASON_CHARS:
        text = f"{text[:MAX_REASON_CHARS]}..."
    return Check(name=check, outcome=outcome, reason=text)
