"""The rows of the leaderboard for machines: results.json and results.parquet."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence

from kvbench.analysis.columns import FlatRecord, RecordColumn, find_columns, flatten, make_table
from kvbench.extras import load_extra
from kvbench.leaderboard.site.entries import Problem
from kvbench.leaderboard.site.tables import Group
from kvbench.runs.results import Result

OWN = {
    "table": (str, "which rows stand together: a name for their protocol"),
    "axis": (str, "held, read or computed: what the rank's band is a size of"),
    "band": (str, "rows of like size"),
    "rank": (int, "in the band; none: an anchor, failed, without a score, or sent in and not verified"),
    "tied": (bool, "whether others have this rank"),
    "submitter": (str, "who sent it; none: it was not sent"),
    "level": (str, "of verification"),
    "page": (str, "of the run, below the site"),
}
"""What only the leaderboard knows of a run."""


def list_rows(groups: Sequence[Group]) -> list[FlatRecord]:
    """A flat row for each run, in the order of the site."""
    found = []
    for group in groups:
        places = {
            row.entry.name: (table.axis, band.title)
            for table in group.tables for band in table.bands for row in band.rows
        }
        for row in group.rows:
            axis, band = places.get(row.entry.name, (None, None))
            verification = row.entry.verification
            found.append({
                **flatten(row.result), "table": group.key, "axis": axis, "band": band, "rank": row.rank,
                "tied": row.tied, "submitter": row.entry.submitter,
                "level": None if verification is None else verification.level,
                "page": f"runs/{row.entry.name}/index.html",
            })
    return found


def write_json(rows: Sequence[FlatRecord], problems: Sequence[Problem]) -> bytes:
    """One run in a line, so that two versions can be compared."""
    lines = ",\n".join(json.dumps(x, ensure_ascii=False, allow_nan=False) for x in rows)
    left_out = json.dumps([vars(x) for x in problems], ensure_ascii=False)
    return f'{{"schema_version": 1, "left_out": {left_out}, "runs": [\n{lines}\n]}}\n'.encode()


def write_parquet(rows: Sequence[FlatRecord]) -> bytes:
    """The same rows."""
    own = (RecordColumn(x, (), kind, many=False, text=False) for x, (kind, _) in OWN.items())
    columns = [*find_columns(Result), *own]
    file = io.BytesIO()
    load_extra("pyarrow.parquet", extra="report", what="kvbench leaderboard build").write_table(
        make_table(rows, columns), file
    )
    return file.getvalue()
