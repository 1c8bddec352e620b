"""Sweeps: the same run ids, scores and files with every executor, and after interruptions and crashes."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from kvbench import log
from kvbench.errors import InterruptionError, UserError
from kvbench.kernels import choice
from kvbench.log import say_once
from kvbench.runs import prepare as preparation
from kvbench.runs import sample
from kvbench.runs.files import locked, read_lines
from kvbench.runs.options import Request
from kvbench.sweep import predict as prediction
from kvbench.sweep.cell import CellReport, ModelCache, SweepCell, run_group
from kvbench.sweep.check import check_cells
from kvbench.sweep.file import NAMES, SweepFile, as_text, expand, read_sweep
from kvbench.sweep.local import WorkerPool
from kvbench.sweep.progress import SweepProgress

ROOT = Path(__file__).parent.parent.parent
TOYS = Path(__file__).parents[1] / "toys" / "toy.py"
INERT, LAST, TOY = f"{TOYS}:Inert", f"{TOYS}:Last", f"{TOYS}:Toy"
LAST_GRID = f'[[grid]]\nmethod = "{LAST}"\n'

KILLER = """
import os, signal
from dataclasses import dataclass
from typing import ClassVar
from kvbench.method import BudgetKind, Card, Method
import torch

@dataclass(frozen=True)
class Killer(Method):
    calls: ClassVar[list[int]] = []
    card: ClassVar[Card] = Card(name="killer", title="t", idea="i. i.", arxiv=None, year=None, family="test",
                                stages=(), budget=BudgetKind.STORED, heads="independent", upstream=None)

    def evict(self, kv, step):
        if step.moment.compresses:
            self.calls.append(step.layer)
            if len(self.calls) == 5 and os.path.exists(os.environ["TOY_KILL"]):  # two layers: in the third sample
                os.unlink(os.environ["TOY_KILL"])
                os.kill(os.getpid(), signal.SIGKILL)
            index = torch.arange(kv.n - self.rows, kv.n)
            kv.keep(index.expand(*kv.keys.shape[:2], -1))
"""
BORN_DEAD = """
import multiprocessing, os
if multiprocessing.parent_process() is not None:
    os._exit(3)
""" + KILLER


@pytest.fixture
def sweep(model_folder, tmp_path):
    """Writes a sweep file with the given grids."""

    def write(grids: str, run: str = "", out: str = "runs") -> Path:
        path = tmp_path / f"{out}.toml"
        path.write_text(
            f'out = "{tmp_path / out}"\n[run]\ntask = "{TOY}"\nmodel = "{model_folder}"\nsamples = 4\n'
            f'device = "cpu"\n{run}\n{grids}'
        )
        return path

    return write


def outcome(folder: str | Path) -> list[tuple[object, ...]]:
    """The parts of a result that do not depend on the executor."""
    lines = read_lines(Path(folder) / "samples.jsonl")
    return sorted((x.index, x.turn, x.prompt_hash, x.ids, x.prediction, x.score, x.error) for x in lines)


def assert_same(left: list[dict], right: list[dict]) -> None:
    """Equal runs in equal order."""
    assert [x["run_id"] for x in left] == [x["run_id"] for x in right]
    for a, b in zip(left, right, strict=True):
        assert (a["status"], a["score"], a["stored_share"]) == (b["status"], b["score"], b["stored_share"])
        assert outcome(a["folder"]) == outcome(b["folder"])


VALUES = {
    "method": st.sampled_from(["snapkv", "h2o", "tova", "knorm"]), "budget": st.sampled_from(["10%", "25%", 64, 128]),
    "seed": st.integers(0, 9), "samples": st.integers(1, 9), "mode": st.sampled_from(["single", "multi-turn"]),
    "recompress": st.booleans(), "length": st.integers(1, 4096), "split": st.sampled_from(["dev", "test"]),
}
GRIDS = st.fixed_dictionaries({"method": st.lists(VALUES["method"], min_size=1, unique=True)}, optional={
    key: x | st.lists(x, min_size=1, max_size=3, unique=True) for key, x in VALUES.items() if key != "method"
} | {"set": st.dictionaries(st.sampled_from(["window", "kernel"]), st.integers(1, 9) | st.lists(
    st.integers(1, 9), min_size=1, max_size=3, unique=True
), min_size=1)})


RUNS = st.fixed_dictionaries({"task": st.just("niah") | st.just(["niah", "kv"])}, optional={
    key: VALUES[key] | st.lists(VALUES[key], min_size=1, max_size=2, unique=True) for key in ("seed", "budget")
} | {"set": st.fixed_dictionaries({"window": st.integers(1, 9)})})


@given(st.lists(GRIDS, min_size=1, max_size=3), RUNS)
@settings(max_examples=60, deadline=None)
def test_cells_are_the_cross_product_of_lists(grids, run):
    """Of [run] without the options that the grid has, then of the grid; the last list changes fastest."""
    cells = expand(SweepFile(run=run, grid=grids))
    assert [x.index for x in cells] == list(range(len(cells)))
    for number, grid in enumerate(grids, 1):
        own = _flat(grid)
        lists = {key: _listed(x) for key, x in _flat(run).items() if key not in own}
        lists |= {key: _listed(x) for key, x in own.items()}
        wanted = [dict(zip(lists, x, strict=True)) for x in itertools.product(*lists.values())]
        mine = [x.request for x in cells if x.place == f"[[grid]] {number}"]
        assert [{key: _read(x, key) for key in lists} for x in mine] == [
            {key: as_text(x) for key, x in cell.items()} for cell in wanted
        ]


def _flat(table: dict) -> dict[str, object]:
    """Its options in order, those of `set` by their own names."""
    parts = ({f"set.{name}": y for name, y in x.items()} if key == "set" else {key: x} for key, x in table.items())
    return {key: x for part in parts for key, x in part.items()}


def _read(request: Request, key: str) -> str:
    """An option of a request as its text."""
    if key.startswith("set."):
        return dict(x.split("=") for x in request.method_settings)[key.removeprefix("set.")]
    return as_text(getattr(request, key))


def _listed(value: object) -> list:
    return value if isinstance(value, list) else [value]


def test_lists_of_a_run_are_combined_with_each_grid():
    """Those of its tables, too; a grid's value replaces the whole list."""
    run = {"task": ["niah", "kv"], "seed": [1, 2], "set": {"window": [8, 16]}}
    cells = expand(SweepFile(run=run, grid=[{"method": "snapkv"}, {"method": "h2o", "seed": 3}]))
    assert [x.name for x in cells] == [
        f"{method} task={task} seed={seed} set.window={window}" for method, seeds in (("snapkv", (1, 2)), ("h2o", (3,)))
        for task in ("niah", "kv") for seed in seeds for window in (8, 16)
    ]


