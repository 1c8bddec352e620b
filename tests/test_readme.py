"""README.md: short, and its numbers, table of methods, Python and output are those of the repository."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

import kvbench as package
from kvbench.registry import list_entries

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
LONGEST = 130
BLOCKS = re.findall(r"^```\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def load_script(name: str) -> ModuleType:
    """A program of scripts/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_it_is_short():
    """A reader sees all of it."""
    assert len(README.splitlines()) <= LONGEST


def test_the_cache_size_is_arithmetic():
    """The first sentence: layers x KV heads x channels x 2 x bytes x tokens."""
    size = r"of ([\d,]+) tokens.* takes ([\d.]+) GB \((\d+) GiB\): (\d+) layers x (\d+) KV heads x (\d+) channels"
    found = re.search(size, README)
    assert found is not None
    tokens, *sizes = (int(x.replace(",", "")) for x in found.group(1, 4, 5, 6))
    total = tokens * 2 * 2
    for size in sizes:
        total *= size
    assert (f"{total / 1e9:.1f}", f"{total / 2**30:.0f}") == found.group(2, 3)


def test_the_demo_prints_what_is_shown(kvbench, tmp_path, monkeypatch):
    """Line by line but for numbers and the run's id: of two samples, because the lines are the same."""
    monkeypatch.chdir(tmp_path)
    (shown,) = (x for x in BLOCKS if x.startswith("┏"))
    answer = kvbench("run", "--method", "snapkv", "--task", "niah", "--samples", "2")
    assert answer.code == 0, answer.err

    def lines(text: str) -> list[list[str]]:
        cells = ([cell.strip() for cell in x.split("│")[1:-1]] for x in text.splitlines() if x.startswith("│"))
        number, run = re.compile(r"[\d.]+(e-\d+)?( m?s\b)?"), re.compile(r"-\w{12}$")
        return [[name, number.sub("N", run.sub("", value))] for name, value in cells]

    assert lines(answer.out) == lines(shown)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(package, "run"), reason="kvbench.run is not there yet")
def test_the_python_shown_runs(tmp_path, monkeypatch, capsys):
    """With two samples instead of twenty; it prints a line for each print."""
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(code.replace("samples=20", "samples=2"), "README.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) >= code.count("print(")


def test_the_page_of_methods_is_that_of_the_cards(monkeypatch):
    """`python scripts/show_methods.py` writes it anew."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    assert (ROOT / "docs" / "methods.md").read_text(encoding="utf-8") == load_script("show_methods").write_page()


def test_every_method_is_in_the_table():
    """By the name that the command line takes; the papers are those of the cards."""
    table = README[README.index("## Methods") : README.index("## Related")]
    (least,) = re.findall(r"more than (\d+) of these methods", README)
    papers = {x.name: x.facts.get("arxiv") for x in list_entries("method")}
    assert len(papers) > int(least)
    assert set(papers) - set(re.findall(r"`([\w-]+)`", table)) == set()
    linked = dict(re.findall(r"\[`([\w-]+)`\]\(https://arxiv\.org/abs/([\d.]+)\)", table))
    assert linked == {name: papers[name] for name in linked}
    assert {x for name, x in papers.items() if x and name != "none"} == set(linked.values())


@pytest.mark.parametrize("name", ["decode", "diffusion", "findings", "results", "reuse", "window"])
def test_tables_are_those_of_the_results(name, monkeypatch):
    """README.md and the pages of results hold what the scripts write into them."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    fill = load_script("pages").fill
    for path, texts in load_script(f"show_{name}").make_texts().items():
        page = path.read_text(encoding="utf-8")
        assert fill(page, texts) == page
