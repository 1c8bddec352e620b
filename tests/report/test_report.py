"""Reports: failed runs are shown as failed, hostile text is escaped, and every number comes from a file."""

from __future__ import annotations

import base64
import csv
import errno
import io
import json
import re
import shutil
import struct
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from kvbench.analysis.columns import flatten
from kvbench.analysis.compare import PROTOCOL, get_field, name_protocol
from kvbench.analysis.load import load_run
from kvbench.analysis.metrics import Metric
from kvbench.analysis.shares import read_share, stored_share
from kvbench.cli import call
from kvbench.errors import UserError
from kvbench.report import charts, page
from kvbench.report.charts import COSTS, draw_cost, draw_distances, draw_quarters, draw_turns
from kvbench.report.grid import draw_grid, draw_picture, list_cells, read_grid
from kvbench.report.group import GroupedRun, find_frontier, group_runs, label_results, name_training
from kvbench.report.sections import HEAD, name_groups, write_report
from kvbench.report.sections import list_cells as list_row
from kvbench.report.table import TableCell, write_table
from kvbench.runs.journal import Agreement, AgreementPart
from kvbench.runs.results import Result

GRID = f"{Path(__file__).parents[1] / 'toys' / 'grid.py'}:Cells"
LAST = f"{Path(__file__).parents[1] / 'toys' / 'toy.py'}:Last"
CURATED = Path(__file__).parents[2] / "results" / "cpu-2-cores"
DRAWN = len(COSTS) - 1
"""Number of costs of an autoregressive model: all but the positions computed."""
CHANGED = {
    "mode": "multi-request", "visibility": "visible", "history": "own", "spec.split": "dev", "spec.parts": 64,
    "spec.chunk": 64, "spec.device": "cuda", "spec.kernels": "triton", "task.settings": {"added": 1}, "task.stop": [7],
    "task.bos": "template", "task.truncation": "middle",
    "spec.generation": {"decoding": "greedy", "max_new_tokens": 3}, "environment.device_map": {"": "cpu"},
}
"""Other values of protocol fields, where they are not any number or text."""
HOSTILE = '</script><img src=x onerror=alert(1)>&"\'<!--'


@pytest.fixture(scope="module")
def finished(model_folder, tmp_path_factory) -> Path:
    """A finished run of two samples per cell."""
    out = tmp_path_factory.mktemp("runs")
    assert call([
        "run", "--task", GRID, "--model", str(model_folder), "--samples", "12", "--device", "cpu", "--out", str(out),
        "--method", LAST, "--budget", "50%",
    ]) == 0
    (folder,) = (x for x in out.iterdir() if x.is_dir())
    return folder


@pytest.fixture
def folder(finished, tmp_path) -> Path:
    """A copy of the run for one test."""
    return Path(shutil.copytree(finished, tmp_path / "runs" / finished.name))


