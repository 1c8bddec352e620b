"""The log: standard error, so that standard output holds results only."""

from __future__ import annotations

import sys


def say(message: str) -> None:
    """One line for the log."""
    print(message, file=sys.stderr, flush=True)  # noqa: T201  # this is the log
