"""Output that all commands share."""

from __future__ import annotations

import json
from typing import Any

import typer


def print_json(document: Any) -> None:
    """Print a JSON document on one line; commands call this last."""
    typer.echo(json.dumps(document, ensure_ascii=False))
