"""The documents are true: code blocks, hooks, and every field of a result."""

from __future__ import annotations

import dataclasses
import inspect
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel
from transformers import AutoTokenizer

from kvbench.check import check
from kvbench.method import Card, Method
from kvbench.registry import find_method, find_task
from kvbench.runs.journal import Line
from kvbench.runs.results import Result
from kvbench.runs.spec import RunSpec
from kvbench.store import LayerKV
from kvbench.task import encode, prompt_tokens

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "my_method.py"


def code_blocks(name: str) -> list[str]:
    """The Python blocks of a document."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / name).read_text(encoding="utf-8"), re.DOTALL)


def kvbench(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does."""
    command = [str(Path(sys.executable).with_name("kvbench")), *args]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def field_names(kind: type[BaseModel]) -> set[str]:
    """Names of a record's fields and of the records in it."""
    names = set(kind.model_fields)
    for field in kind.model_fields.values():
        for part in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(part, type) and issubclass(part, BaseModel):
                names |= field_names(part)
    return names


def test_the_method_shown_is_the_file():
    """docs/adding_a_method.md shows examples/my_method.py, whole."""
    assert code_blocks("adding_a_method.md") == [EXAMPLE.read_text(encoding="utf-8")]


def test_the_hooks_shown_are_the_hooks():
    """Those of docs/adding_a_method.md are methods of `Method` with these parameters."""
    text = (ROOT / "docs" / "adding_a_method.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\| `(\w+)\(([^)]*)\)` \|", text[: text.index("### The step")], re.MULTILINE)
    assert len(shown) > 10
    for name, parameters in shown:
        _, *actual = inspect.signature(getattr(Method, name)).parameters
        assert [x for x in re.split(r",\s*", parameters) if x not in ("", "*")] == actual, name


@pytest.mark.slow
def test_the_example_method_keeps_every_claim():
    """A method that a newcomer copies passes `kvbench check`."""
    assert [x for x in check(find_method(str(EXAMPLE))) if not x.passed] == []


@pytest.mark.slow
def test_the_task_shown_is_a_task(tmp_path):
    """The file in docs/adding_a_task.md makes examples of exact length, and `kvbench check` finds no fault."""
    (code,) = code_blocks("adding_a_task.md")
    path = tmp_path / "first_word.py"
    path.write_text(code, encoding="utf-8")
    task = find_task(str(path))()
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "kvbench" / "models" / "mini")
    for length in (task.minimum_length(1, tokenizer), 256):
        example = task.example(random.Random(0), id="x", length=length, turns=1, tokenizer=tokenizer)
        assert len(example.turns) == 1
        assert length - 4 < prompt_tokens(encode(task, example, tokenizer)) + example.turns[0].max_new_tokens <= length
    done = kvbench("check", str(path), cwd=tmp_path)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("record", [Result, Line])
def test_the_protocol_explains_every_field(record):
    """docs/protocol.md names every field of result.json and of samples.jsonl, and of the records in them."""
    text = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
    explained = set(re.findall(r"`(\w+)`", text))
    assert field_names(record) - explained == set()


@pytest.mark.parametrize(("name", "heading", "fields"), [
    ("protocol.md", "### samples.jsonl", Line.model_fields), ("protocol.md", "### spec.json", RunSpec.model_fields),
    ("protocol.md", "### result.json", Result.model_fields), ("adding_a_method.md", "## The card", Card.model_fields),
    ("adding_a_method.md", "### The step", [x.name for x in dataclasses.fields(LayerKV) if x.init]),
])
def test_a_section_explains_every_field(name, heading, fields):
    """In its own table or list, not somewhere on the page."""
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    section = re.split(r"^#", text[text.index(f"{heading}\n") + len(heading) :], maxsplit=1, flags=re.MULTILINE)[0]
    explained = {x for line in section.splitlines() if line[:2] in ("| ", "- ") for x in re.findall(r"`(\w+)", line)}
    assert set(fields) - explained == set()


@pytest.mark.slow
def test_the_example_method_runs_from_the_command_line(tmp_path):
    """The commands of docs/adding_a_method.md: check, then run."""
    checked = kvbench("check", str(EXAMPLE), cwd=tmp_path)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    ran = kvbench("run", "--method", str(EXAMPLE), "--task", "niah", "--samples", "2", "--json", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout.splitlines()[-1])
    assert (result["status"], result["method"]["name"], result["n_scored"]) == ("ok", "my-method", 2)
