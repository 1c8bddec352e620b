"""Suites: selection of runs, results and suite.json, resuming, and bad input."""

from __future__ import annotations

import itertools
import json
import re
import sys
import types
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from kvbench.errors import UserError
from kvbench.registry import list_entries
from kvbench.runs import prepare as preparation
from kvbench.runs import sample
from kvbench.runs.options import Request
from kvbench.runs.request import check
from kvbench.runs.results import Result
from kvbench.sweep.cell import CellReport, SweepCell
from kvbench.sweep.suite import FOLDER, SuiteMean, average, find_suite, list_suites, read_suite, save_suite

TOYS = Path(__file__).parents[1] / "toys" / "toy.py"
CURATED = Path(__file__).parents[2] / "results" / "cpu-2-cores"
LAST, TOY = f"{TOYS}:Last", f"{TOYS}:Toy"
NAMES = sorted(x.stem for x in FOLDER.glob("*.toml"))
NEEDS = {alias: x.facts.get("needs") for x in list_entries("task") for alias in x.names}


@pytest.fixture
def suite(tmp_path):
    """Writes a suite of the toy task in two modes."""

    def write(tables: str = "", head: str = 'name = "toys"\nversion = "2"\nsummary = "s"\n') -> Path:
        path = tmp_path / "toys.toml"
        tables = tables or f'[[grid]]\ntask = "{TOY}"\nmode = ["multi-turn", "multi-request"]\nlength = [60, 70]\n'
        path.write_text(f"{head}{tables}")
        return path

    return write


@pytest.fixture
def options(model_folder, tmp_path):
    """Options that every suite run of these tests needs."""
    runs = str(tmp_path / "runs")
    return ["--model", str(model_folder), "--samples", "2", "--device", "cpu", "--out", runs, "--json"]


@pytest.mark.few(2)
@pytest.mark.parametrize("name", NAMES)
def test_a_bundled_suite_can_run(name):
    """Its file has its name, and all names and settings in it are known; an offline suite needs no data."""
    suite = find_suite(name)
    assert suite.name == name
    cells = suite.cells({"method": "full"}, Path("runs"))
    for cell in cells:
        check(cell.request)
    assert {x.request.suite for x in cells} == {f"{name}@{suite.version}"}
    assert set(suite.tasks) <= NEEDS.keys()
    if name.endswith("-mini"):
        assert {NEEDS[x] for x in suite.tasks} == {None}


def test_the_offline_suites_exist():
    """One for each kind of task."""
    assert {"ruler-mini", "scbench-mini", "growth-mini", "decode"} <= set(NAMES)


def test_the_sizes_of_published_suites():
    """SCBench: 922 samples in both modes; LongBench: 200 samples in most tasks; RULER: 13 tasks at six lengths."""
    runs = {x: [y.request for y in find_suite(x).cells({"method": "full"}, Path("runs"))] for x in NAMES}
    assert sum(x.samples for x in runs["scbench"]) == 2 * 922
    assert len(runs["scbench"]) == 2 * 12
    assert [len(runs[f"longbench-{n}"]) for n in (16, 15, 9)] == [16, 15, 9]
    assert sum(x.samples for x in runs["longbench-16"]) == 13 * 200 + 150 + 500 + 500
    tasks = {n: {x.task for x in runs[f"longbench-{n}"]} for n in (16, 15, 9)}
    assert tasks[16] - tasks[15] == {"longbench_passage_count"}
    assert tasks[9] < tasks[15] < tasks[16]
    assert len({x.task for x in runs["ruler"]}) == 13
    assert len(runs["ruler"]) == 13 * 6