def change(folder, edit_line=lambda _: None, **result):
    """A changed copy of the run."""
    other = folder.with_name("changed")
    shutil.copytree(folder, other)
    lines = [json.loads(x) for x in (other / "samples.jsonl").read_text().splitlines()]
    for line in lines:
        edit_line(line)
    (other / "samples.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in lines))
    whole = json.loads((other / "result.json").read_text())
    (other / "result.json").write_text(json.dumps({**whole, "run_id": "changed", **result}))
    return other


def fail_first(line):
    """Fail all samples of the cell (60 tokens, depth 0), and one of the cell (60, 50)."""
    if line["index"] in (0, 6, 7):
        line.update(score=None, prediction=None, error="MemoryError: none left")


def fail(folder):
    """A copy of the run with three failed samples."""
    return change(folder, fail_first, status="failed", error="3 of 12 samples failed", n_failed=3, n_scored=9)


# Grids


def test_a_grid_is_read_from_the_journal(folder):
    """One score per depth and length; the worst mean is over all lengths."""
    grid = read_grid(load_run(folder))
    assert (grid.lengths, grid.depths) == ((50, 60), (0, 50, 100))
    assert grid.cells == ((1, 0), (1, 0.5), (1, 1))
    assert (grid.mean, grid.worst) == (0.75, (0, 0.5))
    assert grid.summary == "mean 0.750 of 12 samples, worst mean 0.500 at depth 0 %"
    assert re.fullmatch(r"last 50%, question visible \([0-9a-f]{12}\)", grid.name)
    assert re.fullmatch(r"stores \d\d\.\d% of the full cache, \d+\.\d\d kB", grid.size)


def test_for_losses_the_worst_depth_has_the_highest_mean(folder):
    """For scores where lower is better."""
    score = {**json.loads((folder / "result.json").read_text())["score"], "higher_is_better": False}
    assert read_grid(load_run(change(folder, score=score))).worst == (100, 1)


def test_a_cell_whose_samples_failed_has_no_score(folder):
    """It is not zero, and the mean states its number of samples."""
    grid = read_grid(load_run(fail(folder)))
    assert grid.cells == ((1, None), (1, 0.5), (1, 1))
    assert grid.worst == (50, pytest.approx(2.5 / 3))
    assert grid.summary == "mean 0.944 of 9 of 12 samples, worst mean 0.833 at depth 50 %"
    assert {"length": 60, "depth": 0, "score": None} in list_cells(grid)
    assert draw_grid(grid, [1.0])["datasets"] == {"cells": list_cells(grid)}


@pytest.mark.slow
def test_a_grid_without_scores(folder):
    """Models with random weights have no scores."""
    grid = read_grid(load_run(change(folder, lambda line: line.update(score=None), n_scored=0)))
    assert (grid.mean, grid.worst, grid.summary) == (None, None, "no sample has a score")
    assert draw_picture([grid]).startswith(b"\x89PNG")


@pytest.mark.parametrize("depth", [None, "50", float("nan"), float("inf"), [1]])
def test_invalid_depths_give_no_grid(folder, depth):
    """A journal may contain any value."""
    assert read_grid(load_run(change(folder, lambda line: line["facts"].update(depth=depth)))) is None


def test_scattered_depths_give_no_grid(folder):
    """More cells than samples."""
    assert read_grid(load_run(change(folder, lambda line: line["facts"].update(depth=line["index"])))) is None


@pytest.mark.slow
def test_every_grid_has_a_panel(folder):
    """Four panels form a square; long names are wrapped."""
    grid = read_grid(load_run(folder))
    method = grid.result.method.model_copy(update={"name": HOSTILE * 9})
    object.__setattr__(grid, "result", grid.result.model_copy(update={"method": method}))
    one, four = (struct.unpack(">II", draw_picture([grid] * count)[16:24]) for count in (1, 4))
    assert [1.9 < b / a < 2.3 for a, b in zip(one, four, strict=True)] == [True, True]


# Groups


@pytest.fixture(scope="module")
def runs():
    """Curated runs of one group (full cache, random at two budgets, KIVI twice, H2O), and one run of another group."""
    found = []
    for name in ("full", "random", "kivi", "h2o"):
        here = [load_run(x) for x in sorted(CURATED.glob(f"{name}-niah_multikey_1-*"))]
        found += [x for x in here if x.result.task.length == 1024 and x.result.visibility == "hidden"][:2]
    return [*found, next(
        x for x in map(load_run, sorted(CURATED.glob("h2o-*"))) if x.result.visibility == "first-turn"
    )]


@pytest.fixture(scope="module")
def groups(runs):
    return group_runs(runs)


def edit(entry: GroupedRun, **document) -> GroupedRun:
    """The run with edited fields of its result: `method__name="x"`."""
    whole = entry.result.model_dump(mode="json")
    for key, value in document.items():
        *parents, last = key.split("__")
        place = whole
        for parent in parents:
            place = place[parent]
        place[last] = value
    return replace(entry, result=Result.model_validate(whole))


def test_groups_hold_one_protocol(groups, runs):
    """The run with another visibility has its own group."""
    assert sorted(map(len, groups)) == [1, len(runs) - 1]
    for entries in groups:
        assert len({(x.result.visibility, x.result.task.length) for x in entries}) == 1


def test_groups_of_the_same_line_show_where_they_differ(groups):
    """Twice as many contexts are another group, which the title says; other titles stay short."""
    first, other = groups[0][0], groups[1][0]
    more = edit(first, spec__samples=2 * first.result.spec.samples).result
    plain = name_groups([first.result, other.result])
    titles = name_groups([first.result, more, other.result])
    assert titles[0].startswith(f"{plain[0]}; {first.result.spec.samples} contexts")
    assert titles[1].startswith(f"{plain[0]}; {more.spec.samples} contexts")
    assert titles[2] == plain[1]


@pytest.mark.parametrize("field", [x for x in PROTOCOL if x != "latency.timing"])  # it has one value
def test_a_title_names_every_field_that_divides_groups(groups, field):
    """Two tables with the same heading could not be told apart."""
    result = groups[0][0].result
    document = result.model_dump(mode="json")
    value, (*parents, name) = get_field(document, field), field.split(".")
    inner = get_field(document, ".".join(parents)) if parents else document
    inner[name] = CHANGED[field] if field in CHANGED else f"x{value}" if value is None or isinstance(value, str) else (
        not value if isinstance(value, bool) else value + 1
    )
    if name in document["spec"] and not parents:
        document["spec"][name] = inner[name]
    other = Result.model_validate(document)
    assert name_protocol(other) != name_protocol(result)
    assert len(set(name_groups([result, other]))) == 2


def test_runs_are_sorted_with_ranks_and_differences(groups):
    """The full cache and 4-bit KIVI share the first rank; the full cache has no difference."""
    entries = max(groups, key=len)
    scores = [x.result.score.mean for x in entries]
    assert scores == sorted(scores, reverse=True)
    assert [x.rank for x in entries] == sorted(x.rank for x in entries)
    first = {x.result.method.name for x in entries if x.rank == 1}
    assert "full" in first and "random" not in first
    assert [x.result.method.name for x in entries if x.difference is None] == ["full"]
    for x in entries:
        if x.difference is not None:
            full = next(y for y in entries if y.difference is None)
            assert x.difference.mean == pytest.approx(x.result.score.mean - full.result.score.mean)


@pytest.mark.parametrize("higher", [True, False])
def test_failed_runs_are_last_where_nothing_is_ranked(runs, higher):
    """Also where lower is better: no score is not a score of 0."""
    def shorten(run, mean, status="ok"):
        score = run.result.score.model_copy(update={"mean": mean, "higher_is_better": higher})
        lines = {key: line for key, line in run.lines.items() if line.index < 3}
        return replace(run, lines=lines, result=run.result.model_copy(update={"score": score, "status": status}))

    mean = -0.5 if higher else 0.5  # 0 would be better
    (entries,) = group_runs([shorten(runs[0], None, "failed"), *(shorten(x, mean) for x in runs[1:3])])
    assert [(x.rank, x.result.status) for x in entries] == [(None, "ok"), (None, "ok"), (None, "failed")]


def test_labels_distinguish_runs(runs):
    """By settings that differ between runs of a method, or by id if none differ."""
    kivi = [x.result for x in runs if x.result.method.name == "kivi"]
    assert sorted(label_results(kivi)) == ["kivi key_bits=2 value_bits=2", "kivi key_bits=4 value_bits=4"]
    assert label_results(kivi[:1]) == ["kivi"]
    twice = label_results([kivi[0], kivi[0].model_copy(update={"run_id": "x-12"})])
    assert twice == [f"kivi ({kivi[0].run_id.rpartition('-')[2]})", "kivi (12)"]
    assert label_results([x.result for x in runs if x.result.method.name == "random"][:1])[0].startswith("random ")


@pytest.mark.parametrize(("calibration", "said"), [
    (None, ""), ("64 texts", "calibrated"), ("64 texts, trained", "trained on another text"), (5, "calibrated"),
])
def test_a_calibration_is_named_whatever_a_file_has(groups, calibration, said):
    """The card of a result is of no fixed form."""
    card = {"calibration": calibration}
    assert name_training(edit(max(groups, key=len)[0], method__card=card).result) == said


def test_the_pareto_frontier():
    """Cheapest first, each better than all cheaper ones; duplicates are dropped."""
    points = [(0.5, 0.9), (0.1, 0.2), (0.5, 0.8), (0.3, 0.2), (1.0, 0.9), (0.2, 0.5)]
    assert find_frontier(points, higher_is_better=True) == [1, 5, 0]
    assert find_frontier(points, higher_is_better=False) == [1]
    assert find_frontier([], higher_is_better=True) == []


def test_read_and_stored_bytes_have_separate_charts(groups):
    """Each shows its own measured number."""
    entries = max(groups, key=len)
    for cost, share in ((COSTS[0], stored_share), (COSTS[1], read_share)):
        points = draw_cost(entries, cost)["datasets"]["rows"]
        assert [x["cost"] for x in points] == [share(x.result) for x in entries]
    result = entries[0].result
    assert read_share(result) == result.memory.read_bytes_per_step / result.memory.full_read_bytes_per_step


def test_a_chart_has_its_anchors_and_leaves_failures_out(groups):
    """Full cache, random method and frontier; runs without a score are not drawn."""
    entries = max(groups, key=len)
    failed = edit(entries[0], status="failed", error="out of memory")
    spec = draw_cost([*entries, failed, edit(entries[0], score__mean=None)], COSTS[0])
    data = spec["datasets"]
    assert len(data["rows"]) == len(entries)
    assert [x["method"] for x in data["full"]] == ["full"]
    assert {x["method"] for x in data["chance"]} == {"random"}
    best = find_frontier([(x["cost"], x["score"]) for x in data["rows"]], higher_is_better=True)
    assert data["frontier"] == [data["rows"][i] for i in best]
    assert {layer["data"]["name"] for layer in spec["layer"]} == data.keys()
    assert draw_cost(entries[:1], COSTS[0]) is None


def test_labels_of_a_chart_do_not_overlap():
    """The first of two points that are near in both directions has one; on the right it stands left of its point."""
    a, near, below, left = ({"cost": x, "score": y} for x, y in ((1.0, 0.9), (0.95, 0.88), (0.95, 0.5), (0.5, 0.88)))
    points = [a, near, below, left]
    assert charts._choose_labels(points, points, log=False) == {"names": [left], "far": [a, below]}


def test_labels_on_a_logarithmic_axis_keep_their_distance_there():
    """From an eighth to one, a quarter is as far from an eighth as a half is from one; the middle is left of 0.6."""
    points = [{"cost": x, "score": 0.9} for x in (1.0, 0.5, 0.25, 0.24, 0.125)]
    one, half, quarter, _, eighth = points
    assert charts._choose_labels(points, points, log=True) == {"names": [quarter, eighth], "far": [one, half]}
    assert charts._choose_labels(points, points, log=False) == {"names": [half, quarter, eighth], "far": [one]}


def test_shares_have_a_logarithmic_axis_unless_one_is_zero(groups):
    """A logarithmic axis has no place for a run that stores nothing."""
    one, other = max(groups, key=len)[:2]
    for first, kind in ((one, "log"), (edit(one, memory__stored_bytes=0), None)):
        axis = draw_cost([first, other], COSTS[0])["layer"][0]["encoding"]["x"]
        assert axis["scale"].get("type") == kind


def test_a_point_without_an_interval_shows_none(groups):
    """A graded score that does not vary has none; one of no width would be read as certainty."""
    entries = max(groups, key=len)
    plain, whole = draw_cost([edit(entries[0], score__ci95=None), entries[1]], COSTS[0])["datasets"]["rows"]
    assert plain["shown"] == f"{plain['score']:.3f}, no interval"
    assert re.fullmatch(r"\d\.\d{3} \[\d\.\d{3}, \d\.\d{3}\]", whole["shown"])


def test_turn_chart_shows_every_turn(groups):
    """One cell per run and turn; runs of one turn have no chart."""
    entries = max(groups, key=len)
    cells = draw_turns(entries)["datasets"]["cells"]
    assert [x["score"] for x in cells] == [part.mean for x in entries for part in x.result.score.by_turn]
    single = entries[0].result.score.model_copy(update={"by_turn": entries[0].result.score.by_turn[:1]})
    assert draw_turns([GroupedRun(entries[0].result.model_copy(update={"score": single}), "x")]) is None


def test_position_charts_show_quarters_and_distances(groups):
    """A cell per quarter of a task that measures them, and per part of a long answer; others have no chart."""
    entry = max(groups, key=len)[0]
    assert draw_quarters([entry]) is None
    assert draw_distances([entry]) is None
    scores = {"growth-lines@1": 0.5, **{f"growth-lines-q{i}@1": i / 10 for i in (2, 1, 3, 4)}}
    parts = tuple(AgreementPart(start=x, top1=1 - x / 256, kl=0.0, n=64) for x in (0, 64, 128))
    agreement = Agreement(top1=0.9, kl=0.0, n=192, by_distance=parts)
    changed = GroupedRun(entry.result.model_copy(update={"scores": scores, "agreement": agreement}), "x")
    cells = draw_quarters([changed])["datasets"]["cells"]
    assert [(x["quarter of the answer"], x["score"]) for x in cells] == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
    cells = draw_distances([changed])["datasets"]["cells"]
    assert [(x["from token"], x["score"]) for x in cells] == [(0, 1.0), (64, 0.75), (128, 0.5)]


# Pages


class Tags(HTMLParser):
    """The parsed page: elements with attributes, text, and the content of data blocks."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.data: list[str] = []
        self.text = ""
        self.inside = ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.inside = dict(attributes).get("type", tag) if tag in ("script", "style") else ""

    def handle_endtag(self, tag):
        self.inside = ""

    def handle_data(self, data):
        if self.inside == "application/json":
            self.data.append(data)
        elif not self.inside:
            self.text += data


@pytest.mark.slow
def test_submitted_text_never_becomes_markup(groups):
    """Names, settings, errors and labels, in table cells and chart data."""
    fields = (
        "run_id", "method__name", "method__family", "task__name", "task__suite", "task__prompt_id", "task__scorer",
        "model__id", "model__dtype", "model__sha256", "score__metric", "environment__cpu", "environment__kvbench",
        "environment__started", "environment__git__commit", "kernels__implementation", "budget__asked", "suite",
    )
    timed = next(x for x in max(groups, key=len)[1:] if x.result.latency.n)  # it is in every chart
    entry = edit(timed, **dict.fromkeys(fields, HOSTILE), method__settings={HOSTILE: HOSTILE},
                 task__settings={HOSTILE: HOSTILE}, budget__resolved={HOSTILE: HOSTILE}, kernels__ops=[HOSTILE])
    failed = edit(entry, status="failed", error=HOSTILE)
    entries = [GroupedRun(x.result, HOSTILE, 1) for x in (entry, entry, failed)]
    found = Tags(write_report([entries], []).decode())
    tags = [tag for tag, _ in found.tags]
    assert "img" not in tags and tags.count("script") == DRAWN + 1 + 3
    assert not [x for _, attributes in found.tags for x in attributes if x.startswith("on")]
    assert found.text.count(HOSTILE) > 20
    assert json.loads(found.data[0])["datasets"]["rows"][0]["label"] == HOSTILE


def test_a_page_fetches_nothing_and_runs_only_its_own_scripts(groups):
    """A strict policy with script hashes; all links stay inside the page."""
    found = Tags(write_report(groups, []).decode())
    (policy,) = [x["content"] for tag, x in found.tags if tag == "meta" and "http-equiv" in x]
    assert policy.startswith("default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-")
    assert "eval" not in policy and policy.count("'sha256-") == 3 and "http" not in policy
    leads = [value for _, x in found.tags for key, value in x.items() if key in ("href", "src")]
    assert leads and all(x.startswith(("#", "data:")) for x in leads)
    assert len({x["id"] for _, x in found.tags if "id" in x}) == len([x for _, x in found.tags if "id" in x])


def test_the_data_of_a_page_are_the_results(groups):
    """CSV and JSON have one row per run, in the order of the page."""
    found = re.findall(r'download="([^"]*)" href="data:[^,]*;base64,([^"]*)"', write_report(groups, []).decode())
    files = {name: base64.b64decode(data).decode() for name, data in found}
    rows = [flatten(x.result) for entries in groups for x in entries]
    assert json.loads(files["runs.json"]) == [{k: v for k, v in x.items() if v is not None} for x in rows]
    read = list(csv.DictReader(io.StringIO(files["runs.csv"])))
    assert [x["run_id"] for x in read] == [x["run_id"] for x in rows]
    assert [float(x["score"]) for x in read] == [x["score"] for x in rows]


def test_a_row_shows_its_result(groups):
    """Under the right heads; a failed run shows its error in place of a score."""
    entry = max(groups, key=len)[-1]
    heads = [x.text for x in HEAD]
    shown = dict(zip(heads[:4], list_row(entry), strict=False))
    assert shown["score"] == TableCell(f"{entry.result.score.mean:.3f}", entry.result.score.mean)
    assert shown["method"] == TableCell(entry.label)
    assert len(list_row(entry)) == len(heads)
    failed = edit(entry, status="failed", error="out of memory", score__mean=None, score__ci95=None)
    failed = GroupedRun(failed.result, "x")
    assert [x.text for x in list_row(failed)][:8] == [
        "-", "x", entry.result.method.family, "out of memory", "-", "-", "-", "-"
    ]
    none = list_row(edit(entry, score__mean=None, score__ci95=None))
    assert none[heads.index("score")].text == f"no score: scorer {entry.result.task.scorer} applies to no answer"


def test_every_number_of_a_row_is_under_its_head(groups):
    """Each of them another number, so that no two columns can be exchanged."""
    entry = next(x for x in max(groups, key=len) if x.result.method.name == "h2o")
    strict = entry.result.task.scorer.replace("@", "-strict@")
    entry = edit(
        entry, memory__full_bytes=1000, memory__stored_bytes=100, memory__end_full_bytes=2000,
        memory__end_stored_bytes=300, memory__full_read_bytes_per_step=1500, memory__read_bytes_per_step=600,
        memory__distinct_read_bytes_per_step=300, memory__bytes_per_token=77.0, scores={strict: 0.125},
        output__stop_reasons={"stop": 7, "length": 1}, latency__tpot_s=0.0123, latency__ttft_s=0.5,
        agreement={"top1": 0.9, "kl": 0.0456, "n": 9}, effect__n_acted=3, effect__n=4,
    )
    heads, row = ([x.text for x in cells] for cells in (HEAD, list_row(entry)))
    shown = slice(heads.index("stored"), heads.index("run"))
    assert dict(zip(heads[shown], row[shown], strict=True)) == {
        "stored": "10.0%", "conversation": "15.0%", "bytes/token": "77", "read": "40.0%", "distinct": "20.0%",
        "strict": "0.125", "cut": "12.5%", "per token": "12.3 ms", "first token": "500.0 ms", "top-1": "0.900",
        "KL, nats": "0.0456", "effect in": "3 of 4",
    }


def test_tables_are_escaped_and_sort_by_number():
    """One cell per row is its head; sort keys are kept."""
    head, row = [TableCell("a", kind="pick"), TableCell("b")], [TableCell("<b>"), TableCell("1 %", 0.01)]
    table = write_table("<c>", head, [row], shaded=[True])
    assert table == (
        '<div class="scroll"><table>\n<caption>&lt;c&gt;</caption>\n'
        '<thead><tr><th scope="col" class="pick">a</th><th scope="col">b</th></tr></thead>\n<tbody>\n'
        '<tr class="shaded"><th scope="row">&lt;b&gt;</th><td data-order="0.01">1 %</td></tr>\n'
        "</tbody>\n</table></div>\n"
    )


# The command


def test_report_as_picture(kvbench, folder, tmp_path):
    """Mean and worst depth are printed; runs can be given by id."""
    path = tmp_path / "grid.png"
    answer = kvbench("report", folder.name, "--out", folder.parent, "-o", path)
    assert answer.code == 0, answer.err
    assert path.read_bytes().startswith(b"\x89PNG")
    shown = " ".join(x.split("│")[2].strip() for x in answer.out.splitlines() if x.startswith("│"))
    assert "mean 0.750 of 12 samples, worst mean 0.500 at depth 0 %" in shown


def test_a_report_that_cannot_be_written_leaves_the_old_one(kvbench, folder, tmp_path, monkeypatch):
    """As a disk that is full."""
    (page := tmp_path / "page" / "report.html").parent.mkdir()
    page.write_text("old")

    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("kvbench.runs.files.os.fsync", fail)
    for command in (("report", folder), ("trace", "run", "--policy", "lru", "--blocks", "100")):
        answer = kvbench(*command, "-o", page)
        assert answer.code == 2
        assert "cannot be written: No space left on device. Give another" in answer.err
        assert [(x.name, x.read_text()) for x in page.parent.iterdir()] == [("report.html", "old")]


def test_report_of_a_folder(kvbench, folder, tmp_path):
    """Tables and grids of all runs; a missing score is a dash, with the reason."""
    path = tmp_path / "report.html"
    fail(folder)
    answer = kvbench("report", folder.parent, "-o", path, "--json")
    assert answer.code == 0, answer.err
    text = path.read_text()
    numbers = text[text.index("Mean score by depth") :]
    rows = re.findall(r'<th scope="row">([^<]*%)</th>(.*?)</tr>', numbers)
    plain = ["1.000", "0.000"], ["1.000", "0.500"], ["1.000", "1.000"]
    assert sorted(re.sub("<[^>]*>", " ", cells).split() for _, cells in rows) == sorted(
        [*plain, ["1.000", "-"], *plain[1:]]
    )
    assert text.count("Failed: 3 of 12 samples failed") == 1
    assert {x["run_id"]: x["cells"] for x in answer.json["grids"]} == {
        folder.name: [[1, 0], [1, 0.5], [1, 1]], "changed": [[1, None], [1, 0.5], [1, 1]],
    }
    assert "changed failed: 3 of 12 samples failed" in answer.err
    (entries,) = answer.json["groups"]
    assert [(x["rank"], x["status"]) for x in entries] == [(1, "ok"), (None, "failed")]


@pytest.mark.slow
def test_invalid_report_requests(kvbench, folder, arguments, tmp_path):
    """One line each, at most after the one that says that runs are read; exit code 2, and no file."""

    def refuse(*more):
        answer = kvbench("report", *more)
        assert (answer.code, answer.out) == (2, ""), answer
        error = answer.err.removeprefix("reading runs ...\n")
        assert error.count("\n") == 1 and "Traceback" not in error
        return error

    png = tmp_path / "grid.png"
    other = refuse(folder, "-o", tmp_path / "grid.pdf")
    assert "unknown report format '.pdf'. Did you mean '.png'? Allowed: .html, .png." in other
    assert "unknown report format" in refuse(folder, "-o", tmp_path / "grid")
    assert "unknown run 'nowhere'" in refuse("nowhere", "-o", png)
    assert "No such file or directory. Give another path with -o." in refuse(folder, "-o", tmp_path / "no" / "grid.png")
    (tmp_path / "taken.png").mkdir()
    assert "Is a directory. Give another path with -o." in refuse(folder, "-o", tmp_path / "taken.png")
    arguments[arguments.index("--task") + 1] = f"{Path(__file__).parents[1] / 'toys' / 'toy.py'}:Toy"
    other = kvbench(*arguments, "--method", "full").json["run_id"]
    assert "A .png shows runs of needle-grid only; use -o report.html for others." in refuse(
        folder.parent / other, "-o", png
    )
    (folder / "result.json").rename(tmp_path / "result.json")
    assert "is not finished" in refuse(folder, "-o", png)
    assert "there is no finished run in" in refuse(tmp_path / "taken.png", "-o", png)
    assert not png.exists()


@pytest.mark.slow
@pytest.mark.parametrize("package", ["altair", "vl_convert", "itables"])
def test_a_missing_package_names_the_extra(groups, package, monkeypatch):
    """In one line."""
    for kept in (charts._outline, page.read_vega, page.read_datatables):
        kept.cache_clear()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=r"needs the package .* pip install 'kvbench\[report\]'"):
        write_report(groups, [])


# In a browser


@pytest.mark.slow
def test_a_page_works_in_a_browser(open_page, groups, tmp_path):
    """Charts without `eval`, sorting and filtering, also by keyboard and with hostile names.

    `open_page` fails on console errors, requests and dialogs.
    """
    from playwright.sync_api import expect  # waits until the page has drawn

    entries = max(groups, key=len)
    hostile = edit(entries[1], run_id=HOSTILE, method__name=HOSTILE, method__family=HOSTILE, budget__asked=HOSTILE)
    path = tmp_path / "report.html"
    path.write_bytes(write_report([[*entries, GroupedRun(hostile.result, HOSTILE, 1)]], []))
    page = open_page(path)
    for chart in page.locator(".chart").all():
        chart.scroll_into_view_if_needed()
        chart.locator("svg.marks").wait_for()
    assert page.locator("svg.marks").count() == DRAWN + 1
    page.locator(".chart .mark-symbol.role-mark path").nth(len(entries)).hover(force=True)
    assert HOSTILE in page.locator("#vg-tooltip-element").text_content()
    labels = page.locator("table.rows tbody th")
    shown = [x.label for x in entries] + [HOSTILE]
    assert labels.all_text_contents() == shown

    head = page.get_by_role("columnheader", name=Metric.of(entries[0].result.score).title)
    score = head.get_by_role("button")
    score.click()
    expect(labels.first).to_have_text(min(entries, key=lambda x: x.result.score.mean).label)
    score.focus()
    page.keyboard.press("Enter")
    expect(head).to_have_attribute("aria-sort", "descending")
    expect(labels.first).to_have_text(max(entries, key=lambda x: x.result.score.mean).label)

    quantized = [x.label for x in entries if x.label.startswith("kivi")]
    page.get_by_label("Filter:").fill("kivi")
    expect(labels).to_have_text(quantized)
    page.get_by_label("Filter:").fill("onerror")
    expect(labels).to_have_text([HOSTILE])
    page.get_by_label("Filter:").fill("")
    expect(labels).to_have_count(len(shown))
    page.get_by_role("columnheader", name="family").locator(".dtcc-button").click()
    page.locator(".dtcc-list-buttons").get_by_role("button", name="quantization").click()
    expect(labels).to_have_text(quantized)

    with page.expect_download() as download:
        page.get_by_text("runs.csv").click()
    assert download.value.path().read_text().startswith("run_id,")


@pytest.mark.slow
def test_a_page_fits_a_narrow_screen(open_page, groups, tmp_path):
    """Only tables are wider than the screen; they scroll, also by keyboard."""
    path = tmp_path / "report.html"
    path.write_bytes(write_report(groups, []))
    page = open_page(path, width=390)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    table = page.get_by_role("region").first
    table.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_timeout(500)  # it glides
    assert table.evaluate("x => x.scrollLeft") > 0


@pytest.mark.slow
def test_a_long_reason_of_a_failed_run_does_not_move_the_columns_away(open_page, groups, tmp_path):
    """It is wrapped in its cell."""
    entries = max(groups, key=len)
    failed = edit(entries[1], run_id="failed", status="failed", error="the score has no number. " * 40)
    path = tmp_path / "report.html"
    path.write_bytes(write_report([[*entries, GroupedRun(failed.result, "failed")]], []))
    cell = open_page(path).locator("td.failed").first
    assert cell.bounding_box()["width"] < 500
