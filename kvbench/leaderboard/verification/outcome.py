"""How a check ends: well, with something to be shown beside the row, or with no row. Always in one plain line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvbench.leaderboard.submission.records import Check, Outcome

SHOWN = 60
"""Characters of a stranger's value that a reason shows."""
LONGEST = 500
"""Characters of a reason."""


class RefusedError(Exception):
    """A submission that is no row, and the check that it failed."""

    def __init__(self, check: str, reason: str) -> None:
        super().__init__(reason)
        self.verdict = refuse(check, reason)


def ok(check: str, reason: str) -> Check:
    """What was looked at is as it should be; the reason says what was seen."""
    return _conclude(check, "ok", reason)


def flag(check: str, reason: str) -> Check:
    """Readers of the row must know this."""
    return _conclude(check, "flag", reason)


def refuse(check: str, reason: str) -> Check:
    """There is no row, and what else was found is still told."""
    return _conclude(check, "refused", reason)


def show(value: object) -> str:
    """A stranger's value for a reason: short, and nothing but plain characters."""
    text = ascii(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


@contextmanager
def blaming(check: str, what: str) -> Iterator[None]:
    """Refuse for whatever a submission's values make our own code raise."""
    try:
        yield
    except RefusedError:
        raise
    except Exception as error:
        raise RefusedError(check, f"{what}: {type(error).__name__}: {str(error).strip() or 'no message'}") from error


def _conclude(check: str, outcome: Outcome, reason: str) -> Check:
    """Nothing of a stranger's moves a cursor, breaks a line or fills a page."""
    text = " ".join(reason.split()).encode("ascii", "backslashreplace").decode()
    text = "".join(x if x.isprintable() else ascii(x)[1:-1] for x in text)
    return Check(name=check, outcome=outcome, reason=text if len(text) <= LONGEST else f"{text[:LONGEST]}...")
