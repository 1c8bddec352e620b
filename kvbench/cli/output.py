"""Output that all commands share."""

from __future__ import annotations

import codecs
import json
import sys
from typing import Any

import typer

from kvbench.log import printable


def echo(text: str, *, err: bool = False) -> None:
    """Print text on standard output, or on standard error, without control characters except newlines."""
    typer.echo(printable(text), err=err)


def print_json(document: Any) -> None:
    """Print a JSON document on one line, with control characters escaped; commands call this last.

    Where the locale is not UTF-8, all characters but ASCII are escaped, because some could not be written.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    text = json.dumps(document, ensure_ascii=codecs.lookup(encoding).name != "utf-8")
    if not text.isprintable():
        text = "".join(x if x.isprintable() else json.dumps(x)[1:-1] for x in text)
    typer.echo(text)
