"""Reports show what the journals of grids hold, and nothing in place of what is missing."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
from pathlib import Path

import matplotlib.image
import pytest
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from kvbench.errors import UserError
from kvbench.heatmap import _draw, draw_grids, read_grid
from kvbench.page import Section, write_page
from kvbench.runs import load_run

GRID = f"{Path(__file__).parent / 'toy_grid.py'}:Cells"
LAST = f"{Path(__file__).parent / 'toy.py'}:Last"


@pytest.fixture
def folder(kvbench, arguments, tmp_path):
    """A finished run of two samples per cell."""
    arguments[arguments.index("--task") + 1] = GRID
    arguments[arguments.index("--samples") + 1] = "12"
    answer = kvbench(*arguments, "--method", LAST, "--budget", "50%")
    assert answer.code == 0, answer.err
    return tmp_path / "runs" / answer.json["run_id"]


def change(folder, edit_line=lambda _: None, **result):
    """Another run like this one."""
    other = folder.with_name("changed")
    shutil.copytree(folder, other)
    lines = [json.loads(x) for x in (other / "samples.jsonl").read_text().splitlines()]
    for line in lines:
        edit_line(line)
    (other / "samples.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in lines))
    whole = json.loads((other / "result.json").read_text())
    (other / "result.json").write_text(json.dumps({**whole, **result}))
    return other


def fail_first(line):
    """The cell of 60 tokens and depth 0 has no sample that did not fail, that of depth 50 has one."""
    if line["index"] in (0, 6, 7):
        line.update(score=None, prediction=None, error="MemoryError: none left")


def fail(folder):
    """A run of which three samples failed."""
    return change(folder, fail_first, status="failed", error="3 of 12 samples failed", n_failed=3, n_scored=9)


def test_a_grid_is_read_from_the_journal(folder):
    """A score for each depth and length; the worst row is over all lengths."""
    grid = read_grid(load_run(folder))
    assert (grid.lengths, grid.depths) == ((50, 60), (0, 50, 100))
    assert grid.cells == ((1, 0), (1, 0.5), (1, 1))
    assert (grid.mean, grid.worst) == (0.75, (0, 0.5))
    assert grid.summary == "mean 0.750 of 12 samples, worst row 0.500 at depth 0 %"
    assert re.fullmatch(r"last 50%, question visible \([0-9a-f]{12}\)", grid.name)
    assert re.fullmatch(r"\d\d\.\d% of the dense cache held, \d+\.\d\d kB", grid.size)


def test_of_a_loss_the_worst_row_is_the_highest(folder):
    """Where lower is better."""
    score = {**json.loads((folder / "result.json").read_text())["score"], "higher_is_better": False}
    assert read_grid(load_run(change(folder, score=score))).worst == (100, 1)


def test_a_cell_whose_samples_failed_has_no_score(folder):
    """It is no zero, and the mean says of how many samples it is."""
    grid = read_grid(load_run(fail(folder)))
    assert grid.cells == ((1, None), (1, 0.5), (1, 1))
    assert grid.worst == (50, pytest.approx(2.5 / 3))
    assert grid.summary == "mean 0.944 of 9 of 12 samples, worst row 0.833 at depth 50 %"


def test_a_cell_without_a_score_is_hatched(folder):
    """Its number is left out, the others stand in theirs."""
    axes = Figure().subplots()
    _draw(axes, read_grid(load_run(fail(folder))), Normalize(0, 1), 5)
    assert [x.get_text() for x in axes.texts] == ["1.00", "1.00", "0.50", "1.00", "1.00"]
    (patch,) = axes.patches
    assert (patch.get_xy(), patch.get_hatch()) == ((1, 0), "////")
    assert "FAILED: 3 of 12 samples failed" in axes.get_title(loc="left")
    assert [x.get_text() for x in axes.get_xticklabels()] == ["50", "60"]
    assert [x.get_text() for x in axes.get_yticklabels()] == ["0", "50", "100"]


def test_no_scores_at_all(folder):
    """Random weights have none: nothing but hatching, and it says so."""
    other = change(folder, lambda line: line.update(score=None), n_scored=0)
    grid = read_grid(load_run(other))
    assert (grid.mean, grid.worst, grid.summary) == (None, None, "no sample has a score")
    draw_grids([grid])


@pytest.mark.parametrize("count", [1, 2, 4, 7])
def test_every_run_has_a_panel(folder, count):
    """The picture grows with the runs and is a picture."""
    picture = draw_grids([read_grid(load_run(folder))] * count)
    high, wide, _ = matplotlib.image.imread(io.BytesIO(picture)).shape
    across = {1: 1, 2: 2, 4: 2, 7: 3}[count]
    assert wide == pytest.approx((across * 4.6 + 1) * 150, abs=1)
    assert high == pytest.approx((-(-count // across) * (0.32 * 3 + 1.5) + 0.4) * 150, abs=1)


@pytest.mark.parametrize("name", ["$\\frac{$", "<b>", "x" * 300])
def test_names_are_drawn_as_they_are(folder, name):
    """No formula is read from them."""
    grid = read_grid(load_run(folder))
    method = grid.result.method.model_copy(update={"name": name})
    object.__setattr__(grid, "result", grid.result.model_copy(update={"method": method}))
    assert draw_grids([grid]).startswith(b"\x89PNG")


@pytest.mark.parametrize("depth", [None, "50", float("nan"), float("inf"), [1]])
def test_facts_that_are_no_places_are_no_grid(folder, depth):
    """A journal may hold anything."""
    with pytest.raises(UserError, match="is of task cells, which is no grid of lengths and depths"):
        read_grid(load_run(change(folder, lambda line: line["facts"].update(depth=depth))))


def test_scattered_places_are_no_grid(folder):
    """More cells than samples: nothing that could be drawn."""
    with pytest.raises(UserError, match="is no grid"):
        read_grid(load_run(change(folder, lambda line: line["facts"].update(depth=line["index"]))))


# The page


def test_a_page_needs_nothing_else_and_runs_nothing():
    """What comes from runs is escaped; the picture is in the page."""
    bad = '<script>alert("x")</script>&'
    section = Section(bad, (bad,), bad, ("", bad), ((bad, bad),), failure=bad)
    page = write_page(bad, b"\x89PNG...", bad, [section])
    assert page.count("&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt;&amp;") == 10
    assert "<script" not in page and "://" not in page and "default-src 'none'" in page
    (data,) = re.findall(r'src="data:image/png;base64,([^"]*)"', page)
    assert base64.b64decode(data) == b"\x89PNG..."


# The command


def test_a_picture(kvbench, folder, tmp_path):
    """The mean and the worst row are printed too; runs may be named by their ids."""
    path = tmp_path / "grid.png"
    answer = kvbench("report", folder.name, "--out", folder.parent, "-o", path)
    assert answer.code == 0, answer.err
    assert path.read_bytes().startswith(b"\x89PNG")
    assert "mean 0.750 of 12 samples, worst row 0.500 at depth 0 %" in answer.out


def test_a_page_with_the_numbers(kvbench, folder, tmp_path):
    """A table for each run; a missing score is a dash, and why is said."""
    path = tmp_path / "grid.html"
    answer = kvbench("report", folder, fail(folder), "-o", path, "--json")
    assert answer.code == 0, answer.err
    page = path.read_text()
    rows = re.findall(r'<th scope="row">(.*?)</th>(.*?)</tr>', page)
    assert [(name, re.findall("<td>(.*?)</td>", cells)) for name, cells in rows] == [
        ("0 %", ["1.000", "0.000"]), ("50 %", ["1.000", "0.500"]), ("100 %", ["1.000", "1.000"]),
        ("0 %", ["1.000", "-"]), ("50 %", ["1.000", "0.500"]), ("100 %", ["1.000", "1.000"]),
    ]
    assert page.count("Failed: 3 of 12 samples failed") == 1
    assert [x["cells"] for x in answer.json] == [[[1, 0], [1, 0.5], [1, 1]], [[1, None], [1, 0.5], [1, 1]]]
    assert [x["worst_row"]["depth"] for x in answer.json] == [0, 50]
    assert "failed: 3 of 12 samples failed" in answer.err


def test_what_a_report_cannot_be(kvbench, folder, arguments, tmp_path):
    """One line each, exit code 2, and no file."""

    def refuse(*more):
        answer = kvbench("report", *more)
        assert (answer.code, answer.out) == (2, ""), answer
        assert answer.err.count("\n") == 1 and "Traceback" not in answer.err
        return answer.err

    png = tmp_path / "grid.png"
    other = refuse(folder, "-o", tmp_path / "grid.pdf")
    assert "unknown kind of report '.pdf'. Did you mean '.png'? Allowed: .html, .png." in other
    assert "unknown kind of report" in refuse(folder, "-o", tmp_path / "grid")
    assert "unknown run 'nowhere'" in refuse("nowhere", "-o", png)
    assert "No such file or directory. Give another -o." in refuse(folder, "-o", tmp_path / "no" / "grid.png")
    (tmp_path / "taken.png").mkdir()
    assert "Is a directory. Give another -o." in refuse(folder, "-o", tmp_path / "taken.png")
    (folder / "result.json").rename(tmp_path / "result.json")
    assert "is not finished" in refuse(folder, "-o", png)
    arguments[arguments.index("--task") + 1] = f"{Path(__file__).parent / 'toy.py'}:Toy"
    other = kvbench(*arguments, "--method", "full").json["run_id"]
    assert "Reports show runs of needle-grid; use `kvbench compare` for others." in refuse(
        folder.parent / other, "-o", png
    )
    assert not png.exists()
