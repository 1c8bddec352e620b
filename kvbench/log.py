"""The log. It goes to standard error: standard output is for results only."""

from __future__ import annotations

import functools
import sys


def say(message: str) -> None:
    """Print one line to the log."""
    print(message, file=sys.stderr, flush=True)  # noqa: T201  # this is the log


@functools.cache
def say_once(message: str) -> None:
    """Print one line to the log unless this process has: the cells of a sweep would repeat it."""
    say(message)
