"""The command line: bad input gives one line and exit code 2, and writes nothing."""

from __future__ import annotations

import json
import re
import sys
import tomllib
import types
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from kvbench import __version__
from kvbench.check import InvariantOutcome
from kvbench.cli import AGAIN, call
from kvbench.cli.probes import EXTRAS
from kvbench.runs.files import read_lines
from kvbench.runs.options import list_options
from kvbench.runs.spec import Mode, RunSpec

TOYS = Path(__file__).parents[1] / "toys" / "toy.py"
INERT, LAST, TOY = f"{TOYS}:Inert", f"{TOYS}:Last", f"{TOYS}:Toy"

BAD_REQUESTS = [
    ("--method=snapkw", "unknown method 'snapkw'. Did you mean 'snapkv'?"),
    ("--method=missing.py:X", "method file 'missing.py' does not exist"),
    (f"--method={Path(__file__).parent / 'conftest.py'}", "defines no method"),
    ("--task=niahh", "unknown task 'niahh'. Did you mean 'niah'?"),
    ("--model=minni", "unknown model 'minni'."),
    ("--model=./nothing", "model"),
    ("--mode=multi", "unknown mode 'multi'. Did you mean 'multi-turn'?"),
    ("--set=windw=3", "unknown setting of"),
    ("--set=fails_at=x", "fails_at must be a whole number, got x"),
    ("--set=kind=x", "kind must be memory or bug"),
    ("--task-set=word=a,b=c --task-set=x=1", "unknown setting of"),
    ("--budget=0", "budget '0' must be above 0"),
    ("--budget=-5%", "budget '-5%' must be above 0"),
    ("--budget=101%", "budget '101%' is above 100%"),
    ("--budget=lots", "budget 'lots' is not a number"),
    ("--budget=0.5", "budget '0.5' is not a whole number of tokens"),
    ("--budget=paper", "has no paper budget"),
    ("--length=39", "length 39 is too short for toy with 1 turn: it needs 40 tokens"),
    ("--length=0", "length 0 must be 1 or more"),
    ("--length=513", "length 513 is more than model"),
    ("--length=512 --mode=multi-turn", "supports 512"),
    ("--samples=0", "samples 0 must be 1 or more"),
    ("--samples=-3", "samples -3 must be 1 or more"),
    ("--samples=many", "--samples"),
    ("--turns=0", "turns 0 must be 1 or more"),
    ("--turns=2", "turns 2 has no meaning in mode single"),
    ("--chunk=0", "chunk 0 must be 1 or more"),
    ("--device=tpu", "unknown device 'tpu'. Did you mean 'cpu'? Allowed: cpu, cuda. CUDA_VISIBLE_DEVICES chooses one"),
    ("--device=gpu", "unknown device 'gpu'. Use --device cuda; CUDA_VISIBLE_DEVICES chooses one GPU of several."),
    ("--device=cuda:99", "device 'cuda:99'"),
    ("--dtype=int3", "unknown dtype 'int3'"),
    ("--kernels=cuda", "unknown kernels 'cuda'"),
    ("--scorer=toy", "unknown scorer of toy 'toy'. Did you mean 'toy-odd@1'?"),
    ("--split=train", "unknown split 'train'"),
    ("--visibility=partly", "unknown visibility 'partly'"),
    ("--visibility=first-turn", "visibility 'first-turn' has no meaning in mode single"),
    ("--mode=multi-turn --visibility=visible", "visibility 'visible' has no meaning in mode multi-turn"),
    ("--mode=multi-request --visibility=visible", "visibility 'visible' has no meaning in mode multi-request"),
    ("--history=own", "history 'own' has no meaning in mode single"),
    ("--history=mine", "unknown history 'mine'"),
    ("--recompress", "--recompress has no meaning in mode single"),
    ("--gen=beams=4", "unknown generation setting 'beams'"),
    ("--gen=temperature=1", "is autoregressive: of the --gen settings it takes max_new_tokens only"),
    ("--gen=max_new_tokens=0", "--gen max_new_tokens=0 must be a whole number"),
    ("--bugdet=5%", "unknown option '--bugdet'. Did you mean '--budget'?"),
    ("extra", "unexpected extra argument"),
]


