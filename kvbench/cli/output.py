"""What every command prints alike."""

from __future__ import annotations

import json
from typing import Any

import typer


def print_json(document: Any) -> None:
    """One JSON document on one line, the last of standard output."""
    typer.echo(json.dumps(document, ensure_ascii=False))
