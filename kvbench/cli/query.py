"""`kvbench query`: SQL over finished runs and findings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from kvbench.cli.options import Json, check_results
from kvbench.cli.output import print_json


def query_command(
    sql: Annotated[str, typer.Argument(help="One SELECT statement over the tables results, samples and findings.")],
    *,
    results: Annotated[
        list[Path] | None, typer.Option("--results", help="Folder of runs; repeatable; default: runs.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Query finished runs and findings with SQL.

    'DESCRIBE results' lists the columns.
    """
    from kvbench.analysis.formatting import print_table
    from kvbench.analysis.load import RUNS
    from kvbench.analysis.query import query_runs

    folders = results or [RUNS]
    check_results(folders)
    found = query_runs(sql, folders)
    print_table("", found.columns, [[_show(x) for x in row] for row in found.rows], blocks=True)
    if as_json:
        print_json([dict(zip(found.columns, row, strict=True)) for row in found.rows])


def _show(value: Any) -> str:
    """A value as text; --json has all digits."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
