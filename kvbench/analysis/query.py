"""SQL over finished runs and findings, as tables of an in-memory DuckDB without access to files or network."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from kvbench.analysis.columns import FlatRecord, RecordColumn, find_columns, flatten, make_table
from kvbench.analysis.load import Seen, check_complete, find_runs, is_copy
from kvbench.errors import UserError
from kvbench.log import say
from kvbench.machine import load_extra
from kvbench.reproduce.recorded import FindingRow, list_rows
from kvbench.runs.files import read_file, read_lines
from kvbench.runs.journal import Line
from kvbench.runs.results import Result

RUN_ID = RecordColumn("run_id", (), str, many=False, text=False)
TABLES = {
    "results": find_columns(Result), "samples": (RUN_ID, *find_columns(Line)), "findings": find_columns(FindingRow),
}
"""`results` has one row per run, `samples` one per (sample, turn), `findings` one per check of a finding."""
LOCKED = {
    "enable_external_access": False, "autoinstall_known_extensions": False, "autoload_known_extensions": False,
    "temp_directory": "", "lock_configuration": True,
}
"""DuckDB settings: no files, no network, no extensions, and no way for a query to change that."""
HINT = "`DESCRIBE results`, `DESCRIBE samples` and `DESCRIBE findings` list the columns."


@dataclass(frozen=True)
class QueryResult:
    """Columns and rows that a query returned."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


def query_runs(sql: str, folders: Sequence[Path]) -> QueryResult:
    """Run one SELECT over the runs and findings below these folders; a table that the query does not name is not read.

    Raises:
        UserError: DuckDB rejects the query, it is not exactly one statement, or not a SELECT; two of its columns have
            one name; or there is no run.
    """
    duckdb = load_extra("duckdb", extra="query", what="kvbench query")
    words = set(re.findall(r"\w+", sql.lower()))
    with duckdb.connect(":memory:", config=LOCKED) as connection:
        try:
            statements = connection.extract_statements(sql)
            if [x.type.name for x in statements] not in (["SELECT"], ["EXPLAIN"]):
                raise UserError(f"a query must be one SELECT, EXPLAIN or DESCRIBE statement. {HINT}")
            for name in words & TABLES.keys() or TABLES:
                connection.register("given", make_table(READERS[name](folders), TABLES[name]))
                connection.execute(f"CREATE TABLE {name} AS SELECT * FROM given")  # noqa: S608  # one of TABLES
                connection.unregister("given")
            cursor = connection.execute(statements[0])
            columns = [x[0] for x in cursor.description]
            if twice := [name for name, count in Counter(columns).items() if count > 1]:
                raise UserError(f"several columns are called {', '.join(twice)}. Name them apart with AS.")
            return QueryResult(tuple(columns), tuple(tuple(map(_plain, row)) for row in cursor.fetchall()))
        except duckdb.Error as error:
            reason = " ".join(str(error).partition("\nLINE ")[0].split())
            raise UserError(f"the query failed: {reason.rstrip('.!')}. {HINT}") from error


def _read_results(folders: Sequence[Path]) -> Iterable[FlatRecord]:
    return (flatten(result) for _, result in _find(folders))


def _read_samples(folders: Sequence[Path]) -> Iterable[FlatRecord]:
    for folder, result in _find(folders):
        try:
            lines = read_lines(folder / "samples.jsonl")
            check_complete(folder, result, lines)
        except UserError as error:
            if folder in folders:
                raise
            say(f"warning: skipped: {error}")
        else:
            yield from ({"run_id": result.run_id, **flatten(x)} for x in lines)


def _find(folders: Sequence[Path]) -> Iterator[tuple[Path, Result]]:
    """Runs with their results; of copies in several folders the first."""
    seen: Seen = {}
    for folder in find_runs([str(x) for x in folders]):
        result = read_file(folder / "result.json", Result)
        if not is_copy(folder, result, seen):
            yield folder, result


def _read_findings(folders: Sequence[Path]) -> Iterable[FlatRecord]:
    return (flatten(row) for folder in folders for row in list_rows(folder))


READERS = {"results": _read_results, "samples": _read_samples, "findings": _read_findings}


def _plain(value: Any) -> Any:
    """A value as JSON: NaN and infinity become null, other types without a JSON form become text."""
    if isinstance(value, list | tuple):
        return [_plain(x) for x in value]
    if isinstance(value, dict):
        return {str(key): _plain(x) for key, x in value.items()}
    if isinstance(value, Decimal):
        value = float(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)