@pytest.mark.few(15)
@pytest.mark.parametrize(("options", "message"), BAD_REQUESTS, ids=[x for x, _ in BAD_REQUESTS])
def test_a_bad_request_is_refused(kvbench, arguments, tmp_path, options, message):
    """Exit code 2, one message with the value and the next step, nothing on standard output or on disk."""
    answer = kvbench(*arguments, "--method", LAST, *options.split())
    assert answer.code == 2
    *log, last = answer.err.splitlines()
    assert last.startswith("kvbench: ")
    assert message in last
    assert all("predicted" in x for x in log), log
    assert answer.out == ""
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("option", ["--batch=", "--gen=max_new_tokens="])
def test_a_number_of_too_many_digits_is_refused(kvbench, arguments, option):
    """Python's int refuses more than 4,300 with another error."""
    answer = kvbench(*arguments, "--method", LAST, option + "9" * 5000)
    assert answer.code == 2
    assert "must be a whole number, 1 or more" in answer.err.splitlines()[-1]


def test_an_impossible_output_folder_is_refused(kvbench, arguments, tmp_path):
    """Before a model is loaded."""
    (tmp_path / "file").write_text("")
    arguments[arguments.index("--out") + 1] = str(tmp_path / "file" / "runs")
    answer = kvbench(*arguments, "--method", LAST)
    assert answer.code == 2
    assert "is a file. Give another --out." in answer.err


def test_the_output_folder_may_be_in_the_home(kvbench, arguments, tmp_path, monkeypatch):
    """Also as `--out=~/runs`, where a shell leaves `~` as it is."""
    monkeypatch.setenv("HOME", str(tmp_path))
    at = arguments.index("--out")
    arguments[at:at + 2] = ["--out=~/mine"]
    run = kvbench(*arguments, "--method", "full").json
    assert (tmp_path / "mine" / run["run_id"] / "result.json").is_file()
    assert kvbench("show", run["run_id"], "--out=~/mine").code == 0


def test_a_tracker_that_is_not_installed_is_refused(kvbench, arguments, monkeypatch):
    """Before the run starts."""
    monkeypatch.setattr("kvbench.runs.request.importlib.util.find_spec", lambda _: None)
    answer = kvbench(*arguments, "--method", LAST, "--wandb")
    assert answer.code == 2
    assert "--wandb needs the package wandb. Install it: pip install wandb" in answer.err


def test_a_model_that_does_not_fit_is_refused(kvbench, arguments, monkeypatch):
    """Its weights exceed the memory; they are not read."""
    monkeypatch.setattr("kvbench.runs.prepare.ram_bytes", lambda: 1000)
    answer = kvbench(*arguments, "--method", LAST)
    assert answer.code == 2
    assert "GB for its weights" in answer.err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "Missing command"),
        ("models", "Missing command. See `kvbench models --help`."),
        ("rum", "unknown command 'rum'. Did you mean 'run'?"),
        ("run --task niah", "Missing option '--method'"),
        ("run --method full --task niah --samples ten", "'ten'"),
        ("reproduce --shape attention-sinks --dry-run", "attention-sinks is a finding on texts: add --model MODEL."),
        ("list method", "unknown list 'method'. Did you mean 'methods'?"),
        ("show snapkw", "unknown name 'snapkw'. Did you mean 'snapkv'?"),
        ("check snapkw", "unknown method or task 'snapkw'. Did you mean 'snapkv'?"),
        ("score nothing", "unknown run 'nothing'"),
        ("compare nothing else", "unknown run 'nothing'"),
        ("compare one", "compare needs two or more runs"),
    ],
)
def test_wrong_commands_are_refused(kvbench, tmp_path, monkeypatch, line, message):
    """Every command prints one line."""
    monkeypatch.chdir(tmp_path)
    answer = kvbench(*line.split())
    assert answer.code == 2
    assert message in answer.err
    assert len(answer.err.splitlines()) == 1


@pytest.mark.parametrize("what", ["methods", "tasks", "models", "suites"])
def test_lists_print_json(kvbench, what):
    """A list of objects with names."""
    answer = kvbench("list", what, "--json")
    assert answer.code == 0
    assert all(x["name"] for x in answer.json)


