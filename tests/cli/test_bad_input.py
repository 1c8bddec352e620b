"""Every numeric option of every command with a value out of range, and every path option with a missing path.

The answer is exit code 2 and one line, before any model is loaded.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from kvbench.cli import app, call

CURATED = Path(__file__).parents[2] / "results" / "cpu-2-cores"
MISSING = "missing/path"
LONG = 300 * "x"
"""More than the name of a file can have."""
NOBODY = "~no-such-user"
"""The home folder of a user that there is not."""
VALUES = ["nan", "inf", "-inf", "-1", "1e400", "1" + 30 * "0"]
LINES = {
    "run": "run --method snapkv --task kv-short --device cpu",
    "sweep": "sweep {} --dry-run",
    "list": "list methods",
    "show": "show {}",
    "check": "check {}",
    "answers": "answers {}",
    "score": "score {}",
    "compare": "compare {} {}",
    "bench": "bench --method snapkv",
    "plan": "plan --method snapkv",
    "report": "report {} -o page.html",
    "suggest": "suggest --model mini --mode single --memory 25%",
    "query": "query 'select 1'",
    "reproduce": "reproduce {} --dry-run",
    "explain": "explain {} {}",
    "submit": "submit {} --submitter ada",
    "leaderboard serve": "leaderboard serve --port 99999",
    "leaderboard verify": "leaderboard verify {}",
    "leaderboard rerun": "leaderboard rerun {}",
    "leaderboard build": "leaderboard build {} -o site",
    "leaderboard token create": "leaderboard token create ada",
    "leaderboard token list": "leaderboard token list",
    "leaderboard token revoke": "leaderboard token revoke {}",
    "models add": "models add {}",
    "models show": "models show {}",
    "models remove": "models remove {}",
    "trace add": "trace add {}",
    "trace run": "trace run --policy lru",
    "trace tiers": "trace tiers",
    "trace route": "trace route",
    "trace memory": "trace memory",
    "trace isolate": "trace isolate",
    "trace semantic": "trace semantic --embedder words",
}
"""A command line per command; {} stands for its arguments."""
TEXTS = {
    "run": ["--budget", "--set window", "--task-set x", "--gen max_new_tokens", "--gen temperature"],
    "bench": ["--length", "--batch", "--budget", "--set window"],
    "plan": ["--budget", "--set window"],
    "check": ["--set window"],
    "suggest": ["--memory", "--read", "--computed"],
    "leaderboard rerun": ["--share"],
    "trace run": ["--blocks", "--seconds-per-token"],
    "trace tiers": ["--blocks"],
    "trace route": ["--blocks"],
    "trace isolate": ["--blocks"],
    "trace semantic": ["--seconds"],
}
"""Options whose numbers are read from text."""
PATHS = {
    "run": ["--task", "--model", "--method", "--suite", "--device-map"],
    "score": ["--task"],
    "check": ["--model"],
    "bench": ["--method", "--model"],
    "plan": ["--method", "--model"],
    "leaderboard rerun": ["--hidden-seed"],
    "trace run": ["--trace"],
    "trace tiers": ["--trace"],
    "trace route": ["--trace"],
    "trace memory": ["--trace"],
    "trace isolate": ["--trace"],
}
"""Options that take a path as one of several things; those that only take a path are found by their type."""
CREATED = {"--out", "-o", "--output", "--state", "--results of leaderboard serve"}
"""Options whose path is created, or may be empty."""
GOOD = {"sweep": "sweep.toml", "show": "snapkv", "check": "kv-short", "reproduce": "snapkv"}
"""Arguments that exist; those of other commands do not."""
NAMES = {"leaderboard token revoke"}
"""Commands whose arguments are no paths."""


def walk(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every command of the table with its name."""
    if not hasattr(command, "commands"):
        yield " ".join(path), command
    for name, inner in getattr(command, "commands", {}).items():
        yield from walk(inner, (*path, name))


COMMANDS = dict(walk(typer.main.get_command(app)))


def find_options(kinds: tuple[str, ...]) -> list[tuple[str, str]]:
    """Options of these types, with their commands."""
    return [
        (name, x.opts[0]) for name, command in COMMANDS.items() for x in command.params
        if x.param_type_name == "option" and any(kind in str(x.type_descriptor.annotation) for kind in kinds)
    ]


NUMBERS = [*find_options(("'int'", "'float'")), *((name, x) for name, found in TEXTS.items() for x in found)]
FILES = [
    *((name, x) for name, x in find_options(("Path",)) if not CREATED & {x, f"{x} of {name}"}),
    *((name, x) for name, found in PATHS.items() for x in found),
]