def test_a_suite_is_its_runs(kvbench, suite, options, tmp_path):
    """One table, a file with the ids of its runs in order, and the label in every run; again, it only reports."""
    answer = kvbench("run", "--suite", suite(), "--method", LAST, *options)
    assert answer.code == 0, answer.err
    assert [(x["mode"], x["existing"]) for x in answer.json["runs"]] == [
        ("multi-turn", False), ("multi-turn", False), ("multi-request", False), ("multi-request", False)
    ]
    assert answer.err.startswith("each of 4 runs: 2 contexts x 3 questions cannot detect any difference")
    ids = [x["run_id"] for x in answer.json["runs"]]
    path = Path(answer.json["file"])
    assert path.parent.parent == tmp_path / "runs" / "suites"
    assert path.parent.name.startswith("toys-last-")
    assert json.loads(path.read_text()) == {"schema_version": 2, "name": "toys", "version": "2", "runs": ids}
    results = [Result.model_validate_json((tmp_path / "runs" / x / "result.json").read_text()) for x in ids]
    assert {(x.suite, x.spec.suite) for x in results} == {("toys@2", "toys@2")}
    (table,) = [x for x in answer.out.split("┏") if x]
    assert [x.split("│")[2:4] for x in table.splitlines() if "│" in x] == [
        [f" {mode}{' ' * (14 - len(mode))}", f" {length}     "]
        for mode, length in itertools.product(("multi-turn", "multi-request"), (60, 70))
    ]
    again = kvbench("run", "--suite", suite(), "--method", LAST, *options)
    assert again.json == {**answer.json, "runs": [{**x, "existing": True} for x in answer.json["runs"]]}
    single = kvbench("run", "--task", TOY, "--mode", "multi-turn", "--method", LAST, *options)
    assert single.json["run_id"] not in ids  # it is a part of no suite, and says so


@pytest.mark.slow
def test_a_suite_loads_its_model_once(kvbench, suite, options, monkeypatch):
    """For any number of runs."""
    loaded, load = [], preparation._load
    monkeypatch.setattr(preparation, "_load", lambda x, *args: loaded.append(x.request.model) or load(x, *args))
    assert kvbench("run", "--suite", suite(), "--method", LAST, *options).code == 0
    assert len(loaded) == 1


@pytest.mark.slow
def test_a_tracker_gets_every_result_of_a_suite(kvbench, suite, options, monkeypatch):
    """As one tracked run each."""
    names = []
    tracker = types.ModuleType("trackio")
    tracker.__spec__ = types.SimpleNamespace()  # what find_spec looks at
    tracker.init = lambda **given: names.append(given["name"])
    tracker.log, tracker.finish = lambda _: None, lambda: None
    monkeypatch.setitem(sys.modules, "trackio", tracker)
    answer = kvbench("run", "--suite", suite(), "--method", LAST, "--trackio", *options)
    assert answer.code == 0
    assert names == [x["run_id"] for x in answer.json["runs"]]


def test_a_suite_tokenizes_each_context_once(kvbench, suite, options, tmp_path, monkeypatch):
    """The first run tokenizes it; the other mode reads its ids."""
    contexts = [f"{letter * 50}" for letter in "ab"]
    turns = [{"question": "q?", "answer": " a"}, {"question": "r?", "answer": " b"}]
    rows = [json.dumps({"id": x, "context": x, "turns": turns}) for x in contexts]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    (tmp_path / "task.toml").write_text(
        'name = "rows"\nversion = "1"\nsummary = "s"\ndata = "rows.jsonl"\nscorer = "exact@1"\nmax_new_tokens = 2\n'
        'length = 100\ntruncation = "middle"\n'
    )
    texts, call = [], PreTrainedTokenizerBase.__call__
    monkeypatch.setattr(
        PreTrainedTokenizerBase, "__call__", lambda self, text, **kw: texts.append(text) or call(self, text, **kw)
    )
    grid = f'[[grid]]\ntask = "{tmp_path / "task.toml"}"\nmode = ["multi-turn", "multi-request"]\n'
    answer = kvbench("run", "--suite", suite(grid), "--method", "full", *options)
    assert answer.code == 0, answer.err
    assert [texts.count(x) for x in contexts] == [1, 1]