@pytest.mark.parametrize(
    ("name", "key", "value"), [("snapkv", "arxiv", "2404.14469"), ("niah", "name", "niah_multikey_1")]
)
def test_show_prints_the_card_and_the_settings(kvbench, name, key, value):
    """The name or an alias selects the class."""
    answer = kvbench("show", name, "--json")
    assert answer.json[key] == value
    assert all({"name", "type", "default"} == set(x) for x in answer.json["settings"])
    assert value in answer.out


@pytest.mark.parametrize(("name", "stored"), [
    ("full", "131,072 bytes per token, 100.0% of the full cache's 131,072"),
    ("snapkv", "32,768 bytes per token, 25.0% of the full cache"),
    ("shadowkv", "in host memory"),
])
def test_show_prints_the_stored_bytes(kvbench, name, stored):
    """32 layers with 8 KV heads of 128 in 16 bits have 2 x 32 x 8 x 128 x 2 bytes per token; default budget 25 %."""
    assert stored in kvbench("show", name, "--json").json["stored"]


def test_show_prints_a_model(kvbench, model_folder):
    """The numbers are those of its configuration."""
    assert kvbench("show", model_folder, "--json").json["num_hidden_layers"] == 2


def test_the_help_states_every_default():
    """Also a 0, which equals False."""
    given = [x for x in list_options() if x.default is not None and x.default is not False and x.default != ()]
    assert {"model", "samples", "seed", "split"} <= {x.name for x in given}
    assert [x.name for x in given if not x.help.endswith(f"; default: {x.default}.")] == []