def test_each_of_several_runs_takes_every_grid():
    """In the order of the file, with the run's place in the names of places."""
    runs = [{"task": "niah", "seed": 1, "set": {"window": 8}}, {"task": "niah", "visibility": "visible"}]
    grids = [{"method": ["snapkv", "h2o"]}, {"method": "tova", "seed": 2, "set": {"kernel": 3}}]
    cells = expand(SweepFile(run=runs, grid=grids))
    alone = [x for run in runs for x in expand(SweepFile(run=run, grid=grids))]
    assert [x.request for x in cells] == [x.request for x in alone]
    assert [x.place for x in cells] == [f"[[run]] {i}, [[grid]] {j}" for i in (1, 2) for j in (1, 1, 2)]
    assert [x.name for x in cells] == [
        "snapkv seed=1 set.window=8", "h2o seed=1 set.window=8", "tova seed=2 set.window=8 set.kernel=3",
        "snapkv visibility=visible", "h2o visibility=visible", "tova visibility=visible seed=2 set.kernel=3",
    ]


@pytest.mark.parametrize(("second", "grid", "message"), [
    ({"seed": []}, {"method": "full"}, r"^\[\[run\]\] 2: seed is an empty list"),
    ({"sed": 1}, {"method": "full"}, r"unknown option 'sed'.*In \[\[run\]\] 2"),
    ({"seed": "1"}, {"method": "full"}, r"^\[\[grid\]\] 1 \(with \[\[run\]\] 2\): seed = '1' should"),
])
def test_an_error_names_the_run_of_several(second, grid, message):
    """By its number in the file."""
    with pytest.raises(UserError, match=message):
        expand(SweepFile(run=[{"task": "niah"}, {"task": "niah", **second}], grid=[grid]))


def test_an_empty_list_of_runs_is_refused():
    """It would make no cells."""
    with pytest.raises(ValidationError, match=r"run\n.*at least 1 item"):
        SweepFile(run=[], grid=[{"method": "full"}])


