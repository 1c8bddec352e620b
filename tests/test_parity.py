"""`make parity`: the comparison shows planted differences, and docs/parity.md has every comparison."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import numpy as np
import pytest

from kvbench.budget import Budget
from kvbench.registry import find_method
from kvbench.settings import configure

ROOT = Path(__file__).parent.parent
LAYERS, HEADS, LENGTH, PROMPTS = 2, 2, 16, 2


@pytest.fixture
def parity(monkeypatch):
    """The modules `cases` and `compare`."""
    monkeypatch.syspath_prepend(ROOT / "scripts" / "parity")
    modules = importlib.import_module("cases"), importlib.import_module("compare")
    yield modules
    for module in modules:
        monkeypatch.delitem(importlib.sys.modules, module.__name__)


def make_side(cases, seed=0):
    """Contents of a side's file: a quarter of the entries marked, and logits."""
    draw = np.random.default_rng(seed)
    found = {f"full/{i}/logits": draw.normal(size=(3, 8)) for i in range(PROMPTS)}
    for case in cases:
        for i in range(PROMPTS):
            marks = np.zeros((LAYERS, HEADS, LENGTH), dtype=bool)
            marks[..., :4] = True
            found |= {f"{case.name}/{i}/kept": marks, f"{case.name}/{i}/logits": draw.normal(size=(3, 8))}
    return found


def test_equal_files_are_equal(parity):
    """All heads, all entries, no difference; the effect is that of the compression."""
    cases, compare = parity
    chosen = [x for x in cases.CASES if x.press]
    side = make_side(chosen)
    rows = compare.compare(side, side, PROMPTS)
    assert [x.case for x in rows] == chosen
    assert all((x.agrees, x.equal_heads, x.common_entries, x.logits) == (True, 1, 1, 0) for x in rows)
    assert all(x.effect > 0.1 for x in rows)


def test_one_entry_of_one_head_is_shown(parity):
    """Another entry in one of eight heads, and the difference of its logits; other rows stay equal."""
    cases, compare = parity
    first, second = cases.Case("snapkv", "SnapKVPress"), cases.Case("keydiff", "KeyDiffPress")
    ours, theirs = make_side([first, second]), make_side([first, second])
    theirs[f"{first.name}/1/kept"][1, 0, 3:5] = [False, True]
    theirs[f"{first.name}/1/logits"][2, 5] += 0.25
    planted, other = compare.compare(ours, theirs, PROMPTS, [first, second])
    assert not planted.agrees
    assert (planted.equal_heads, planted.common_entries) == (7 / 8, 31 / 32)
    assert planted.logits == pytest.approx(0.25)
    assert other.agrees
    table = compare.write_table([planted, other], {first.method: "7", second.method: "8"})
    assert f"| `{first.method}` | 7 | `{first.press}` | no | 87.50 % | 96.88 % | 0.25 |" in table


def test_logits_alone_can_differ(parity):
    """Equal entries do not hide wrong logits, and differences of rounding do not count."""
    cases, compare = parity
    case = next(x for x in cases.CASES if x.press)
    for planted, agrees in ((1e-4, True), (1e-2, False)):
        ours, theirs = make_side([case]), make_side([case])
        theirs[f"{case.name}/0/logits"][0, 0] -= planted
        (row,) = compare.compare(ours, theirs, PROMPTS, [case])
        assert (row.agrees, row.equal_heads) == (agrees, 1)


def test_a_share_is_100_percent_only_if_it_is_whole(parity):
    """One of a million entries is not rounded away."""
    _, compare = parity
    assert [compare.share(x) for x in (1.0, 1 - 1e-6, 0.5)] == ["100 %", "99.99 %", "50.00 %"]


def test_the_page_lists_every_comparison(parity):
    """docs/parity.md has a row of every case with a press for each model, and the notes, of unequal rows at least."""
    cases, compare = parity
    page = (ROOT / "docs" / "parity.md").read_text(encoding="utf-8")
    sections = re.split(r"\n## ", page)
    notes = {(x.method, x.press): x.note for x in cases.CASES}
    for name in cases.MODELS:
        (section,) = [x for x in sections if x.startswith(f"{name}\n")]
        rows = re.findall(r"^\| `(.*?)` \| \d+ \| `(.*?)` \|", section, re.MULTILINE)
        assert rows == [(x.method, x.press) for x in cases.CASES if x.press]
        for method, press in re.findall(r"^\| `(.*?)` \| \d+ \| `(.*?)` \| no \|", section, re.MULTILINE):
            assert notes[method, press], f"{method} and {press}: who departs?"
    assert compare.write_notes(cases.CASES) in page
    assert all(f"`{x.method}`" in page for x in cases.CASES)


def test_the_page_is_of_the_registered_versions(parity):
    """A method whose numbers changed has another version, and its rows are compared again: `make parity`."""
    cases, _ = parity
    page = (ROOT / "docs" / "parity.md").read_text(encoding="utf-8")
    stated = set(re.findall(r"^\| `(.*?)` \| (\d+) \|", page, re.MULTILINE))
    assert stated == {(x.method, find_method(x.method).card.version) for x in cases.CASES if x.press}


def test_every_case_can_be_run(parity):
    """Methods exist, take the settings and the budget; contexts have whole numbers of entries at every budget."""
    cases, _ = parity
    assert len({x.name for x in cases.CASES}) == len(cases.CASES)
    for case in cases.CASES:
        settings = {key: value for key, value in case.settings.items() if value != cases.GATES}
        configure(find_method(case.method), settings, "--set", case.method)
        if not case.budget:
            continue
        budget = Budget.parse(case.budget)
        for plan in cases.MODELS.values():
            assert (budget.value * plan.length).is_integer()


def test_kvbench_does_not_import_kvpress():
    """It is in an environment of its own, which needs an older transformers."""
    files = [x for folder in ("kvbench", "methods", "tasks", "kernels") for x in (ROOT / folder).rglob("*.py")]
    assert len(files) > 100
    imports = re.compile(r"^\s*(from|import) kvpress", re.MULTILINE)
    assert not [x for x in files if imports.search(x.read_text(encoding="utf-8"))]