@pytest.mark.parametrize("group", [(), ("leaderboard",), ("leaderboard", "token"), ("models",), ("trace",)])
def test_help_lists_every_command_with_a_whole_sentence(group, capsys, monkeypatch):
    """Also where the terminal has 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    assert call([*group, "--help"]) == 0
    _, commands = capsys.readouterr().out.split("Commands:\n")
    lines = commands.strip().splitlines()
    assert len(lines) >= 3
    assert [line for line in lines if not line.endswith(".") or line.endswith("...")] == []


def test_show_prints_the_command_of_a_run(kvbench, arguments, tmp_path):
    """With a note where a file defines the method or the task: their names alone would be unknown."""
    own = kvbench(*arguments, "--method", LAST).json["run_id"]
    arguments[arguments.index("--task") + 1] = "kv-short"
    registered = kvbench(*arguments, "--method", "full", "--length", "500", "--samples", "1").json["run_id"]
    out = ("--out", tmp_path / "runs")
    assert "made by (put the path of its file for last and toy): kvbench run --method last" in kvbench(
        "show", own, *out
    ).out
    assert "\nmade by: kvbench run --method full --task kv-short" in kvbench("show", registered, *out).out


def test_show_prints_the_command_that_continues_a_run(kvbench, arguments, tmp_path):
    """With the folder of its runs, so that no finished sample runs again."""
    name = kvbench(*arguments, "--method", LAST).json["run_id"]
    (tmp_path / "runs" / name / "result.json").unlink()
    printed = kvbench("show", name, "--out", tmp_path / "runs").out
    assert re.search(rf"\ncontinue it with.*: kvbench run .* --out {tmp_path / 'runs'}\n", printed)


@pytest.mark.parametrize(("line", "message"), [
    ("check snapkv --model mini", "--model is for tasks, and snapkv is a method"),
    ("check snapkv --samples 3", "--samples is for tasks, and snapkv is a method"),
    ("check task.toml --samples 3", "task.toml is checked whole. Leave out --samples."),
])
def test_check_refuses_what_it_would_not_read(kvbench, line, message):
    """By name, before anything is tested."""
    answer = kvbench(*line.split())
    assert answer.code == 2
    assert message in answer.err


def test_check_fails_with_a_failed_invariant(kvbench, monkeypatch):
    """Exit code 1, and the name of the invariant."""
    outcomes = [InvariantOutcome("an invariant", True, "fine", 0.1), InvariantOutcome("another", False, "not so", 0.2)]
    monkeypatch.setattr("kvbench.check.check", lambda method, settings, device: outcomes)
    answer = kvbench("check", LAST, "--json")
    assert answer.code == 1
    assert [x["passed"] for x in answer.json] == [True, False]
    assert "FAILED" in answer.out
    outcomes.append(InvariantOutcome("a third", False, "not so", 0.3))
    assert "as in 'another'" in kvbench("check", LAST).out, "one bug fails many invariants, and is stated once"
    del outcomes[1:]
    assert kvbench("check", LAST).code == 0


def test_score_writes_into_the_run_folder(kvbench, arguments, tmp_path):
    """The run's own scorer gives the run's own score, another scorer another; result.json is unchanged."""
    run = kvbench(*arguments, "--method", LAST).json
    folder = tmp_path / "runs" / run["run_id"]
    before = (folder / "result.json").read_bytes()
    answer = kvbench("score", folder, "--json")
    assert answer.code == 2  # the task came from a file that nobody named
    assert "task 'toy' of the run is not registered" in answer.err
    answer = kvbench("score", folder, "--task", TOY, "--json")
    assert answer.code == 0, answer.err
    assert answer.json["score"] == run["score"]
    options = ("--out", tmp_path / "runs", "--task", TOY, "--scorer", "toy-length@1", "--json")
    other = kvbench("score", run["run_id"], *options)
    assert other.json["score"]["metric"] == "length"
    assert sorted(x.name for x in (folder / "scores").iterdir()) == ["toy-length@1.json", "toy-odd@1.json"]
    assert (folder / "result.json").read_bytes() == before
    assert kvbench("score", folder, "--task", TOY, "--scorer", "x").code == 2
    assert "belongs to task toy, not to kv" in kvbench("score", folder, "--task", "kv").err


def test_compare_pairs_equal_questions(kvbench, arguments, tmp_path):
    """A copy is no further run; different prompts give a warning; different tasks are refused."""
    runs = [
        kvbench(*arguments, "--method", *options.split()).json["run_id"]
        for options in (f"{LAST} --budget 10%", "full", "full --seed 1", "full --visibility hidden")
    ]
    folders = [tmp_path / "runs" / x for x in runs]
    answer = kvbench("compare", folders[1], folders[1], folders[0], "--json")
    assert answer.code == 0
    assert answer.json["warnings"] == []
    assert all(x["output"]["tokens"] > 0 for x in answer.json["runs"])
    (other,) = answer.json["differences"]
    assert (other["within_noise"], other["verdict"], other["n"]) == (None, "too few to tell", 4)
    assert "skipped, a copy of" in answer.err
    answer_to_one = kvbench("compare", folders[1], folders[1])
    assert (answer_to_one.code, "these are copies of one" in answer_to_one.err) == (2, True)
    assert "4 contexts are too few to tell" in answer.err
    assert {x["rank"] for x in answer.json["runs"]} == {None}
    lines = [read_lines(x / "samples.jsonl") for x in folders]
    (regressed,) = answer.json["regressions"]
    assert (regressed["run_id"], regressed["full"], regressed["n"]) == (runs[0], runs[1], 4)
    assert {(x["sample"], x["turn"], x["full"], x["score"]) for x in regressed["samples"]} == {
        (a.sample, a.turn, b.score, a.score) for a, b in zip(*lines[:2], strict=True) if a.score < b.score
    }
    assert (f"{regressed['count']} of 4" if regressed["count"] else "No answer is worse than") in answer.out
    means = [sum(x.score for x in y) / 4 for y in lines[:2]]
    assert other["mean"] == pytest.approx(means[0] - means[1])

    answer = kvbench("compare", runs[1], runs[2], "--out", tmp_path / "runs", "--json")
    assert answer.json["warnings"] == ["spec.seed differs: 0, 1"]
    assert answer.json["differences"][0]["n"] == 0
    assert "visibility differs" in kvbench("compare", folders[1], folders[3]).err
    answer = kvbench("compare", folders[1], folders[0], folders[2])
    assert "or more for a comparison." in answer.err, "the run of another seed has no common question"

    result = json.loads((folders[2] / "result.json").read_text())
    result["task"]["name"] = "other"
    (folders[2] / "result.json").write_text(json.dumps(result))
    answer = kvbench("compare", folders[1], folders[2])
    assert answer.code == 2
    assert "different tasks" in answer.err
    (folders[0] / "result.json").unlink()
    assert "is not finished" in kvbench("compare", folders[0], folders[1]).err


@pytest.mark.parametrize("works", [True, False])
def test_a_tracker_gets_the_result(kvbench, arguments, monkeypatch, works):
    """The result is saved and printed, even if the tracker fails."""
    logged = {}
    tracker = types.ModuleType("trackio")
    tracker.__spec__ = types.SimpleNamespace()  # what find_spec looks at
    tracker.init = lambda **options: logged.update(options)
    tracker.log = logged.update if works else None
    tracker.finish = lambda: None
    monkeypatch.setitem(sys.modules, "trackio", tracker)
    answer = kvbench(*arguments, "--method", LAST, "--trackio")
    assert answer.code == (0 if works else 1)
    assert answer.json["status"] == "ok"
    assert logged["name"] == answer.json["run_id"]
    assert ("trackio did not take it" in answer.err) is not works


def test_doctor_names_failed_checks(kvbench, monkeypatch):
    """Every check has a name; a failed one gives exit code 1."""
    answer = kvbench("doctor", "--json")
    found = {x["name"]: x for x in answer.json}
    checks = {"python", "torch", "transformers", "flash-attn", "gpu", "threads", "disk", "cache", "kernels", "extras"}
    assert checks <= found.keys()
    assert answer.code == (0 if all(x["ok"] for x in answer.json) else 1)
    monkeypatch.setattr(
        "kvbench.cli.probes.find_version", lambda package: "4.50.0" if package == "transformers" else "9.9"
    )
    answer = kvbench("doctor")
    assert answer.code == 1
    assert "4.50.0: kvbench needs 5.17 or newer" in answer.out


def test_doctor_names_slow_and_missing_parts_and_what_to_type(kvbench, monkeypatch):
    """A machine without bfloat16 units, GPU and optional packages still passes."""
    monkeypatch.setattr("kvbench.cli.probes.has_bfloat16_units", lambda: False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(
        "kvbench.cli.probes.find_version", lambda package: "9.9" if package in ("torch", "transformers") else None
    )
    found = {x["name"]: x for x in kvbench("doctor", "--json").json}
    assert all(x["ok"] for x in found.values() if x["name"] not in ("disk", "threads", "kernels"))
    assert "--dtype float32" in found["bfloat16"]["hint"]
    assert "--model mini" in found["gpu"]["hint"]
    for extra in EXTRAS:
        assert f"pip install 'kvbench[{extra}]'" in found[extra]["hint"]
    assert found["extras"]["found"] == "installed: none"


def test_doctor_knows_the_extras_of_the_package():
    """Each with a package that it installs."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    table = project["optional-dependencies"]
    assert set(EXTRAS) == set(table) - {"flash"}
    for extra, (package, _) in EXTRAS.items():
        assert any(re.split(r"[\[><=]", x)[0].replace("-", "_") == package for x in table[extra])


