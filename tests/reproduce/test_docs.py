"""docs/reproducing.md: every command in it is one that kvbench takes, and its tables are what the code and data say."""

from __future__ import annotations

import functools
import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import typer

from kvbench.cli import app
from kvbench.reproduce.claims import find_claims
from kvbench.reproduce.paper import read_paper
from kvbench.reproduce.shape import ShapeRecord, find_findings, read_shape
from kvbench.runs.files import read_file

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "reproducing.md").read_text(encoding="utf-8")
FENCES = re.split(r"^```(.*)\n", PAGE, flags=re.MULTILINE)
BLOCKS = [text for kind, text in zip(FENCES[1::4], FENCES[2::4], strict=True) if not kind]
LINES = [line.partition("#")[0].strip() for block in BLOCKS for line in block.splitlines()]
INLINE = [x for x in re.findall(r"`(kvbench [^`]+)`", PAGE) if " " in x.removeprefix("kvbench ")]
COMMANDS = sorted({x for x in (*LINES, *INLINE) if x.startswith("kvbench ")})
RECORD = ROOT / "results" / "shape" / "findings.json"


def test_the_page_has_commands():
    """The tests below look at something, and blocks without a language hold commands only."""
    assert len(COMMANDS) > 20
    assert {x.split()[0] for x in LINES if x} == {"kvbench", "make", "hf"}


@functools.cache  # building it takes longer than parsing
def parser():
    """The command line's own parser."""
    return typer.main.get_command(app)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_one_that_kvbench_takes(command):
    """Parsed by the command line's own parser, and not run; a claim or finding in it is there."""
    _, *arguments = shlex.split(command)
    group = parser()
    context = group.make_context("kvbench", list(arguments))
    name, found, rest = group.resolve_command(context, [*context._protected_args, *context.args])
    assert found is not None
    given = found.make_context(name, rest, parent=context).params
    if name == "reproduce" and given["claim"] is not None and not given["claim"].startswith("path/to/"):
        assert find_claims(given["claim"])
    if name == "reproduce" and given["shape"] is not None:
        assert find_findings(read_shape(), given["shape"])


def test_a_command_that_is_wrong_would_be_found():
    """An option that is not there is no command."""
    with pytest.raises(Exception, match="--dry"):
        test_a_command_is_one_that_kvbench_takes("kvbench reproduce snapkv --dryrun")


def test_the_form_that_is_shown_is_a_claims_file(tmp_path):
    """The page's own TOML is read."""
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    path = tmp_path / "paper.toml"
    path.write_text(text)
    assert read_paper(path).table[0].rows["SnapKV 1024"].budget == "1024"


@pytest.mark.slow
def test_hours_are_the_arithmetic_s(capsys):
    """The table is what scripts/predict_hours.py prints."""
    path = ROOT / "scripts" / "predict_hours.py"
    spec = importlib.util.spec_from_file_location("predict_hours", path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.main()
    assert f"\n\n{capsys.readouterr().out}\n" in PAGE


@pytest.mark.skipif(not RECORD.exists(), reason="nothing is recorded")
def test_findings_are_said_as_they_are_recorded():
    """Each finding with its verdict on the bundled models."""
    said = dict(re.findall(r"^\| `([a-z-]+)` \| .*? \| (holds|does not hold|undecided) \|", PAGE, re.MULTILINE))
    assert said == {x.name: x.verdict for x in read_file(RECORD, ShapeRecord).findings}
