"""The source text of Python's standard library, in modules.

Tests, generated tables and modules with a line of more than LONGEST bytes are left out.
"""

from __future__ import annotations

import hashlib
import platform
import sys
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kvbench.errors import UserError

LONGEST = 120
"""Most bytes of a line, without its end."""
TABLES = {"encodings", "pydoc_data"}
TESTS = {"test", "tests", "idle_test"}


@dataclass(frozen=True)
class Module:
    """The source of one module."""

    name: str
    """Path of the module in the library."""
    lines: tuple[str, ...]
    """Lines, including their ends."""
    margins: tuple[int, ...]
    """Indices of unindented lines that begin with a word, except the first line."""


@cache
def read_modules(folder: str) -> tuple[tuple[Module, ...], str]:
    """The modules of a standard library and a hash of all of them; UserError if the folder has none."""
    modules, total = [], hashlib.sha256()
    root = Path(folder)
    names = sorted(sys.stdlib_module_names - TABLES)
    found = [x for name in names for x in (root / f"{name}.py", *sorted((root / name).rglob("*.py"))) if x.is_file()]
    for path in found:
        parts = path.relative_to(root).parts
        if TESTS & set(parts):
            continue
        data = path.read_bytes()
        lines = data.splitlines()
        if len(lines) < 2 or max(map(len, lines)) > LONGEST:
            continue
        text = tuple(f"{line.decode()}\n" for line in lines)
        margins = tuple(i for i, line in enumerate(text) if i and line[0].isidentifier())
        modules.append(Module("/".join(parts), text, margins))
        total.update(f"{modules[-1].name}\n{''.join(text)}\0".encode())
    if not modules:
        raise UserError(
            f"this Python's standard library has no source text in {folder}. Use a Python that was installed with it."
        )
    return tuple(modules), total.hexdigest()


def library() -> tuple[tuple[Module, ...], str]:
    """The modules of the running Python's standard library."""
    return read_modules(sysconfig.get_paths()["stdlib"])


def name_revision(digest: str) -> str:
    """Python's version and the beginning of a hash of its library."""
    return f"python-{platform.python_version()}:{digest[:12]}"