def test_the_folder_of_a_sweep_may_be_in_the_home(monkeypatch, tmp_path):
    """No shell reads the file, so kvbench replaces `~`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (cell,) = expand(SweepFile(out="~/runs", grid=[{"method": "full", "task": "niah"}]))
    assert cell.request.out == tmp_path / "runs"


def test_every_option_of_run_can_be_in_a_sweep():
    """Except out, the options for suites, and those that print or log one run."""
    import typer

    from kvbench.cli import app

    command = typer.main.get_command(app).commands["run"]
    options = {x.opts[0].removeprefix("--") for x in command.params} - {"help"}
    assert options - set(NAMES) == {"out", "suite", "json", "wandb", "trackio"}
    assert set(NAMES) <= options


BAD = [
    ("", "", "has no [[grid]]"),
    ("[[grid]]\n", "", "[[grid]] 1 is empty"),
    ("[[grid]]\nmethod = []\n", "", "[[grid]] 1: method is an empty list"),
    (f"{LAST_GRID}[grid.set]\nkind = []\n", "", "[[grid]] 1: set.kind is an empty list"),
    (f'{LAST_GRID}bugdet = "10%"\n', "", "unknown option 'bugdet'. Did you mean 'budget'?"),
    (LAST_GRID, "sed = 1\n", "unknown option 'sed'. Did you mean 'seed'?"),
    (LAST_GRID, "seed = []\n", "[run]: seed is an empty list"),
    (LAST_GRID, "seed = [1, 1]\n", "[run]: seed has 1 twice"),
    (LAST_GRID, "[rum]\n", "unknown key 'rum'. Did you mean 'run'?"),
    ("[[grid]]\nseed = 1\n", "", "method is missing"),
    (f'{LAST_GRID}samples = "4"\n', "", "samples = '4' should be a valid integer"),
    (f"{LAST_GRID}seed = [[1]]\n", "", "seed = [1] should be a valid integer"),
    (f"{LAST_GRID}set = 3\n", "", "[[grid]] 1: set must be one table"),
    (f"{LAST_GRID}set = 3\n", "[run.set]\nkind = 'bug'\n", "[[grid]] 1: set must be one table"),
    (f"{LAST_GRID}[[grid.set]]\nkind = 'x'\n", "[run.set]\nkind = 'bug'\n", "[[grid]] 1: set must be one table"),
    (LAST_GRID, "set = [{ kind = 'bug' }, { kind = 'memory' }]\n", "such as set.NAME = [16, 64]"),
    (f"{LAST_GRID}budget = true\n", "", (
        "[[grid]] 1 (with [run]): budget = True should be a valid string or a valid integer or a valid number."
    )),
    (f"{LAST_GRID}set.kind = [[1]]\n", "", "set.kind = [1] should be a valid string or a valid integer or"),
    (f"{LAST_GRID}recompress = 1\n", "", "recompress = 1 should be a valid boolean"),
    ("[[grid]\n", "", "is not TOML"),
    ("[grid]\nmethod = 1\n", "", "grid = {'method': 1} should be a valid list"),
    ('[[grid]]\nmethod = ["snapkv", "h2p"]\n', "", "cell 'h2p' ([[grid]] 1): unknown method 'h2p'. Did you mean 'h2o'"),
    (f'{LAST_GRID}task = "niahh"\n', "", "unknown task 'niahh'. Did you mean"),
    (f'{LAST_GRID}model = "minni"\n', "", "unknown model 'minni'"),
    (f"{LAST_GRID}set.fails_it = 1\n", "", "unknown setting of"),
    (f'{LAST_GRID}set.kind = ["bug", "x"]\n', "", "cell '{LAST} set.kind=x' ([[grid]] 1): "),
    (f'{LAST_GRID}mode = "multi"\n', "", "unknown mode 'multi'"),
    (f'{LAST_GRID}budget = ["10%", "0%"]\n', "", "budget '0%' must be above 0"),
    (f"{LAST_GRID}budget = 0.5\n", "", "budget '0.5' is not a whole number of tokens"),
    ('[[grid]]\nmethod = ["snapkv", "full"]\nbudget = "10%"\n', "", "cell 'full' ([[grid]] 1): full takes no budget"),
    (f'{LAST_GRID}budget = "paper"\n', "", "has no paper budget"),
    (f"{LAST_GRID}turns = 2\n", "", "turns 2 has no meaning in mode single"),
    (f"{LAST_GRID}samples = 0\n", "", "samples 0 must be 1 or more"),
    (f"{LAST_GRID}gen.max_new_tokens = 0\n", "", "--gen max_new_tokens=0 must be"),
    (f'{LAST_GRID}kernels = "cuda"\n', "", "unknown kernels 'cuda'"),
    (f'{LAST_GRID}device = "tpu"\n', "", "unknown device 'tpu'"),
    (f'{LAST_GRID}device = "cuda:99"\n', "", "device 'cuda:99'"),
    (f'{LAST_GRID}dtype = "int3"\n', "", "unknown dtype 'int3'"),
    (f"{LAST_GRID}seed = [1, 1]\n", "", "[[grid]] 1: seed has 1 twice"),
    (f'{LAST_GRID}{LAST_GRID}budget = "25%"\n', "", "budget=25%' ([[grid]] 2) are the same run"),
    (f"{LAST_GRID}{LAST_GRID}batch = 1\n", "", "batch=1' ([[grid]] 2) are the same run"),
    (f'{LAST_GRID}{LAST_GRID}dtype = "auto"\n', "", "dtype=auto' ([[grid]] 2) are the same run"),

]


@pytest.mark.few(10)
@pytest.mark.parametrize(("grids", "run", "message"), BAD, ids=[x[2] for x in BAD])
def test_a_bad_file_is_refused(kvbench, sweep, tmp_path, grids, run, message):
    """Exit code 2, one message, and nothing is written."""
    answer = kvbench("sweep", sweep(grids, run), "--json")
    assert answer.code == 2, answer.out
    (line,) = answer.err.splitlines()
    assert message.replace("{LAST}", LAST) in line
    assert answer.out == ""
    assert sorted(x.name for x in tmp_path.iterdir()) == ["runs.toml"]


OTHER = [
    'budget = "50%"', 'mode = "multi-turn"', 'visibility = "hidden"', 'template = "none"', 'split = "dev"',
    "length = 512", "samples = 3", "parts = 64", "seed = 1", "set.window = 16", "gen.max_new_tokens = 3", "chunk = 64",
    "batch = 2", 'device = "cuda"', 'dtype = "float32"', 'model = "random:mini"', 'task = "niah_single_1"',
    'scorer = "ruler-string-match-all-strict@1"', 'method = "tova"',
]


@pytest.mark.parametrize("option", OTHER)
def test_cells_that_differ_in_what_a_run_is_are_two_runs(tmp_path, option):
    """In one option that is a part of a run's identity; without it they are the same run."""
    path = tmp_path / "sweep.toml"
    path.write_text('[[grid]]\nmethod = "snapkv"\ntask = "niah"\n' * 2)
    with pytest.raises(UserError, match="are the same run"):
        check_cells(read_sweep(path))
    key, _, value = option.partition(" = ")
    lines = {"method": '"snapkv"', "task": '"niah"', key: value}
    path.write_text('[[grid]]\nmethod = "snapkv"\ntask = "niah"\n[[grid]]\n' + "".join(
        f"{name} = {x}\n" for name, x in lines.items()
    ))
    assert len(check_cells(read_sweep(path))) == 2


