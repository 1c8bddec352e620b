"""The log. It goes to standard error: standard output is for results only."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")
EVERY = 20.0
"""Seconds between two lines of `say_progress`."""
_label: ContextVar[str] = ContextVar("label", default="")


def printable(text: str) -> str:
    """Text without control characters except newlines: untrusted text could contain terminal escape sequences."""
    return "".join(x if x.isprintable() or x == "\n" else "\N{REPLACEMENT CHARACTER}" for x in text)


def count(n: int, noun: str) -> str:
    """A number with its noun."""
    return f"{n} {noun}{'' if n == 1 else 's'}"


def say(message: str) -> None:
    """Print one line to the log, after the label of the context if there is one."""
    label = _label.get()
    shown = printable(f"{label}: {message}" if label else message)
    print(shown, file=sys.stderr, flush=True)  # noqa: T201  # this is the log


@contextmanager
def labeling(name: str) -> Iterator[None]:
    """Put a name before every line of the log, such as that of the run that several take turns with."""
    token = _label.set(name)
    try:
        yield
    finally:
        _label.reset(token)


@functools.cache
def say_once(message: str) -> None:
    """Print one line to the log unless this process has: samples and cells of a sweep would repeat it."""
    say(message)


def say_progress(parts: Iterable[T], describe: Callable[[int], str]) -> Iterator[T]:
    """The same parts; now and then a line says how many are done. describe: the text of that number."""
    said = time.monotonic()
    for number, part in enumerate(parts):
        if number and time.monotonic() - said >= EVERY:
            said = time.monotonic()
            say(describe(number))
        yield part