def test_a_run_id_is_a_hash_of_the_spec(kvbench, arguments, tmp_path):
    """Equal specs have equal ids; every field is part of the hash; a hostile name stays within one folder."""
    run = kvbench(*arguments, "--method", LAST).json
    spec = RunSpec.model_validate_json((tmp_path / "runs" / run["run_id"] / "spec.json").read_text())
    assert spec.run_id == run["run_id"]
    assert run["run_id"].startswith("last-toy-")
    for change in ({"seed": 1}, {"mode": Mode.MULTI_TURN}, {"device": "cuda"}, {"chunk": 4}):
        assert spec.model_copy(update=change).run_id != spec.run_id
    hostile = spec.model_copy(update={"method": spec.method.model_copy(update={"name": "../../x y"})})
    assert "/" not in hostile.run_id
    assert not hostile.run_id.startswith(".")


def test_a_registered_method_and_task_run_by_name(kvbench, arguments):
    """End to end."""
    arguments[arguments.index("--task") + 1] = "kv-short"
    answer = kvbench(*arguments, "--method", "snapkv", "--set", "window=4", "--gen", "max_new_tokens=2",
                     "--length", "500", "--samples", "1")
    assert answer.code == 0, answer.err
    assert answer.json["spec"]["method"]["settings"]["window"] == 4
    assert answer.json["output"]["tokens"] <= 2
    assert answer.json["budget"] == {**answer.json["budget"], "asked": "25%", "kind": "stored"}