@pytest.mark.slow
def test_a_default_device_makes_no_second_cell(kvbench, sweep, tmp_path, monkeypatch):
    """Without CUDA, a cell with device cpu and one without a device are the same run."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    path = sweep(f'{LAST_GRID}{LAST_GRID}device = "cpu"\n')
    path.write_text(path.read_text().replace('device = "cpu"\n', "", 1))
    for options in ((), ("--dry-run",)):
        answer = kvbench("sweep", path, *options)
        assert answer.code == 2
        assert "device=cpu' ([[grid]] 2) are the same run" in answer.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("options", "message"), [
    ("--executor dask", "unknown executor 'dask'"),
    ("--workers 0", "workers 0 must be 1 or more"),
    ("--address 10.0.0.1:6379", "Use --executor ray"),
])
def test_bad_options_are_refused(kvbench, sweep, tmp_path, options, message):
    """Exit code 2, one message, and nothing is written."""
    answer = kvbench("sweep", sweep(LAST_GRID), *options.split())
    assert answer.code == 2
    assert message in answer.err
    assert not (tmp_path / "runs").exists()
    assert "cannot be read" in kvbench("sweep", tmp_path / "none.toml").err


@pytest.mark.slow
def test_the_sweep_of_the_curated_results_is_valid(monkeypatch):
    """All names and settings in it are known."""
    monkeypatch.setattr("kvbench.sweep.check.check_model", lambda name: None)
    cells = read_sweep(ROOT / "scripts" / "sweeps" / "curated.toml")
    check_cells(cells)
    assert len(cells) == 4 * (2 + 11 * 3 + 6 * 3 + 2 + 2 + 2 + 2 * 2)


@pytest.mark.slow
def test_a_cell_is_a_run(kvbench, sweep, arguments, tmp_path):
    """Same id, same folder: `kvbench run` and the sweep read each other's results; failed runs stay failed."""
    path = sweep(
        f'[[grid]]\nmethod = ["{LAST}", "{INERT}"]\nbudget = ["10%", "25%"]\n[[grid]]\nmethod = "full"\n'
        f"length = [60, 513]\nmode = 'multi-turn'\n"
    )
    run = kvbench(*arguments, "--method", LAST, "--budget", "25%").json
    answer = kvbench("sweep", path, "--json")
    assert answer.code == 1
    cells = {x["cell"].replace(str(TOYS), ""): x for x in answer.json}
    assert [x["status"] for x in answer.json] == ["ok", "ok", "failed", "failed", "ok", "failed"]
    second = answer.json[1]
    assert (second["run_id"], second["existing"]) == (run["run_id"], True)
    assert second["score"] == run["score"]
    assert "acted in 0 of 4 samples" in answer.json[2]["error"]
    assert "length 513 is more than" in answer.json[5]["error"]
    assert answer.json[5]["run_id"] is None
    assert "5/6 cells, 20/24 samples" in answer.err
    assert len(list((tmp_path / "runs").iterdir())) == 5, cells
    other = kvbench(*arguments, "--method", "full", "--mode", "multi-turn")
    assert "already finished" in other.err
    assert other.json["run_id"] == answer.json[4]["run_id"]

    before = {x: x.read_bytes() for x in (tmp_path / "runs").rglob("*.json*")}
    again = kvbench("sweep", path, "--json")
    assert again.code == 1
    assert [x["existing"] for x in again.json] == [True] * 5 + [False]
    assert_same(again.json[:5], answer.json[:5])
    assert {x: x.read_bytes() for x in (tmp_path / "runs").rglob("*.json*")} == before


def test_a_finished_run_of_other_code_is_named(kvbench, sweep):
    """A sweep that shows its result says which parts of the code differ."""
    path = sweep(LAST_GRID)
    assert "other code" not in kvbench("sweep", path).err
    assert "other code" not in kvbench("sweep", path).err
    result = next(path.parent.glob("runs/*/result.json"))
    document = json.loads(result.read_text())
    document["spec"]["sources"]["harness"] = "0" * 64
    result.write_text(json.dumps(document))
    assert "It was computed by other code (source of the harness). Delete the folder" in kvbench("sweep", path).err