@pytest.mark.slow
def test_an_interrupted_suite_resumes(kvbench, suite, options, monkeypatch, tmp_path):
    """Ctrl-C keeps finished samples and writes no suite.json; the same command completes it."""
    run_sample, calls = sample.run_sample, itertools.count()

    def interrupted(*args, **options):
        if next(calls) == 5:
            raise KeyboardInterrupt
        return run_sample(*args, **options)

    monkeypatch.setattr("kvbench.runs.batch.run_sample", interrupted)
    answer = kvbench("run", "--suite", suite(), "--method", LAST, *options)
    assert (answer.code, answer.out) == (130, "")
    assert "interrupted: saved 2/4 cells, 5/8 samples in" in answer.err.splitlines()[-1]
    assert not (tmp_path / "runs" / "suites").exists()
    again = kvbench("run", "--suite", suite(), "--method", LAST, *options)
    assert [x["existing"] for x in again.json["runs"]] == [True, True, False, False]
    assert next(calls) == 9


def test_a_suite_with_a_failed_cell_is_incomplete(kvbench, suite, options, tmp_path):
    """The other cells run, the exit code is 1, and suite.json is not written."""
    path = suite(f'[[grid]]\ntask = "{TOY}"\nlength = [60, 513]\n')
    answer = kvbench("run", "--suite", path, "--method", LAST, *options)
    assert answer.code == 1
    assert [x["status"] for x in answer.json["runs"]] == ["ok", "failed"]
    assert answer.json["file"] is None
    assert "1 of 2 runs have a result, so suite.json was not written" in answer.err
    assert not (tmp_path / "runs" / "suites").exists()


SAYS = f"""
[run]
mode = "single"
task-set.word = "a"
[[grid]]
task = ["niah", "kv"]
length = [1024, 2048]
[[grid]]
task = "{TOY}"
length = 1024
budget = 64
set.flag = [true, false]
"""


def cells(path: Path, **given: object) -> list[tuple]:
    """Task, length, budget and settings of the selected runs."""
    return [
        (x.request.task.rpartition(":")[2], x.request.length, x.request.budget, *x.request.method_settings)
        for x in read_suite(path).cells({"method": "m", **given}, Path("out"))
    ]


def test_an_option_is_added_to_runs_that_do_not_set_it(suite):
    """Tables are merged key by key; the suite's own options and those of the command line go into every run."""
    found = read_suite(suite(SAYS)).cells(
        {"method": "m", "samples": 3, "task-set": {"data": "x"}, "set": {"window": "3"}}, Path("out")
    )
    assert len(found) == 6
    assert {(x.request.method, x.request.samples, x.request.mode, x.request.out) for x in found} == {
        ("m", 3, "single", Path("out"))
    }
    assert {x.request.task_settings for x in found} == {("word=a", "data=x")}
    assert [x.request.method_settings for x in found[3:]] == [
        ("window=3",), ("flag=true", "window=3"), ("flag=false", "window=3"),
    ]


def test_an_option_selects_runs_that_set_it(suite):
    """Values of different types compare as text; a value that no run has is refused with the values that exist."""
    path = suite(SAYS)
    assert cells(path, length=1024) == [
        ("niah", 1024, None), ("kv", 1024, None), ("Toy", 1024, "64", "flag=true"), ("Toy", 1024, "64", "flag=false"),
    ]
    assert cells(path, length=2048) == [("niah", 2048, None), ("kv", 2048, None)]
    assert cells(path, length=1024, budget="64", set={"flag": "true"})[2:] == [("Toy", 1024, "64", "flag=true")]
    assert cells(path, mode="single") == cells(path)
    for given, message in (
        ({"length": 4096}, "no run with length = 4096, only with 1024, 2048"),
        ({"mode": "multi-turn"}, "no run with mode = multi-turn, only with single"),
        ({"task-set": {"word": "b"}}, "no run with task-set.word = b, only with a"),
        ({"length": 2048, "task": "Toy"}, "no run with task = Toy, only with niah, kv"),
    ):
        with pytest.raises(UserError, match=message):
            cells(path, **given)