def test_a_failed_run_has_no_difference(kvbench, arguments, tmp_path):
    """Its row shows the reason."""
    runs = [kvbench(*arguments, "--method", x).json["run_id"] for x in ("full", INERT)]
    answer = kvbench("compare", *runs, "--out", tmp_path / "runs", "--json")
    assert answer.json["differences"][0]["mean"] is None
    assert "acted in 0 of 4 samples" in answer.err


def test_methods_are_listed_by_family(kvbench):
    """A table for each family, with the year, the paper, what a budget counts, and what is measured before a run."""
    answer = kvbench("list", "methods", "--json")
    assert answer.code == 0
    found = {x["name"]: x for x in answer.json}
    assert found["qfilter"]["calibration"] == "query directions, in one pass"
    assert found["snapkv"]["calibration"] is None
    assert (found["quest"]["family"], found["quest"]["budget"]) == ("retrieval", "read")
    lines = kvbench("list", "methods").out.splitlines()
    budgets = dict(line.split()[:2] for line in lines if "  " in line)
    assert (budgets["snapkv"], budgets["qfilter"], budgets["locret"]) == ("stored", "stored*", "stored**")
    assert {budgets[x] for x in ("dms", "kvzap")} == {"stored**"}
    headings = [line for before, line in pairwise(lines) if not before]
    assert headings == sorted({x["family"] for x in found.values()})
    assert len(lines) == 1 + len(found) + 2 * len(headings)


@pytest.mark.parametrize("what", ["methods", "tasks", "models", "suites"])
def test_lists_fit_a_terminal(kvbench, what, monkeypatch):
    """No line has more than 80 characters there, and every name is whole; a pipe gets whole titles."""
    found, plain = kvbench("list", what, "--json").json, kvbench("list", what).out
    assert all(x.get("title", x["name"]) in plain for x in found)
    monkeypatch.setattr(Console, "is_terminal", True)
    monkeypatch.setenv("COLUMNS", "80")
    lines = kvbench("list", what).out.splitlines()
    assert max(map(len, lines)) <= 80
    assert {x["name"] for x in found} <= {x.split()[0].rstrip(",") for x in lines if x}


@pytest.mark.parametrize(("line", "said"), [
    ("list methods", "interrupted."), ("run --method full --task niah", f"interrupted. {AGAIN}"),
])
def test_ctrl_c_outside_of_a_run_is_reported(kvbench, monkeypatch, line, said):
    """With every version of typer; only commands that save samples say that they continue."""
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("kvbench.registry.list_entries", interrupted)
    monkeypatch.setattr("kvbench.sweep.file.make_request", interrupted)
    answer = kvbench(*line.split())
    assert (answer.code, answer.out, answer.err) == (130, "", f"kvbench: {said}\n")


def test_ctrl_c_in_bench_names_the_file_of_finished_cells(kvbench, monkeypatch, tmp_path):
    """If there is one."""
    def interrupted(request):
        if request.out is not None and request.out.name == "cells.json":
            request.out.write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr("kvbench.bench.run.run_bench", interrupted)
    cells, none = tmp_path / "cells.json", tmp_path / "none.json"
    for options, said in (
        (("--out", cells), f"interrupted: finished cells are in {cells}. Run the same command to continue."),
        (("--out", none), "interrupted."), ((), "interrupted."),
    ):
        answer = kvbench("bench", "--method", "full", *options)
        assert (answer.code, answer.err.splitlines()[-1]) == (130, f"kvbench: {said}")


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="no folder here that nobody can write into")
def test_an_output_folder_that_cannot_be_made_is_refused(kvbench, arguments):
    """Even where the system reports its parent as writable."""
    arguments[arguments.index("--out") + 1] = "/proc/foo"
    answer = kvbench(*arguments, "--method", LAST)
    assert answer.code == 2
    assert "folder /proc/foo/" in answer.err and "cannot be created: " in answer.err
    assert "free disk space" not in answer.err