@pytest.fixture(autouse=True)
def _place(tmp_path, monkeypatch):
    """An empty folder to work in, and no model that loads."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweep.toml").write_text('[run]\nmethod = "snapkv"\n[[grid]]\ntask = "kv-short"\n')
    for place in ("kvbench.hf.load.Model.from_module", "kvbench.hf.load.AutoModelForCausalLM.from_pretrained"):
        monkeypatch.setattr(place, lambda *_, **__: pytest.fail("a model was loaded"))


def line_of(name: str, option: str, value: str) -> list[str]:
    """A command line with one option set to a value, in place of one that is there."""
    flag, _, key = option.partition(" ")
    words = shlex.split(LINES[name].replace("{}", GOOD.get(name, "x")))
    if flag in words and not key:
        at = words.index(flag)
        del words[at:at + 2]
    if name == "run" and flag == "--suite":
        del words[words.index("--task"):][:2]
    if name == "suggest" and flag in ("--read", "--computed"):
        del words[words.index("--memory"):][:2]
    return [*words, f"{flag}={key}={value}" if key else f"{flag}={value}" if flag.startswith("--") else value]


def check_refusal(answer: Any) -> None:
    """Exit code 2, and one line on standard error."""
    assert (answer.code, "Traceback" in answer.err) == (2, False), answer.err
    last = answer.err.splitlines()[-1]
    assert last.startswith("kvbench: "), answer.err


def test_the_table_of_command_lines_is_complete():
    assert set(COMMANDS) == {*LINES, "doctor", "models list", "trace list", "trace claims"}
    assert {name for name, _ in NUMBERS} >= {"run", "check", "bench", "plan", "sweep", "trace route"}


@pytest.mark.few(len(NUMBERS))
@pytest.mark.parametrize(("name", "option"), NUMBERS, ids=lambda x: x.replace(" ", "_"))
@pytest.mark.parametrize("value", VALUES)
def test_a_number_out_of_range_is_refused(kvbench, name, option, value):
    check_refusal(kvbench(*line_of(name, option, value)))


@pytest.mark.parametrize(("name", "option"), FILES, ids=lambda x: x.replace(" ", "_"))
@pytest.mark.parametrize("value", [MISSING, LONG, f"{NOBODY}/x"], ids=["missing", "long", "nobody"])
def test_a_missing_path_is_refused(kvbench, name, option, value):
    check_refusal(kvbench(*line_of(name, option, value)))


@pytest.mark.parametrize("value", [MISSING, "missing.toml", "missing.py:Class", LONG, f"{LONG}/x", f"{NOBODY}/x.toml"])
@pytest.mark.parametrize("name", [name for name, line in LINES.items() if "{}" in line and name not in NAMES])
def test_a_missing_path_as_argument_is_refused(kvbench, name, value):
    check_refusal(kvbench(*LINES[name].replace("{}", value).split()))


@pytest.mark.parametrize("line", ["show {}", "run --method full --task {}", "sweep {} --dry-run"])
def test_a_home_folder_that_there_is_not_is_named(kvbench, line):
    answer = kvbench(*line.format(f"{NOBODY}/x.toml").split())
    check_refusal(answer)
    assert f"there is no home folder '{NOBODY}'. Give the path without ~." in answer.err


@pytest.mark.parametrize("line", [
    "run --method snapkv --task kv-short --set window=NESTED",
    "run --method snapkv --task kv-short --device-map map.json",
    "run --method snapkv --task kv-short --model model", "run --method snapkv --suite nested.toml",
    "sweep nested.toml --dry-run", "show ./model",
])
def test_deep_nesting_is_refused(kvbench, tmp_path, line):
    """Python's readers of JSON and TOML raise a RecursionError, which is no ValueError."""
    nested = "[" * 100_000
    (tmp_path / "model").mkdir()
    for name in ("map.json", "model/config.json"):
        (tmp_path / name).write_text(nested)
    (tmp_path / "nested.toml").write_text(f"out = {nested[:5000]}")
    check_refusal(kvbench(*line.replace("NESTED", nested).split()))


def test_a_number_that_no_float_holds_is_refused(kvbench, tmp_path):
    """In result.json of a run; a report of its folder leaves the run out."""
    run, other = next(CURATED.glob("snapkv-niah*")), next(CURATED.glob("h2o-niah*"))
    for folder in (run, other):
        shutil.copytree(folder, tmp_path / "runs" / folder.name)
    path = tmp_path / "runs" / run.name / "result.json"
    document = json.loads(path.read_text())
    document["memory"]["stored_bytes"] = 10**400
    path.write_text(json.dumps(document))
    for command in (("show", path.parent), ("compare", path.parent, tmp_path / "runs" / other.name)):
        answer = kvbench(*map(str, command))
        check_refusal(answer)
        assert "number 10000000000000000000... is too large" in answer.err
    assert kvbench("report", str(tmp_path / "runs"), "-o", str(tmp_path / "report.html")).code == 0


def test_output_to_a_full_disk_ends_in_one_line(monkeypatch, capsys):
    """With exit code 1: the command was right, and the disk failed."""
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("the system has no /dev/full")
    with contextlib.suppress(OSError), full.open("w") as output:
        monkeypatch.setattr("sys.stdout", output)
        assert call(["list", "tasks"]) == 1
    assert capsys.readouterr().err == (
        "kvbench: the output cannot be written: No space left on device. Free space, or write it elsewhere.\n"
    )


def test_swapped_letters_are_nearer_than_one_left_out(capsys):
    """`--modle` has all letters of `--model`, and one more than `--mode`."""
    assert call(["run", "--method", "snapkv", "--task", "niah", "--modle", "mini"]) == 2
    assert "unknown option '--modle'. Did you mean '--model'?" in capsys.readouterr().err