@pytest.mark.slow
def test_a_part_of_a_suite_writes_no_suite_file(kvbench, suite, options, tmp_path):
    """Its runs count for the suite; suite.json is written once all runs exist."""
    part = kvbench("run", "--suite", suite(), "--method", LAST, "--mode", "multi-turn", *options)
    assert part.code == 0
    assert "this command selects 2 of 4 runs of the suite, so suite.json was not written" in part.err
    assert not (tmp_path / "runs" / "suites").exists()
    whole = kvbench("run", "--suite", suite(), "--method", LAST, *options)
    assert [x["existing"] for x in whole.json["runs"]] == [True, True, False, False]
    assert whole.json["runs"][0]["run_id"] == part.json["runs"][0]["run_id"]


HEAD = 'name = "toys"\nversion = "2"\nsummary = "s"\n'
GRID = '[[grid]]\ntask = "kv"\n'
BAD = [
    ("", GRID, "name is missing"), (HEAD, "", "grid is missing"), (HEAD, "grid = []\n", "grid = [] list should have"),
    (HEAD.replace("toys", "Toys!"), GRID, "name = 'Toys!' string should match pattern"),
    (HEAD, f"{GRID}method = 'full'\n", "a suite must not name a method"),
    (HEAD, f"[run]\nmethod = 'full'\n{GRID}", "a suite must not name a method"),
    (HEAD, f"[rum]\n{GRID}", "unknown key 'rum'. Did you mean 'run'?"),
    (HEAD, "[[grid]]\nseed = 1\n", "task is missing"),
    (HEAD, "[[grid]]\ntaks = 'kv'\n", "unknown option 'taks'. Did you mean 'task'?"),
    (HEAD, "[[grid]]\ntask = 'kw'\n", "unknown task 'kw'. Did you mean 'kv'?"),
    (HEAD, f"{GRID}[[grid.set]]\nwindow = 16\n", "bad.toml: [[grid]] 1: set must be one table; lists stand inside it"),
    (HEAD, f"[[run.set]]\nwindow = 16\n{GRID}", "bad.toml: [run]: set must be one table; lists stand inside it"),
    (HEAD, f"{GRID}length = '3'\n", "length = '3' should be a valid integer"),
    (HEAD, f"{GRID}{GRID}", "are the same run"), (HEAD, f"[run]\nseed = []\n{GRID}", "seed is an empty list"),
    (HEAD.replace("toys", "ruler-mini"), GRID, "'ruler-mini' is the name of a bundled suite. Choose another name."),
    ("name = \n", GRID, "is not TOML: Invalid value (at line 1, column 8)"),
]


@pytest.mark.parametrize(("head", "tables", "message"), BAD, ids=[x[2] for x in BAD])
def test_a_bad_suite_is_refused(kvbench, tmp_path, options, head, tables, message):
    """In one line, and nothing is written."""
    path = tmp_path / "bad.toml"
    path.write_text(head + tables)
    answer = kvbench("run", "--suite", path, "--method", "full", *options)
    assert (answer.code, answer.out) == (2, "")
    (line,) = answer.err.splitlines()
    assert message in line
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("line", "message"), [
    ("--suite ruler-min", "unknown suite 'ruler-min'. Did you mean 'ruler-mini'?"),
    ("--suite none.toml", "suite file 'none.toml' cannot be read: No such file"),
    ("--suite ruler-mini --task niah", "--task and --suite were both given. Give one."),
    ("", "run takes a --task or a --suite"),
    ("--suite ruler-mini --length 9", "suite ruler-mini has no run with length = 9, only with 1024, 2048. To"),
    ("--suite ruler", "cell 'full task=qa_1 length=4096 task-set.data=dev-v2.0.json' ([[grid]] 1): "),
    ("--suite ruler-mini --budget 10%", "full takes no budget"),
])
def test_a_suite_request_that_cannot_run_is_refused(kvbench, line, message):
    """With the messages of a task."""
    answer = kvbench("run", "--method", "full", *line.split())
    assert (answer.code, answer.out) == (2, "")
    assert message in answer.err


