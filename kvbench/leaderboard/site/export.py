"""The leaderboard as data: results.json and results.parquet."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence

from kvbench.analysis.columns import FlatRecord, RecordColumn, find_columns, flatten, make_table
from kvbench.leaderboard.site.listed import Problem
from kvbench.leaderboard.site.tables import Group
from kvbench.machine import load_extra
from kvbench.runs.results import Result

ADDED_FIELDS = {
    "table": (str, "name of the protocol: runs of one table are comparable"),
    "axis": (str, "stored, read or computed: the quantity that defines the bands"),
    "band": (str, "runs of similar size"),
    "rank": (int, "within the band; none: full cache, failed, without a score, or not verified"),
    "tied": (bool, "whether others share the rank"),
    "submitter": (str, "name of the submitter; none: not a submission"),
    "code_url": (str, "the submitter's link to code; none: not given"),
    "paper_url": (str, "the submitter's link to a paper; none: not given"),
    "level": (str, "verification level"),
    "page": (str, "page of the run, relative to the site"),
}
"""Fields that only the leaderboard adds to a run."""


def list_rows(groups: Sequence[Group]) -> list[FlatRecord]:
    """One flat row per run, in the order of the site."""
    found = []
    for group in groups:
        places = {
            row.listed.name: (table.axis, band.title)
            for table in group.tables for band in table.bands for row in band.rows
        }
        for row in group.rows:
            axis, band = places.get(row.listed.name, (None, None))
            verification, links = row.listed.verification, dict(row.listed.links)
            found.append({
                **flatten(row.result), "table": group.key, "axis": axis, "band": band, "rank": row.rank,
                "tied": row.tied, "submitter": row.listed.submitter,
                "code_url": links.get("code"), "paper_url": links.get("paper"),
                "level": None if verification is None else verification.level,
                "page": f"runs/{row.listed.name}/index.html",
            })
    return found


def write_json(rows: Sequence[FlatRecord], problems: Sequence[Problem]) -> bytes:
    """Write one run per line, so that versions can be compared with diff."""
    lines = ",\n".join(json.dumps(x, ensure_ascii=False, allow_nan=False) for x in rows)
    left_out = json.dumps([vars(x) for x in problems], ensure_ascii=False)
    return f'{{"schema_version": 1, "left_out": {left_out}, "runs": [\n{lines}\n]}}\n'.encode()


def write_parquet(rows: Sequence[FlatRecord]) -> bytes:
    """Write the same rows as Parquet."""
    added = (RecordColumn(x, (), kind, many=False, text=False) for x, (kind, _) in ADDED_FIELDS.items())
    columns = [*find_columns(Result), *added]
    file = io.BytesIO()
    load_extra("pyarrow.parquet", extra="report", what="kvbench leaderboard build").write_table(
        make_table(rows, columns), file
    )
    return file.getvalue()