@pytest.mark.slow
def test_cells_of_one_model_share_its_loading(kvbench, sweep, model_folder, monkeypatch):
    """Six cells of two models load two, in any order of the file."""
    loaded, load = [], preparation._load
    monkeypatch.setattr(preparation, "_load", lambda x, *args: loaded.append(x.request.model) or load(x, *args))
    grid = f'{LAST_GRID}seed = [0, 1, 2]\nmodel = ["{model_folder}", "random:{model_folder}"]\n'
    answer = kvbench("sweep", sweep(grid), "--json")
    assert answer.code == 0, answer.err
    assert loaded == [str(model_folder), f"random:{model_folder}"]
    assert [x["model"] for x in answer.json] == loaded * 3


def test_a_cell_names_the_defaults_that_it_ran_with(kvbench, sweep):
    """Budget and mode of a file that states neither."""
    answer = kvbench("sweep", sweep(f'[[grid]]\nmethod = "{LAST}"\n'), "--json")
    assert [(x["status"], x["budget"], x["mode"]) for x in answer.json] == [("ok", "25%", "single")], answer.err


def test_an_exception_fails_only_its_cell(kvbench, sweep, monkeypatch):
    """Even if it is raised outside of a sample."""
    prepare = preparation.prepare

    def broken(asked, model):
        if asked.seed == 1:
            raise ZeroDivisionError("division\nby zero")
        return prepare(asked, model)

    monkeypatch.setattr("kvbench.sweep.cell.prepare", broken)
    answer = kvbench("sweep", sweep(f"{LAST_GRID}seed = [1, 2]\n"), "--json")
    assert answer.code == 1
    assert [x["error"] for x in answer.json] == ["ZeroDivisionError: division", None]
    assert "Traceback" in answer.err


def test_an_interrupted_sweep_resumes(kvbench, sweep, monkeypatch):
    """Ctrl-C in the second cell keeps saved samples, and the same command ends as an uninterrupted sweep."""
    path, run_sample = sweep(f"{LAST_GRID}seed = [1, 2]\n"), sample.run_sample
    calls = itertools.count()

    def interrupted(*args, **options):
        if next(calls) == 6:
            raise KeyboardInterrupt
        return run_sample(*args, **options)

    monkeypatch.setattr("kvbench.runs.batch.run_sample", interrupted)
    answer = kvbench("sweep", path, "--json")
    assert (answer.code, answer.out) == (130, "")
    assert "interrupted: saved 1/2 cells, 6/8 samples in" in answer.err.splitlines()[-1]
    assert "Run the same command to continue." in answer.err
    again = kvbench("sweep", path, "--json")
    assert again.code == 0
    assert [x["existing"] for x in again.json] == [True, False]
    assert "resuming: 2 of 4" in again.err
    assert next(calls) == 9
    assert_same(kvbench("sweep", sweep(f"{LAST_GRID}seed = [1, 2]\n", out="whole"), "--json").json, again.json)


def test_a_dry_run_predicts_and_writes_nothing(kvbench, sweep, tmp_path):
    """The time of missing samples by kind of cell; a cell that cannot run gives its reason."""
    path = sweep(f'{LAST_GRID}budget = ["10%", "25%"]\nlength = [60, 513]\n')
    answer = kvbench("sweep", path, "--dry-run", "--json")
    assert answer.code == 1
    assert "4 cells, 2 of them failing, 8 samples to run; predicted" in answer.out
    assert "each method with its own prefill" not in answer.out
    assert not (tmp_path / "runs").exists()
    assert [x["error"] is None for x in answer.json] == [True, False, True, False]
    assert answer.json[0]["predicted_s"] == answer.json[2]["predicted_s"] > 0
    done = kvbench("sweep", sweep(f'{LAST_GRID}budget = "10%"\n'), "--json").json
    sample_lines = Path(done[0]["folder"]) / "samples.jsonl"
    again = kvbench("sweep", sweep(f'{LAST_GRID}budget = ["10%", "25%"]\n'), "--dry-run", "--workers", "2", "--json")
    assert again.json[0]["run_id"] == done[0]["run_id"]
    assert [x["missing"] for x in again.json] == [0, 4]
    assert "with 2 workers" in again.out
    (sample_lines.parent / "result.json").unlink()
    sample_lines.write_text("".join(sample_lines.read_text().splitlines(keepends=True)[:1]))
    last = kvbench("sweep", sweep(f'{LAST_GRID}budget = ["10%", "25%"]\n'), "--dry-run", "--share-prefill", "--json")
    assert [x["missing"] for x in last.json] == [3, 4]
    assert 4 * last.json[0]["predicted_s"] == pytest.approx(3 * last.json[1]["predicted_s"])
    assert "each method with its own prefill" in last.out