def test_suites_are_listed_and_shown(kvbench):
    """With their tasks, the data that these need, and every run."""
    listed = {x["name"]: x for x in kvbench("list", "suites", "--json").json}
    assert sorted(listed) == NAMES == [x.name for x in list_suites()]
    assert listed["ruler-mini"]["tasks"] == ["niah_single_1", "niah_single_2", "niah_multikey_1"]
    assert listed["ruler-mini"]["needs"] == []
    shown = kvbench("show", "ruler-mini", "--json").json
    assert (shown["kind"], len(shown["runs"])) == ("suite", 6)
    assert shown["runs"][0] == {"task": "niah_single_1", "mode": "single", "length": "1024"}


def test_the_mean_is_over_runs_with_one_protocol():
    """And one budget and length; there is none of one run, of failed runs, or of error rates."""
    paths = sorted(CURATED.glob("snapkv-niah_multikey_1-*/result.json"))
    every = [Result.model_validate_json(x.read_text()) for x in paths]
    first = next(x for x in every if (x.mode, x.visibility) == ("multi-turn", "first-turn"))
    another = first.task.model_copy(update={"name": "another", "length": 2 * first.task.length})
    second = first.model_copy(update={"task": another})
    others = [first.model_copy(update={"mode": "multi-request"}), second.model_copy(update={"mode": "multi-request"})]
    results = [first, second, *others]

    def averaged(*results: Result, templates: tuple[str, ...] = ("own", "own", "own", "own")) -> list[SuiteMean]:
        requests = [Request("last", x.task.name, template=y) for x, y in zip(results, templates, strict=False)]
        cells = [SweepCell(i, "", x, {}) for i, x in enumerate(requests)]
        return list(average([CellReport(x, "ok", result=y) for x, y in zip(cells, results, strict=True)]))

    def altered(result: Result, mean: float, **change: object) -> Result:
        return result.model_copy(update={"score": result.score.model_copy(update={"mean": mean}), **change})

    assert averaged(*results) == []
    other_run = second.model_copy(update={"task": second.task.model_copy(update={"length": first.task.length})})
    assert averaged(altered(first, 0.25), altered(other_run, 0.5), *others) == [
        SuiteMean(
            "multi-turn", "first-turn", "reference", False, "own", first.budget.asked, first.task.length, 2, 0.375
        )
    ]
    assert averaged(altered(first, 0.25), altered(other_run, 0.5, status="failed")) == []
    assert averaged(altered(first, 0.25), altered(other_run, None)) == []
    less = other_run.score.model_copy(update={"mean": 0.5, "higher_is_better": False})
    assert averaged(altered(first, 0.25), other_run.model_copy(update={"score": less})) == []
    again = first.spec.model_copy(update={"recompress": True})
    other = first.budget.model_copy(update={"asked": "75%"})
    for change in ({"history": "own"}, {"spec": again}, {"budget": other}):
        assert averaged(altered(first, 0.25), altered(other_run, 0.5, **change)) == []
    assert averaged(altered(first, 0.25), altered(other_run, 0.5), templates=("own", "none")) == []
    cell = SweepCell(9, "", Request("last", first.task.name), {})
    whole = [CellReport(cell, "ok", result=x) for x in (altered(first, 0.25), altered(other_run, 0.5))]
    assert len(list(average(whole))) == 1
    assert list(average([*whole, CellReport(cell, "failed", "the worker died")])) == []


def test_a_suite_file_is_named_after_its_runs(suite, tmp_path):
    """The same runs give the same file, others another; a hostile method name stays within one folder."""
    found = read_suite(suite())
    paths = [save_suite(found, "../x y", runs, tmp_path) for runs in (["a", "b"], ["a", "b"], ["b", "a"])]
    assert paths[0] == paths[1] != paths[2]
    assert {x.parent.parent for x in paths} == {tmp_path / "suites"}
    assert paths[0].parent.name.startswith("toys-x-y-")


def test_the_suite_in_the_docs_is_valid(tmp_path):
    """The example in docs/suites.md."""
    text = (Path(__file__).parents[2] / "docs" / "suites.md").read_text(encoding="utf-8")
    (tables,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "mine.toml").write_text(tables)
    suite = find_suite(str(tmp_path / "mine.toml"))
    assert (suite.label, len(suite.cells({"method": "full"}, tmp_path))) == ("mine@1", 4)
