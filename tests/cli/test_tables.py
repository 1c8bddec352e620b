"""Tables fit 80 characters without folded words, and the table of costs has no columns that say nothing."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvbench.analysis.formatting import print_list, print_table
from kvbench.analysis.load import load_run
from kvbench.analysis.significance import UNADJUSTED
from kvbench.cli.findings import _print_findings, _print_measured
from kvbench.cli.tables import LEGENDS, cost_cells
from kvbench.reproduce.recorded import read_findings, read_measured
from kvbench.runs.results import Result

CURATED = Path(__file__).parents[2] / "results" / "cpu-2-cores"


@pytest.fixture(scope="module")
def result() -> Result:
    """A curated result of SnapKV without cut answers, whose strict score is its score."""
    found = (load_run(x.parent).result for x in sorted(CURATED.glob("snapkv-niah*/result.json")))
    return next(x for x in found if x.output.stop_reasons.keys() == {"stop"})


def change(result: Result, name: str) -> Result:
    """The result with one thing that is worth a column."""
    assert result.memory is not None
    read = result.memory.read_bytes_per_step
    assert read is not None
    parts: dict[str, Any] = {
        "strict": {"scores": dict.fromkeys(result.scores, 0.0625)},
        "cut": {"output": result.output.model_copy(update={"stop_reasons": {"stop": 3, "length": 1}})},
        "distinct": {"memory": result.memory.model_copy(update={"distinct_read_bytes_per_step": read / 2})},
    }
    return result.model_copy(update=parts[name])


@pytest.mark.parametrize("name", LEGENDS)
def test_a_column_appears_with_its_first_value(result, name):
    """And its explanation with it."""
    legend, columns, rows = cost_cells([result, result], ["a", "b"])
    assert columns == ["method", "stored", "at end", "reads", "top-1", "per token"]
    assert not any(x in legend for x in LEGENDS.values())
    legend, columns, changed = cost_cells([result, change(result, name)], ["a", "b"])
    assert (name in columns, LEGENDS[name] in legend) == (True, True)
    assert all(len(x) == len(columns) for x in changed)
    place = columns.index(name)
    assert changed[0][place] != changed[1][place]
    assert changed[0][:place] + changed[0][place + 1:] == rows[0]


@pytest.mark.parametrize("terminal", [False, True])
def test_a_table_fits_80_characters_without_folded_words(terminal, monkeypatch, capsys):
    """Nor folded intervals, while the longest of each column fit side by side; the other columns share the room."""
    monkeypatch.setattr(Console, "is_terminal", terminal)
    monkeypatch.setenv("TERM", "dumb")
    long, note = "w" * 40, "a note of many words " * 9
    print_table("", ("run", "score", "note"), [(long, "0.600 [0.15, 0.95]", note), ("b", "1", "")])
    lines = capsys.readouterr().out.splitlines()
    assert {len(x) for x in lines} == {80}
    assert any(long in x for x in lines) and any("[0.15, 0.95]" in x for x in lines)
    assert " ".join(x.split("│")[3].strip() for x in lines if x.startswith("│")).strip() == note.strip()


def test_a_word_is_folded_in_a_terminal_only(monkeypatch, capsys):
    """A run id can be copied from a file, whatever its length."""
    ids = ["x" * 70, "y" * 30]
    print_table("", ("first", "second"), [ids])
    shown = capsys.readouterr().out
    assert all(x in shown for x in ids)
    monkeypatch.setattr(Console, "is_terminal", True)
    monkeypatch.setenv("TERM", "dumb")
    print_table("", ("first", "second"), [ids])
    assert {len(x) for x in capsys.readouterr().out.splitlines()} == {80}


def test_spaces_are_left_out_where_words_need_their_room(capsys):
    """Fourteen columns of four letters have 70 characters with their rules, and 98 with spaces."""
    print_table("", [f"c{i:03}" for i in range(14)], [["word"] * 14])
    assert {len(x) for x in capsys.readouterr().out.splitlines()} == {71}


@pytest.mark.parametrize("command", [
    pytest.param("trace run --policy lru --policy fifo", marks=pytest.mark.slow), "models list", "show snapkv",
    "list suites", "reproduce --method snapkv", pytest.param("reproduce snapkv --dry-run", marks=pytest.mark.slow),
    "show {}", "score {}", "explain {} {}", "compare {} {}",
    *(pytest.param(x, marks=pytest.mark.slow) for x in ("reproduce --list", "report {} {} -o report.html")),
])
def test_tables_of_commands_fit_80_characters(kvbench, command, tmp_path, monkeypatch):
    """Also in a file or a pipe."""
    names = [next(CURATED.glob(f"{x}-niah*")).name for x in ("snapkv", "random")]
    for name in names:
        shutil.copytree(CURATED / name, tmp_path / "runs" / name)
    monkeypatch.chdir(tmp_path)
    answer = kvbench(*command.format(*names).split())
    assert answer.code == 0, answer.err
    assert max((len(x) for x in answer.out.splitlines() if x[:1] in "┏┡│└"), default=0) <= 80


def test_tables_of_findings_fit_80_characters(capsys):
    """Those of the recorded ones, with all their checks and comparisons."""
    on_runs, on_texts = read_findings(CURATED.parent), read_measured(CURATED.parent)
    assert on_runs is not None
    _print_findings(on_runs.findings)
    for x in on_texts:
        _print_measured(x.findings, x.texts)
    lines = capsys.readouterr().out.splitlines()
    assert sum("it holds if" in x for x in lines) == len(on_runs.findings) + sum(len(x.findings) for x in on_texts)
    assert max(len(x) for x in lines if x[:1] in "┏┡│└") <= 80


def test_a_verdict_that_seems_to_contradict_its_interval_is_explained(kvbench):
    """Below the table: 0.995 and 0.975 on the same 40 contexts."""
    runs = [CURATED / f"{x}-niah_multikey_1-{y}" for x, y in (("full", "00f2bef3b653"), ("mikv", "b0618553c0c7"))]
    answer = kvbench("compare", *runs, "--json")
    (found,) = answer.json["differences"]
    assert found["verdict"] == "not significant" and max(found["ci95"]) < 0
    assert UNADJUSTED in answer.out


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("width", [20, 40])
def test_a_list_in_a_narrow_terminal_has_its_last_cells_below(width, cut, monkeypatch, capsys):
    """Where the other columns leave no room for them; so no line is longer than the terminal."""
    monkeypatch.setattr(Console, "is_terminal", True)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.delenv("LINES", raising=False)
    row = ("x" * (width - 2), "a summary of seven words, cut or not")
    print_list(("name", "summary"), {"": [row]}, cut=cut)
    lines = capsys.readouterr().out.splitlines()
    assert row[0] in lines
    assert lines[lines.index(row[0]) + 1].startswith("    a summary of")
    assert max(map(len, lines)) <= width + 8  # with the codes of bold letters
