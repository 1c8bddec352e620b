"""The exception for errors that users can correct, and helpers for its messages."""

from __future__ import annotations

import difflib
import re
import traceback
from collections.abc import Iterable
from pathlib import Path

FILE_MODULE = "kvbench_file_"
"""Prefix of the module names of files that are given by their paths."""
FILE = re.compile(r"\w\.[A-Za-z]{2,4}$")
"""Names that end like a file name."""
MOST = 2**31 - 1
"""Largest number of an option, unless the option has a smaller one."""
MOST_SAMPLES, MOST_TURNS, MOST_INSTANCES = 1_000_000, 10_000, 10_000
MOST_SEED = 2**32 - 1
"""The seeds that every random generator in use takes."""

MOST_LISTED, FEW = 40, 5
"""Names that fit an error message, and those that it shows of more."""


class UserError(Exception):
    """Bad input. The command line prints the message without a traceback and exits with code 2.

    A message names the value, the rule and the next step.
    """


class UndeclaredError(UserError):
    """A method cannot declare its stored bytes in advance because they depend on the text."""


class FileTierError(UserError):
    """A file of entries could not be written or read: the run stops, no sample has failed, and it can be resumed."""

    exit_code = 1


class InterruptionError(UserError):
    """Ctrl-C. The message says what is kept, and how to continue."""

    exit_code = 130


class DeviceLostError(UserError):
    """The CUDA context is unusable by this process: what is finished is saved, and the same command continues."""

    exit_code = 3


def nan_error(dtype: str, method: str) -> UserError:
    """The error of a model whose logits are not numbers under a method."""
    return UserError(
        f"the model's logits are not numbers (NaN) in {dtype}: method {method} makes them so, or values exceed the "
        "range of this type. Try --dtype float32."
    )


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or its type's name, without a full stop, to be quoted in a sentence."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def describe_error(error: BaseException, module: str = FILE_MODULE) -> str:
    """An exception's type, the first line of its message, and the line of a user's file that it came from.

    module: as in `find_own_line`.
    """
    message = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {message}{find_own_line(error, module)}"


def find_own_line(error: BaseException, module: str = FILE_MODULE) -> str:
    """The name and line of the user's file that raised, or called other code that did: ` (mine.py, line 7)`; or ``.

    module: the beginning of the names of the modules that count as the user's.
    """
    frames = reversed(list(traceback.walk_tb(error.__traceback__)))
    own = ((x, n) for x, n in frames if x.f_globals.get("__name__", "").startswith(module))
    return next((f" ({Path(x.f_code.co_filename).name}, line {n})" for x, n in own), "")


def find_line(error: BaseException, file: str | None) -> int | None:
    """The line of a file that raised, or from which other code was called that did; None: neither."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((x.lineno for x in reversed(frames) if x.filename == file), None)


def unknown(kind: str, name: str, allowed: Iterable[str], hint: str = "") -> UserError:
    """The error for an unknown name, with the nearest allowed name and the list of all, or a few.

    For a name that looks like a file name, it suggests a file of the same folder instead. Of more than `MOST_LISTED`
    names a few are listed, or none where the hint is to `kvbench list`; the hint says how to list all.
    """
    names = sorted(allowed)
    message = f"unknown {kind} '{name}'."
    if FILE.search(name):
        return UserError(f"{message}{suggest_file(Path(name))} {hint}".strip())
    swapped = [x for x in names if sorted(x) == sorted(name)]  # `--modle` is nearer to `--mode` than to `--model`
    close = swapped or difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        message += f" Did you mean '{close[0]}'?"
    if 0 < len(names) <= MOST_LISTED:
        message += f" Allowed: {', '.join(names)}."
    elif names and "kvbench list" not in hint:
        few = difflib.get_close_matches(name, names, n=FEW, cutoff=0.3) or names[:FEW]
        message += f" Allowed are {len(names)}, such as {', '.join(few)}."
    return UserError(f"{message} {hint}".strip())


def check_number(name: str, value: float, least: float = 1, most: float = MOST) -> None:
    """Check that a number of the user is within its range. NaN is outside of every range.

    Raises:
        UserError: it is not.
    """
    if not value >= least:
        raise UserError(f"{name} {value} must be {least} or more.")
    if value > most:
        raise UserError(f"{name} {value} must be {most:,} or less.")


def is_whole(text: str) -> bool:
    """Whether a text is a whole number from 0 to MOST; one of thousands of digits, which int refuses, is none."""
    return text.isdecimal() and len(text) <= len(str(MOST)) and int(text) <= MOST


def suggest_file(path: Path) -> str:
    """A sentence that names the existing file with the most similar other name, with a leading space; or nothing."""
    try:
        others = [x.name for x in path.expanduser().parent.iterdir() if x.is_file() and x.name != path.name]
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, others, n=1, cutoff=0.75)
    return f" Did you mean '{path.with_name(close[0])}'?" if close else ""