def test_a_dry_run_says_how_many_cells_it_has_predicted(kvbench, sweep, monkeypatch):
    """Preparing a thousand cells takes minutes: there are lines until the table, here after each cell."""
    monkeypatch.setattr(log, "EVERY", 0.0)
    answer = kvbench("sweep", sweep(f'{LAST_GRID}budget = ["10%", "20%", "30%"]\n'), "--dry-run")
    said = [x for x in answer.err.splitlines() if x.startswith("predicted")]
    assert said == ["predicted 1 of 3 cells", "predicted 2 of 3 cells"]


def test_a_dry_run_times_the_kernels_of_its_cells(sweep, monkeypatch):
    """Not those of the process."""
    ran = []
    monkeypatch.setattr(prediction, "run_sample", lambda *_: ran.append(choice._choice.get()[0]))
    (cell,) = read_sweep(sweep(LAST_GRID))
    monkeypatch.setattr(prediction, "prepare", lambda *_: with_kernels(preparation.prepare(cell.request), "triton"))
    assert [x.error for x in prediction.predict([cell])] == [None]
    assert ran == ["triton", "triton"]


def with_kernels(job, name):
    """The job with another implementation, which this machine need not have."""
    return replace(job, spec=job.spec.model_copy(update={"kernels": name}))


def test_a_dry_run_reports_a_full_cache_that_fails(kvbench, sweep, monkeypatch):
    """As the reason of the cell, without a traceback."""
    monkeypatch.setattr(sample.Session, "prefill", lambda *_, **__: 1 / 0)
    answer = kvbench("sweep", sweep(LAST_GRID), "--dry-run", "--json")
    assert answer.code == 1
    (cell,) = answer.json
    assert cell["error"] == "a sample with the full cache failed: ZeroDivisionError: division by zero"
    assert (cell["missing"], cell["predicted_s"]) == (4, None)
    assert "1 cell, 1 of them failing, 0 samples to run; predicted time 0 s" in answer.out


def test_cells_give_a_common_warning_once(kvbench, tmp_path):
    """Both budgets pool over fewer tokens than a number has under the tokenizer of `mini`."""
    path = tmp_path / "sweep.toml"
    path.write_text(
        f'out = "{tmp_path / "runs"}"\n[run]\nmodel = "mini"\ntask = "niah"\nlength = 512\nsamples = 1\n'
        '[[grid]]\nmethod = "snapkv"\nbudget = ["25%", "50%"]\nset.kernel = 3\n'
    )
    say_once.cache_clear()
    said = kvbench("sweep", path, "--dry-run").err.splitlines()
    assert [x.split(",")[0] for x in said if x.startswith("warning:")] == ["warning: snapkv pools scores over 3 tokens"]


@pytest.mark.slow
def test_a_locked_folder_is_waited_for(kvbench, sweep, monkeypatch):
    """A lost worker may still be writing to it; if the lock stays, the cell fails."""
    path = sweep(LAST_GRID)
    folder = Path(kvbench("sweep", path, "--json").json[0]["folder"])
    (folder / "result.json").unlink()
    lock = locked(folder)
    lock.__enter__()
    monkeypatch.setattr("kvbench.sweep.cell.PATIENCE", 0.3)
    (report,) = kvbench("sweep", path, "--json").json
    assert (report["status"], report["folder"]) == ("failed", str(folder))
    assert "another process is working on" in report["error"]
    monkeypatch.setattr("kvbench.sweep.cell.PATIENCE", 20)
    threading.Timer(0.5, lock.__exit__, (None, None, None)).start()
    assert kvbench("sweep", path, "--json").json[0]["status"] == "ok"


def test_workers_share_cores_and_gpus(monkeypatch):
    """Cores in equal parts, unless OMP_NUM_THREADS is set; GPUs in turn."""
    monkeypatch.setattr("kvbench.sweep.local.os.sched_getaffinity", lambda _: range(8))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cells = expand(SweepFile(run={"task": "niah"}, grid=[{"method": "full", "device": "cuda", "seed": [1, 2, 3]}]))
    pool = WorkerPool([[x] for x in cells], 3, SweepProgress(cells, lambda _: None))
    assert [pool._settings(i) for i in range(3)] == [
        {"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": x} for x in ("4", "6", "4")
    ]
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert "OMP_NUM_THREADS" not in pool._settings(0)


