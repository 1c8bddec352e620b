"""SQL queries: the columns and values of run files, and no access to anything else."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from kvbench.analysis.columns import find_columns, flatten, make_table, write_csv
from kvbench.analysis.load import find_runs
from kvbench.analysis.query import query_runs
from kvbench.errors import UserError
from kvbench.reproduce.recorded import FindingRow
from kvbench.runs.files import read_file, read_lines
from kvbench.runs.journal import Line
from kvbench.runs.results import Result

CURATED = Path(__file__).parents[2] / "results" / "cpu-2-cores"


@pytest.fixture(scope="module")
def folders() -> list[Path]:
    """Three curated runs."""
    return [next(CURATED.glob(f"{x}-niah_multikey_1-*")) for x in ("full", "kivi", "snapkv")]


@pytest.fixture
def changed(folders, tmp_path):
    """A copy of a run whose files a test may change."""
    folder = tmp_path / "runs" / "changed"
    shutil.copytree(folders[2], folder)
    return folder


def test_results_has_a_row_per_run(kvbench, folders):
    """With short column names, as a table and as JSON."""
    results = [read_file(x / "result.json", Result) for x in folders]
    sql = "SELECT method, avg(score) AS mean FROM results GROUP BY 1 ORDER BY 1"
    answer = kvbench("query", sql, *(x for folder in folders for x in ("--results", folder)), "--json")
    assert answer.code == 0, answer.err
    assert answer.json == [{"method": x.method.name, "mean": pytest.approx(x.score.mean)} for x in results]
    assert "snapkv" in answer.out.splitlines()[-3]


def test_runs_are_found_at_any_depth(kvbench):
    """Below the folder of --results."""
    answer = kvbench("query", "SELECT count(*) AS n FROM results", "--results", CURATED.parent, "--json")
    below = list(CURATED.parent.glob("*/*/result.json"))
    assert len(below) > len(find_runs([str(CURATED)])) > 0
    assert answer.json == [{"n": len(below)}]


def test_the_queries_in_the_docs_run(kvbench, monkeypatch):
    """Those of docs/reports.md give rows; those that name no results, of committed ones."""
    monkeypatch.chdir(CURATED.parent.parent)
    text = Path("docs/reports.md").read_text(encoding="utf-8")
    commands = [shlex.split(x) for x in re.findall(r'^kvbench (query "[^"]*".*)$', text, re.MULTILINE)]
    assert len(commands) == 5
    few = [x for folder in sorted(CURATED.glob("snapkv-*")) for x in ("--results", folder)]
    for command in commands:
        answer = kvbench(*command, *([] if "--results" in command else few), "--json")
        assert answer.code == 0, answer.err
        assert answer.json


def test_samples_has_a_row_per_answer(folders):
    """Means over the journals equal the scores of the results; lists and JSON can be indexed."""
    found = query_runs(
        """
        WITH means AS (SELECT run_id, avg(score) AS mean, count(*) AS n FROM samples GROUP BY 1)
        SELECT run_id, mean, n, score_ci95[1], method_settings->>'$.window' AS w
        FROM means JOIN results USING (run_id) ORDER BY method
        """, folders,
    )
    results = sorted((read_file(x / "result.json", Result) for x in folders), key=lambda x: x.method.name)
    assert found.columns == ("run_id", "mean", "n", "score_ci95[1]", "w")
    assert [x[:4] for x in found.rows] == [
        (x.run_id, pytest.approx(x.score.mean), x.n_scored * x.spec.turns, x.score.ci95[0]) for x in results
    ]
    assert [x[4] for x in found.rows] == [
        None if "window" not in x.method.settings else str(x.method.settings["window"]) for x in results
    ]


@pytest.mark.few
@pytest.mark.parametrize("sql", [
    "SELECT * FROM '/etc/passwd'", "SELECT * FROM read_text('/etc/passwd')", "SELECT * FROM glob('/etc/*')",
    "SELECT * FROM read_csv('https://example.org/x.csv')", "SELECT getenv('HOME')", "SELECT * FROM folders",
])
def test_a_query_cannot_reach_files_or_network(folders, sql):
    """Nor environment variables or local variables of the process."""
    with pytest.raises(UserError, match="the query failed: "):
        query_runs(sql, folders)


@pytest.mark.parametrize("sql", [
    "", "-- nothing", "SELECT 1; SELECT 2", "COPY results TO 'x.csv'", "ATTACH 'x.db'", "INSTALL httpfs",
    "SET enable_external_access = true", "UPDATE results SET score = 1", "DROP TABLE results", "PRAGMA database_list",
    "EXPORT DATABASE 'x'", "CALL pragma_version()",
])
def test_a_query_is_one_select(folders, sql):
    """Or an EXPLAIN or DESCRIBE of one."""
    with pytest.raises(UserError, match="a query must be one SELECT"):
        query_runs(sql, folders)


def test_bad_queries_are_refused(kvbench, folders, tmp_path):
    """With one line, exit code 2 and a hint."""

    def refuse(sql, *more):
        answer = kvbench("query", sql, *more)
        assert (answer.code, answer.out) == (2, ""), answer
        assert answer.err.count("\n") == 1 and "Traceback" not in answer.err
        return answer.err

    here = ("--results", folders[0])
    assert 'syntax error at or near "SELEC". `DESCRIBE results`' in refuse("SELEC 1", *here)
    assert 'Referenced column "sore" not found' in refuse("SELECT sore FROM results", *here)
    assert "folder 'nowhere' does not exist" in refuse("SELECT 1", "--results", "nowhere")
    assert "there is no finished run in" in refuse("SELECT 1", "--results", tmp_path)


def test_without_duckdb_the_extra_is_named(folders, monkeypatch):
    """In one line."""
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(UserError, match=r"kvbench query needs the package duckdb .* pip install 'kvbench\[query\]'"):
        query_runs("SELECT 1", folders)


def test_findings_has_a_row_per_check(kvbench):
    """Of every record in results/shape, and one per comparison on runs; no run is read."""
    shape = CURATED.parent / "shape"
    records = [json.loads(x.read_text()) for x in shape.glob("*.json") if x.name != "findings.json"]
    compared = json.loads((shape / "findings.json").read_text())["findings"]
    sql = "SELECT tested_on, model, finding, rule, mean, ci95, numbers, verdict, printed FROM findings"
    answer = kvbench("query", sql, "--results", CURATED.parent, "--json")
    assert answer.code == 0, answer.err
    texts = [x for x in answer.json if x["tested_on"] == "texts"]
    wanted = [(r["model"]["id"], x["name"], y) for r in records for x in r["findings"] for y in x["checks"]]
    assert [(x["model"], x["finding"], x["rule"], x["mean"], x["ci95"], x["numbers"]) for x in texts] == [
        (model, name, y["rule"], y["mean"], y["ci95"], y["texts"]) for model, name, y in wanted
    ]
    assert len(answer.json) - len(texts) == sum(len(x["comparisons"]) for x in compared)
    assert {x["verdict"] for x in answer.json} <= {"holds", "does not hold", "undecided"}


def test_a_damaged_journal_does_not_hide_the_other_runs(kvbench, changed, folders):
    """It is left out with a warning, as in a report; a damaged run that is given itself is an error."""
    shutil.copytree(folders[0], changed.parent / "whole")
    journal = changed / "samples.jsonl.gz"
    journal.write_bytes(journal.read_bytes()[:300])
    sql = "SELECT DISTINCT run_id FROM samples"
    answer = kvbench("query", sql, "--results", changed.parent, "--json")
    assert (answer.code, answer.json) == (0, [{"run_id": folders[0].name}])
    assert f"warning: skipped: {changed / 'samples.jsonl'} cannot be read" in answer.err
    assert kvbench("query", sql, "--results", changed).code == 2


def test_a_copy_counts_once_and_half_a_journal_not_at_all(kvbench, changed, folders):
    """Both would change every mean over answers."""
    sql = "SELECT count(*) FROM samples"
    other = changed.parent / "other"
    shutil.copytree(changed, other)
    once = kvbench("query", sql, "--results", changed).out
    answer = kvbench("query", sql, "--results", changed.parent)
    assert answer.out == once
    assert "skipped, a copy of" in answer.err
    shutil.rmtree(other)
    journal = next(changed.glob("samples.jsonl*"))
    unpacked = gzip.decompress(journal.read_bytes()) if journal.suffix == ".gz" else journal.read_bytes()
    journal.unlink()
    (changed / "samples.jsonl").write_bytes(unpacked[: unpacked.index(b"\n") + 1])
    shutil.copytree(folders[0], changed.parent / "whole")
    answer = kvbench("query", "SELECT DISTINCT run_id FROM samples", "--results", changed.parent)
    assert "its result states" in answer.err
    assert folders[0].name in answer.out and changed.name not in answer.out


def test_columns_can_be_listed(folders):
    """All columns of every table, with their types."""
    kinds = {"results": Result, "samples": Line, "findings": FindingRow}
    for table, columns in ((name, find_columns(x)) for name, x in kinds.items()):
        listed = {x[0]: x[1] for x in query_runs(f"DESCRIBE {table}", folders).rows}
        types = {str: "VARCHAR", int: "BIGINT", float: "DOUBLE", bool: "BOOLEAN"}
        assert {x.name: types[x.kind] + "[]" * x.many for x in columns}.items() <= listed.items()


def test_values_become_json(folders):
    """NaN becomes null; other types become text."""
    found = query_runs("SELECT 'nan'::DOUBLE, 1.5::DECIMAL(3, 1), DATE '2026-01-02', [1, 2], {'a': NULL}", folders)
    assert found.rows == ((None, 1.5, "2026-01-02", [1, 2], {"a": None}),)


def test_columns_of_one_name_are_refused(kvbench, folders):
    """As JSON, a row would have only the last of them."""
    answer = kvbench("query", "SELECT 1 AS a, 2 AS a, 3 AS b", "--results", folders[0], "--json")
    assert (answer.code, answer.out) == (2, "")
    assert "several columns are called a. Name them apart with AS." in answer.err
    answer = kvbench("query", "SELECT 1 AS a, 2 AS b", "--results", folders[0], "--json")
    assert answer.json == [{"a": 1, "b": 2}]


def test_control_characters_are_not_printed(kvbench, changed):
    """Names in files are untrusted text."""
    text = (changed / "result.json").read_text().replace('"snapkv"', '"\\u001b[2Jsnap"')
    (changed / "result.json").write_text(text)
    answer = kvbench("query", "SELECT method FROM results", "--results", changed)
    assert "\N{REPLACEMENT CHARACTER}[2Jsnap" in answer.out
    assert "\x1b" not in answer.out


def test_columns_that_do_not_fit_are_printed_one_per_line(kvbench, folders):
    """A block per row, with every value, and an empty line after it."""
    given = [x for folder in folders for x in ("--results", folder)]
    found = query_runs("SELECT * FROM results", folders)
    blocks = kvbench("query", "SELECT * FROM results", *given).out.removesuffix("\n\n").split("\n\n")
    assert len(blocks) == len(found.rows) == 3
    for block, row in zip(blocks, found.rows, strict=True):
        lines = block.splitlines()
        assert tuple(x.partition(": ")[0] for x in lines) == found.columns
        assert f"run_id: {row[found.columns.index('run_id')]}" in lines
    assert kvbench("query", "SELECT * FROM results WHERE samples < 0", *given).out == "no rows\n"


def test_numbers_too_large_for_a_table_are_refused(changed):
    """JSON has integers of any size; those of a journal are not limited."""
    packed = changed / "samples.jsonl.gz"
    first, *others = gzip.decompress(packed.read_bytes()).decode().splitlines()
    line = json.loads(first)
    line["tokens"]["context"] = 10**30
    packed.write_bytes(gzip.compress("\n".join([json.dumps(line), *others, ""]).encode()))
    with pytest.raises(UserError, match="a value of these runs does not fit into a table"):
        query_runs("SELECT 1 FROM samples", [changed])


# Columns


def test_columns_are_named_after_their_paths():
    """Fields that a result has twice are one column, and cards are left out."""
    names = [x.name for x in find_columns(Result)]
    assert len(names) == len(set(names))
    assert {"method", "score", "task", "model", "seed", "memory_ratio", "environment_git_commit"} <= set(names)
    assert not {"spec_method_name", "method_card", "schema_version", "spec_seed"} & set(names)


def test_a_flat_record_has_every_value(folders):
    """Scalars and lists of scalars as they are, the rest as JSON text; missing values are None."""
    result = read_file(folders[2] / "result.json", Result)
    row = flatten(result)
    assert row["score"] == result.score.mean
    assert row["score_ci95"] == list(result.score.ci95)
    assert json.loads(row["method_settings"]) == result.method.settings
    assert json.loads(row["score_by_turn"]) == [{"mean": x.mean, "n": x.n} for x in result.score.by_turn]
    assert (row["environment_gpu"], row["diffusion_nfe"]) == (None, None)
    assert make_table([row], find_columns(Result)).to_pylist() == [row]


def test_a_journal_line_is_flattened(folders):
    """Its values equal those of the record."""
    line = read_lines(folders[0] / "samples.jsonl")[0]
    row = flatten(line)
    assert (row["times_ttft_s"], row["bytes_stored_bytes"]) == (line.times.ttft_s, line.bytes.stored_bytes)
    assert tuple(row["ids"]) == line.ids and json.loads(row["facts"]) == line.facts


def test_csv_contains_no_formulas():
    """Text that starts like a formula gets a leading apostrophe; numbers stay numbers."""
    rows = [{"a": "=1+1", "b": -1.5, "c": None, "d": [1, "@"]}, {"a": 'x,"y"', "b": 2, "c": "+", "d": []}]
    text = write_csv(rows, rows[0])
    assert list(csv.reader(io.StringIO(text))) == [
        ["a", "b", "c", "d"], ["'=1+1", "-1.5", "", '[1, "@"]'], ['x,"y"', "2", "'+", "[]"],
    ]
