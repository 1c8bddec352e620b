"""Files of runs are untrusted: no control character of theirs reaches the terminal, where it could act."""

from __future__ import annotations

import ast
import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvbench.analysis.formatting import print_list, print_table
from kvbench.cli import call
from kvbench.cli.output import print_json
from kvbench.log import say

ROOT = Path(__file__).parents[2]
CURATED = ROOT / "results" / "cpu-2-cores"
ESCAPE = "\x1b]0;title\x07\x1b[31m\x9b31m"


@pytest.fixture
def folder(tmp_path) -> Path:
    """A copy of a curated run."""
    path = tmp_path / "run"
    shutil.copytree(next(CURATED.glob("snapkv-niah*")), path)
    return path


def change(path: Path, **values: Any) -> None:
    """Set fields of a JSON document; a dictionary sets fields of a part."""
    document = json.loads(path.read_text())
    for name, value in values.items():
        document[name] = {**document[name], **value} if isinstance(value, dict) else value
    path.write_text(json.dumps(document))


def change_lines(folder: Path, **values: Any) -> None:
    """Set fields of every line of the journal, which keeps distinct ids."""
    path = folder / "samples.jsonl.gz"
    lines = [json.loads(x) for x in gzip.decompress(path.read_bytes()).splitlines()]
    changed = [{**x, **values, "sample": x["sample"] + values.get("sample", "")} for x in lines]
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, changed)).encode()))


def check_plain(text: str) -> None:
    """No control characters, and the rest of the untrusted text is there."""
    assert {x for x in text if not x.isprintable()} <= {"\n"}
    assert "\N{REPLACEMENT CHARACTER}" in text


def test_a_failed_run_with_escapes(kvbench, folder):
    """Error, data type and metric are untrusted, in tables as in titles."""
    change(
        folder / "result.json", status="failed", error=ESCAPE, model={"dtype": ESCAPE},
        score={"metric": ESCAPE, "mean": None},
    )
    other = folder.with_name("other")
    shutil.copytree(folder, other)
    change(other / "result.json", error=f"{ESCAPE} again")
    for line in (("show", folder), ("compare", folder, other)):
        answer = kvbench(*line)
        check_plain(answer.out + answer.err)


def test_the_command_of_a_run_with_escapes(kvbench, folder):
    """`made by:` repeats settings of spec.json."""
    change(folder / "spec.json", budget=ESCAPE)
    check_plain(kvbench("show", folder).out)


def test_an_unknown_key_with_escapes(kvbench, folder):
    """The error names the key."""
    change(folder / "result.json", **{ESCAPE: 1})
    answer = kvbench("show", folder)
    assert answer.code == 2
    check_plain(answer.err)


def test_answers_with_escapes(kvbench, folder):
    """The id of a sample is as untrusted as its answer, and stays on its line."""
    change_lines(folder, sample=f"{ESCAPE}\nline", prediction=ESCAPE, stop_reason=ESCAPE)
    answer = kvbench("answers", folder)
    check_plain(answer.out)
    assert "\nline" not in answer.out


def test_tables_and_lists_with_escapes(capsys):
    """Titles, names of columns, headings and first cells, too."""
    print_table(ESCAPE, (ESCAPE, "b"), [("c", "d")])
    print_table(ESCAPE, (ESCAPE * 50, "b"), [(ESCAPE * 50, "d")], blocks=True)
    print_list((ESCAPE, "b"), {ESCAPE: [(ESCAPE, "d")]})
    check_plain(capsys.readouterr().out)


def test_the_log_with_escapes(capsys):
    """Newlines of a traceback stay."""
    say(f"first\n{ESCAPE}")
    text = capsys.readouterr().err
    check_plain(text)
    assert text.startswith("first\n")


def test_an_argument_with_escapes(capsys):
    """The error names the argument."""
    assert call(["show", ESCAPE]) == 2
    check_plain(capsys.readouterr().err)


def test_json_with_escapes(capsys):
    """The document is the same, and so is each of its characters after reading."""
    document = {ESCAPE: f"{ESCAPE}\u202e\udc80\U000e0001 \N{LATIN SMALL LETTER E WITH ACUTE}"}
    print_json(document)
    text = capsys.readouterr().out
    assert text.rstrip("\n").isprintable() and "\N{LATIN SMALL LETTER E WITH ACUTE}" in text
    assert json.loads(text) == document


def test_commands_print_in_one_place():
    """Everything that a command prints passes through `echo`, `print_json`, `say`, or a table."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in (ROOT / "kvbench" / "cli").rglob("*.py") if path.name != "output.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "typer.echo", "typer.secho")
    ]
    assert found == []