def write_killers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A method that kills its process once, in the third sample, and one whose import ends every worker."""
    (tmp_path / "kill").touch()
    monkeypatch.setenv("TOY_KILL", str(tmp_path / "kill"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    killer, dead = tmp_path / "killer.py", tmp_path / "dead.py"
    killer.write_text(KILLER)
    dead.write_text(BORN_DEAD)
    return killer, dead


@pytest.mark.slow
def test_a_dead_worker_fails_only_its_cell(kvbench, sweep, tmp_path, monkeypatch):
    """One dies in the middle of a cell and one at its start; the other results equal those of one process."""
    killer, dead = write_killers(tmp_path, monkeypatch)
    grids = f'[[grid]]\nmethod = ["{dead}", "{killer}", "{LAST}", "{INERT}"]\n[[grid]]\nmethod = "full"\nseed = 5\n'
    answer = kvbench("sweep", sweep(grids), "--workers", "2", "--json")
    assert answer.code == 1, answer.err
    assert [x["status"] for x in answer.json] == ["failed", "ok", "ok", "failed", "ok"]
    assert "the worker died (exit code 3) 2 times" in answer.json[0]["error"]
    assert "the worker died (SIGKILL, often out of memory); retrying." in answer.err
    assert "resuming: 2 of 4 samples" in answer.err
    assert not (tmp_path / "kill").exists()
    whole = kvbench("sweep", sweep(grids, out="whole"), "--json")
    assert_same(answer.json[1:], whole.json[1:])


LOST = """
from kvbench.errors import DeviceLostError
""" + KILLER.replace("    def evict", """    def bind(self, model):
        raise DeviceLostError("this process cannot use the GPU any more.")

    def evict""")


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_lost_gpu_ends_the_process_of_its_cell(kvbench, sweep, tmp_path, workers):
    """A worker is replaced; without workers the sweep ends, and no cell of it is recorded as failed."""
    lost = tmp_path / "lost.py"
    lost.write_text(LOST)
    path = sweep(f'[[grid]]\nmethod = ["{lost}", "{LAST}"]\n')
    answer = kvbench("sweep", path, "--workers", workers, "--json")
    assert "this process cannot use the GPU any more." in answer.err
    if workers == 1:
        assert answer.code == 3
        assert not list((tmp_path / "runs").glob("*/result.json"))
    else:
        assert [x["status"] for x in answer.json] == ["failed", "ok"]
        assert "the worker died (exit code 3) 2 times" in answer.json[0]["error"]


def start(path: Path, *options: str, sleep: str = "0.5") -> subprocess.Popen[str]:
    """Start the real command, slowed down so that it can be interrupted between two samples."""
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    return subprocess.Popen(
        [sys.executable, "-c", f"{heard}; from kvbench.cli import main; main()", "sweep", str(path), "--json",
         *options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "TOY_SLEEP": sleep, "OMP_NUM_THREADS": "1"},
    )


def list_workers(group: int) -> list[int]:
    """The running worker processes of a sweep, by the group of processes that `start` makes."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended by now
            state, _, own = (place / "stat").read_text().rpartition(")")[2].split()[:3]
            if own == str(group) and state != "Z" and b"spawn_main" in (place / "cmdline").read_bytes():
                found.append(int(place.name))
    return found


def wait_for_samples(process: subprocess.Popen[str], folder: Path, cells: int) -> None:
    """Wait until this many cells have a saved sample."""
    deadline = time.monotonic() + 300
    while sum(x.stat().st_size > 0 for x in folder.glob("*/samples.jsonl")) < cells:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1]
        time.sleep(0.02)


