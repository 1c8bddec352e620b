"""The board of trace simulations."""

from __future__ import annotations

import json

import pytest

from kvbench.leaderboard.site.pages import Pages
from kvbench.leaderboard.site.traces import HEIGHT, TOP, read_traces


def row(policy: str, blocks: int | None, rate: float) -> dict[str, object]:
    """One policy at one capacity."""
    return {
        "policy": policy, "settings": {}, "blocks": blocks, "gigabytes": None if blocks is None else blocks / 10,
        "block": rate, "low": rate - 0.05, "high": rate + 0.05, "token": rate, "request": rate, "reused_tokens": 5,
        "of_optimum": rate / 0.5, "evictions": 1, "rejected": 0,
    }


@pytest.fixture
def folder(tmp_path):
    """A results folder with one trace."""
    (tmp_path / "trace").mkdir()
    rows = [row("lru", 100, 0.1), row("lru", 1000, 0.3), row("optimum", 100, 0.4), row("lru", None, 0.5)]
    table = {"kind": "trace simulation", "trace": "made <b>up</b>", "order": "arrival", "model": "m", "rows": rows}
    (tmp_path / "trace" / "made.json").write_text(json.dumps(table))
    return tmp_path


def test_hit_rates_are_drawn_to_scale(folder):
    """The highest interval ends at the top edge, 0 lies at the bottom, capacities grow to the right."""
    (board,) = read_traces(folder).boards
    lru, optimum = board.curves
    assert (lru.label, optimum.label) == ("lru", "optimum")
    assert lru.points[0].x < lru.points[1].x and lru.points[0].x == optimum.points[0].x
    top = 0.55
    assert lru.points[0].y == pytest.approx(TOP + HEIGHT * (1 - 0.1 / top), abs=0.1)
    assert abs(lru.label_y - optimum.label_y) >= 13


def test_the_page_has_every_row_and_escapes_names(folder):
    """Four rows, an infinite capacity, and no markup of the trace's name."""
    traces = read_traces(folder)
    page = Pages({"count": 0}).write("traces", boards=traces.boards, problems=traces.problems).decode()
    assert page.count('<tr class="row">') == 4 and "infinite" in page
    assert "made &lt;b&gt;up&lt;/b&gt;" in page and "<b>up" not in page


@pytest.mark.parametrize("text", ["{", "[]", '{"kind": "run", "rows": []}', '{"kind": "trace simulation"}'])
def test_a_foreign_file_is_named_and_the_rest_is_shown(folder, text):
    """One line for the file; the good trace stays."""
    (folder / "trace" / "bad.json").write_text(text)
    found = read_traces(folder)
    assert len(found.boards) == 1 and found.problems[0].startswith("bad.json is not")