def test_explain_does_not_run_a_request_twice(kvbench, arguments, tmp_path):
    """A budget of 25 % and none are the same run of a method whose default is 25 %."""
    arguments[arguments.index("--task") + 1] = "kv-short"
    out = ("--out", tmp_path / "runs")
    runs = [
        kvbench(*arguments, *x.split(), "--length", "500", "--samples", "1").json["run_id"]
        for x in ("--method snapkv --set window=4 --budget 25%", "--method full")
    ]
    answer = kvbench("explain", *runs, "--run", *out, "--json")
    assert answer.code == 0, answer.err
    assert {x["name"]: x["note"] for x in answer.json["differences"]}["budget"] == "no effect: the same run"
    assert "No setting, version or machine differs." not in answer.out
    assert "No setting, version or machine differs." in kvbench("explain", runs[0], runs[0], *out).out


@pytest.mark.parametrize("stale", [0, 1])
def test_explain_measures_no_effect_of_other_code(kvbench, arguments, tmp_path, stale):
    """A run in --out that other code computed is neither the first run again nor the effect of a setting."""
    arguments[arguments.index("--task") + 1], runs = "kv-short", tmp_path / "runs"
    ids = [
        kvbench(*arguments, "--method", "knorm", "--budget", x, "--length", "500", "--samples", "1").json["run_id"]
        for x in ("25%", "50%")
    ]
    path = runs / ids[stale] / "result.json"
    document = json.loads(path.read_text())
    document["spec"]["sources"]["harness"] = "0" * 64
    path.write_text(json.dumps(document))
    answer = kvbench("explain", ids[0], ids[1], "--run", "--out", runs, "--json")
    found = answer.json["differences"] if stale else []
    assert [x["effect"] for x in found] == [None] * len(found)
    said = answer.err if stale == 0 else found[0]["note"]
    assert f"{runs / ids[stale]}" in said and "other code computed" in said and "(source of the harness)" in said
    assert answer.code == (0 if stale else 2)


def test_the_total_of_explain_says_what_it_is_over(kvbench, arguments, tmp_path):
    """Scores of all questions, as `kvbench show` prints them, differ by another number."""
    ids = [kvbench(*arguments, "--method", LAST, "--samples", n).json["run_id"] for n in (2, 4)]
    last = next(x for x in kvbench("explain", *ids, "--out", tmp_path / "runs").out.splitlines() if "total" in x)
    assert "paired on 2" in last


def test_the_full_cache_is_the_baseline(kvbench, arguments, tmp_path):
    """Wherever it stands on the command line; without it the first run is."""
    out = ("--out", tmp_path / "runs", "--json")
    last, full, other = (
        kvbench(*arguments, "--method", *x.split()).json["run_id"]
        for x in (f"{LAST} --budget 10%", "full", f"{LAST} --budget 50%")
    )
    answer = kvbench("compare", last, full, other, *out)
    assert answer.json["baseline"] == full
    assert [x["run_id"] for x in answer.json["differences"]] == [last, other]
    assert "baseline: full" in answer.out
    assert kvbench("compare", last, other, *out).json["baseline"] == last


def test_the_version_is_printed(kvbench):
    """The one of the package."""
    answer = kvbench("--version")
    assert (answer.code, answer.out) == (0, f"kvbench {__version__}\n")


@pytest.mark.parametrize(("line", "close"), [
    ("show where.tml", "where.toml"), ("check where.tml", "where.toml"), ("check wher.py", "where.py"),
    ("run --method full --task where.tml", "where.toml"), ("run --method full --suite where.tml", "where.toml"),
    ("sweep wher.toml", "where.toml"),
])
def test_a_similar_file_is_suggested(kvbench, tmp_path, monkeypatch, line, close):
    """In place of a list of names."""
    monkeypatch.chdir(tmp_path)
    for name in ("where.toml", "where.py"):
        (tmp_path / name).write_text("")
    answer = kvbench(*line.split())
    assert answer.code == 2
    assert f"Did you mean '{close}'?" in answer.err
    assert f"'{line.split()[-1]}'" in answer.err
    assert "Allowed" not in answer.err


def test_a_file_is_not_suggested_in_its_own_place(kvbench, tmp_path, monkeypatch):
    """It exists, but is not what was asked for."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text("")
    answer = kvbench("run", "--method", "README.md", "--task", "niah")
    assert answer.code == 2
    assert "unknown method 'README.md'. See `kvbench list methods`" in answer.err


def test_an_empty_list_of_names_is_not_printed(kvbench, tmp_path):
    """There are no runs to choose from."""
    assert "Allowed" not in kvbench("score", "x", "--out", tmp_path).err