@pytest.mark.slow
def test_a_terminated_sweep_leaves_no_worker(sweep, tmp_path):
    """SIGTERM to its main process alone: the workers end before their samples do, so that another can continue."""
    process = start(sweep(f"{LAST_GRID}seed = [1, 2]\n"), "--workers", "2", sleep="5")
    wait_for_samples(process, tmp_path / "runs", 2)
    assert len(list_workers(process.pid)) == 2
    os.kill(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + 3  # one of them has just begun a sample that takes five seconds
    while list_workers(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    _, err = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGTERM
    assert "kvbench: terminated." in err


@pytest.mark.slow
def test_interrupted_workers_leave_complete_samples(kvbench, sweep, tmp_path):
    """Ctrl-C to all processes, as a terminal sends it: one message, no process remains, and the sweep can resume."""
    path = sweep(f"{LAST_GRID}seed = [1, 2, 3]\n")
    process = start(path, "--workers", "2")
    wait_for_samples(process, tmp_path / "runs", 2)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert out == ""
    assert "interrupted: " in err.splitlines()[-1]
    assert "Traceback" not in err
    deadline = time.monotonic() + 60
    while any(x.read_text().split()[4] == str(process.pid) for x in Path("/proc").glob("[0-9]*/stat")):
        assert time.monotonic() < deadline  # Python's own tracker of resources leaves a moment later
        time.sleep(0.1)
    again = kvbench("sweep", path, "--json")
    assert again.code == 0
    assert_same(again.json, kvbench("sweep", sweep(f"{LAST_GRID}seed = [1, 2, 3]\n", out="whole"), "--json").json)


def test_ctrl_c_while_a_model_is_converted_ends_the_sweep(monkeypatch):
    """It is no failure of the cell, after which the others would go on."""
    def stop(*_):
        raise InterruptionError("interrupted: no model was added.")

    monkeypatch.setattr("kvbench.sweep.cell.prepare", stop)
    cell = SweepCell(0, "full", Request(method="full", task="niah"), {})
    with pytest.raises(InterruptionError):
        list(run_group([cell], ModelCache(), lambda *_: None))


def test_an_unavailable_ray_is_refused(kvbench, sweep, tmp_path, monkeypatch):
    """Not installed, not an address, or no reply: one line within seconds, and nothing is written."""
    path = sweep(LAST_GRID)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "ray", None)
        answer = kvbench("sweep", path, "--executor", "ray")
    assert (answer.code, answer.out) == (2, "")
    assert "Install it: pip install 'kvbench[ray]'" in answer.err
    monkeypatch.setattr("kvbench.sweep.ray.load_ray", lambda: None)
    for address in ("head", "head:", "ray://head:10001"):
        assert "is not HOST:PORT" in kvbench("sweep", path, "--executor", "ray", "--address", address).err
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # taken and not listened on: nobody else is there either
        answer = kvbench("sweep", path, "--executor", "ray", "--address", f"127.0.0.1:{free.getsockname()[1]}")
    assert answer.code == 2
    assert "cannot be reached: [Errno 111] Connection refused" in answer.err
    assert len(answer.err.splitlines()) == 1
    with socket.create_server(("127.0.0.1", 0)) as other:
        def refuse():
            with other.accept()[0] as line:
                line.sendall(b"-ERR unknown command 'PRI'\r\n")

        threading.Thread(target=refuse).start()
        answer = kvbench("sweep", path, "--executor", "ray", "--address", f"127.0.0.1:{other.getsockname()[1]}")
    assert "is not Ray" in answer.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_lost_ray_node_costs_only_unfinished_samples(kvbench, sweep, tmp_path, monkeypatch):
    """Two nodes, one killed in the middle of a cell: the results equal those of the local executor."""
    pytest.importorskip("ray", reason="ray is not installed: pip install 'kvbench[ray]'")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("TOY_SLEEP", "0.5")  # nodes inherit it
    grids = f'{LAST_GRID}seed = [1, 2, 3, 4]\n[[grid]]\nmethod = "{INERT}"\n'
    path = sweep(grids)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        second = cluster.add_node(num_cpus=1)
        process = start(path, "--executor", "ray", "--address", cluster.address)
        wait_for_samples(process, tmp_path / "runs", 2)
        threading.Thread(target=cluster.remove_node, args=(second,), kwargs={"allow_graceful": False}).start()
        out, err = process.communicate(timeout=400)
    finally:
        cluster.shutdown()
    assert process.returncode == 1, err
    assert "resuming: " in err
    found = json.loads(out.splitlines()[-1])
    monkeypatch.delenv("TOY_SLEEP")
    local = kvbench("sweep", sweep(grids, out="whole"), "--json")
    assert_same(found, local.json)
    assert [x["status"] for x in found] == ["ok"] * 4 + ["failed"]


def follow_cells(monkeypatch, count):
    """Cells of 20 samples and their progress, which reads a clock that goes on by 10 s at every look."""
    now = itertools.count(100.0, 10.0)
    monkeypatch.setattr("kvbench.sweep.progress.time.monotonic", lambda: next(now))
    request = Request(method="full", task="niah", samples=20)
    cells = [SweepCell(i, f"cell {i}", request, {}) for i in range(count)]
    return cells, SweepProgress(cells, lambda _: None)


def test_the_time_left_counts_what_this_sweep_computes(monkeypatch):
    """Neither samples of an earlier run, nor those of a finished or failed cell; a batch is as many as it holds."""
    cells, progress = follow_cells(monkeypatch, 4)
    progress.finish(CellReport(cells[0], "ok", existing=True))
    progress.receive(cells[1], 8)  # at 100 s: 8 of its samples are those of an earlier run
    assert progress.left == ""
    progress.receive(cells[1], 14)
    assert progress.left == ", about 77 s left"  # 6 in 10 s, and 46 are missing
    progress.receive(cells[2], 0)
    progress.finish(CellReport(cells[2], "failed", "an error"))
    assert progress.left == ", about 87 s left"  # 6 in 20 s, and 26 are missing
    progress.receive(cells[1], 20)
    progress.finish(CellReport(cells[1], "ok"))
    assert progress.left == ", about 50 s left"


def test_a_failed_cell_counts_for_what_it_saved(monkeypatch):
    """A cell without a result is none of the saved cells; one whose result says that it failed is."""
    cells, progress = follow_cells(monkeypatch, 3)
    progress.receive(cells[0], 3)
    progress.finish(CellReport(cells[0], "failed", "an error"))
    progress.finish(CellReport(cells[1], "failed", "an error"))
    assert progress.counts == "0/3 cells, 3/60 samples"
    progress.finish(CellReport(cells[2], "failed", "acted in 0 of 20 samples", result=object()))
    assert progress.counts == "1/3 cells, 23/60 samples"
    assert progress.left == ""


def test_the_time_left_is_unknown_until_every_cell_has_computed(monkeypatch):
    """The first of cells that share a prefill computes it for all, so its time says little of the others."""
    cells, progress = follow_cells(monkeypatch, 2)
    progress.receive(cells[0], 0)
    progress.receive(cells[1], 0)
    progress.receive(cells[0], 10)
    assert progress.left == ""
    progress.receive(cells[1], 10)
    assert progress.left == ", about 10 s left"  # 20 in 10 s, and 20 are missing
