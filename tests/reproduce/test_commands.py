"""`kvbench reproduce` and `kvbench explain`, as they are called: on the bundled model, with claims made for it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from kvbench.analysis.load import find_runs, load_run
from kvbench.cli import call
from kvbench.errors import UserError
from kvbench.reproduce.paper import read_paper
from kvbench.reproduce.standing import list_judgments
from kvbench.reproduce.verdict import Judgment

PAPER = """
title = "A paper"

[[table]]
name = "scores"
title = "Table 1"
where = "here"
evidence = "verified"
decimals = 0
baseline = "full"
run = { samples = 6, length = 384 }

[table.protocol]
visibility = "hidden"
granularity = "KV head"

[table.columns]
needles = { task = "niah" }
other = { lacks = "a task that nobody has" }

[table.rows]
full = { method = "full" }
KNorm = { method = "knorm", budget = "25%" }
Rocket = { method = "unwritten" }

[table.models.mini]
id = "mini"
values.full = [100, nan]
values.KNorm = [95, 90]
values.Rocket = [98, 97]
"""


@pytest.fixture
def paper(tmp_path: Path) -> Path:
    """A claims file about `mini`: the dense cache is right, KNorm is said to be at 95, which it is not here."""
    path = tmp_path / "paper.toml"
    path.write_text(PAPER)
    return path


@pytest.fixture
def out(tmp_path: Path) -> list[str]:
    """Where runs go, and that their documents come."""
    return ["--out", str(tmp_path / "runs"), "--json"]


def judgments(folder: Path, paper: Path) -> list[Judgment]:
    """How the claims of a file stand by the finished runs of a folder."""
    return list_judgments(folder, map(load_run, find_runs([str(folder)])), {"paper": read_paper(paper)})


def test_a_table_is_run_and_judged(kvbench, paper, out):
    """The page lists claims that hold, that do not, and that cannot be run with the reason, before and after."""
    answer = kvbench("reproduce", f"{paper}:scores", *out)
    assert answer.code == 0, answer.err
    verdicts = {x["id"].partition("mini/")[2]: x["verdict"] for x in answer.json}
    assert verdicts == {
        "full/needles": "reproduced", "knorm/needles": "not reproduced", "knorm/other": "not run",
        "rocket/needles": "not run", "rocket/other": "not run",
    }
    assert "missing for 2 of 5 numbers: method: method unwritten is not in kvbench." in answer.err
    assert "missing for 2 of 5 numbers: task: needs a task that nobody has." in answer.err
    assert answer.err.index("missing for") < answer.err.index("done")
    assert max(len(x) for x in answer.out.splitlines() if x[:1] in "┏┡│└") <= 80
    assert ["less the full cache", "-5.00"] in [[y.strip() for y in x.split("│")[1:3]] for x in answer.out.splitlines()]
    knorm = next(x for x in answer.json if x["id"].endswith("knorm/needles"))
    assert knorm["printed_difference"] == -5
    assert knorm["difference"]["ci95"][1] < -5
    again = kvbench("reproduce", f"{paper}:scores", *out)
    assert again.json == answer.json
    assert "already finished" in again.err


@pytest.mark.slow
@pytest.mark.parametrize(("said", "prompted", "verdict"), [
    ("none", "none", "reproduced"), ("own", "none", "partly"), ("none", "own", "not run"),
])
def test_a_paper_without_a_template_is_met_without(kvbench, paper, out, chat_mini, tmp_path, said, prompted, verdict):
    """On a model that has one: runs without it are asked for, and no others are taken for them."""
    text = PAPER.replace('id = "mini"', f'id = "{chat_mini}"')
    paper.write_text(text.replace("[table.protocol]", f'[table.protocol]\ntemplate = "{prompted}"'))
    assert kvbench("reproduce", f"{paper}:scores/mini/full", *out).code in (0, 1)
    paper.write_text(text.replace("[table.protocol]", f'[table.protocol]\ntemplate = "{said}"'))
    found = {x.claim.id: x for x in judgments(tmp_path / "runs", paper)}
    judged = found["paper:scores/mini/full/needles"]
    assert judged.verdict == verdict
    assert judged.differs == (("template: own in the paper, none here",) if verdict == "partly" else ())
    if said == prompted:
        assert [x["verdict"] for x in kvbench("reproduce", f"{paper}:scores/mini/full", *out).json] == [verdict]


@pytest.mark.slow
def test_fewer_samples_show_a_shape_only(kvbench, paper, out):
    """Nothing is called reproduced on a part."""
    answer = kvbench("reproduce", f"{paper}:scores/mini/full", "--samples", "2", *out)
    assert [x["verdict"] for x in answer.json] == ["shape only"]


def test_a_plan_is_shown_without_running(kvbench, paper, out, tmp_path):
    """Runs, memory and time of each row, and what is missing; nothing is written."""
    answer = kvbench("reproduce", f"{paper}:scores", "--dry-run", *out)
    assert answer.code == 0, answer.err
    rows = {x["row"]: x for x in answer.json}
    assert [rows[x]["runs"] for x in ("full", "KNorm", "Rocket")] == [1, 1, 0]
    assert rows["full"]["predicted_s"] > 0
    assert rows["full"]["predicted_bytes"] > 8_000_000
    assert [x["what"] for x in rows["Rocket"]["missing"]] == ["method", "task"]
    assert not (tmp_path / "runs").exists()


def test_a_plan_says_what_only_the_model_knows(kvbench, paper, out):
    """A length at which the task's question does not fit."""
    paper.write_text(PAPER.replace("length = 384", "length = 128"))
    answer = kvbench("reproduce", f"{paper}:scores/mini/full", "--dry-run", *out)
    (row,) = answer.json
    assert [x["what"] for x in row["missing"]] == ["run"]
    assert row["missing"][0]["why"].startswith("length 128 is too short")


def test_a_plan_says_why_it_has_no_time(kvbench, out):
    """Without weights and data, no column says that the time is unknown; a line says what it takes."""
    answer = kvbench("reproduce", "snapkv:longbench/mistral-7b-v0.2/snapkv-1024", "--dry-run", *out)
    assert answer.code == 0, answer.err
    assert [x["predicted_s"] for x in answer.json] == [None, None]  # and the baseline's row
    assert "unknown" not in answer.out
    assert "No time for 2 of 2 rows" in answer.out


def test_a_claim_of_which_nothing_can_run_fails_with_the_reason(kvbench, out):
    """Without weights and data, on a machine without a network."""
    answer = kvbench("reproduce", "snapkv:longbench/mistral-7b-v0.2/snapkv-1024/trec", *out)
    assert answer.code == 1
    assert {x["verdict"] for x in answer.json} == {"not run"}
    assert {x["what"] for y in answer.json for x in y["missing"]} == {"data", "weights"}


@pytest.mark.slow
def test_the_list_is_of_all_tables_and_findings(kvbench):
    """With how much of each could be run."""
    answer = kvbench("reproduce", "--list", "--json")
    assert answer.code == 0
    tables = {x["id"]: x for x in answer.json["tables"]}
    assert len(tables["snapkv:longbench"]["runnable"]) == 320
    assert tables["quest:passkey-10k"]["runnable"] == []
    assert "hidden-question" in {x["name"] for x in answer.json["findings"]}
    assert "attention-sinks" in {x["name"] for x in answer.json["findings_on_texts"]}


@pytest.mark.parametrize(("arguments", "said"), [
    ([], "reproduce takes exactly one of: a claim, --list, --method, --shape"),
    (["snapkv", "--list"], "reproduce takes exactly one of"),
    (["snapkw"], "unknown paper 'snapkw'. Did you mean 'snapkv'?"),
    (["--shape", "x"], "unknown finding 'x'"),
    (["--shape", "all", "--model", "minni"], "minni"),
    (["snapkv", "--samples", "0"], "samples 0 must be 1 or more"),
])
def test_a_wrong_request_is_refused(kvbench, arguments, said):
    """In one line, with exit code 2."""
    answer = kvbench("reproduce", *arguments)
    assert (answer.code, len(answer.err.splitlines())) == (2, 1)
    assert said in answer.err


@pytest.mark.slow
def test_a_finding_is_tested_and_only_all_of_them_are_recorded(kvbench, out, tmp_path, monkeypatch):
    """One finding on two contexts: numbers, a verdict, no file. All of them with all samples: a file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    text = 'run = { model = "mini", task = "niah", length = 384, samples = 3 }\n[runs]\nall = { method = "full" }\n'
    text += 'norms = { method = "knorm" }\n[[finding]]\nname = "norms"\nsource = "KNorm"\narxiv = "2406.11430"\n'
    text += 'statement = "Small keys matter."\ncomparisons = [{ more = "norms", less = "all", by = -0.1 }]\n'
    (tmp_path / "shape.toml").write_text(text)
    monkeypatch.setattr("kvbench.reproduce.shape.FILE", tmp_path / "shape.toml")
    answer = kvbench("reproduce", "--shape", "norms", "--samples", "2", *out)
    assert answer.code == 0, answer.err
    (finding,) = answer.json["findings"]
    assert (finding["name"], finding["verdict"]) == ("norms", "undecided")
    assert len(finding["comparisons"][0]["contexts"]) == 2
    assert set(answer.json["runs"]) == {"all", "norms"}
    assert not (tmp_path / "results").exists()
    answer = kvbench("reproduce", "--shape", "all", *out)
    record = json.loads((tmp_path / "results" / "shape" / "findings.json").read_text())
    assert record == answer.json


@pytest.mark.parametrize(("gpu", "workers"), [(True, [None, 1]), (False, [3, 3])])
def test_findings_take_all_cores_only_without_a_gpu(kvbench, monkeypatch, gpu, workers):
    """On a GPU cells run side by side as its memory allows; the prediction counts as many workers as the run starts."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2})
    monkeypatch.setattr("kvbench.reproduce.needs.has_gpu", lambda: gpu)
    asked = []

    def start(cells, workers):
        asked.append(workers)
        raise UserError("enough.")

    monkeypatch.setattr("kvbench.cli.sweep.run_cells", start)
    monkeypatch.setattr("kvbench.cli.sweep.show_prediction", lambda cells, workers, as_json: asked.append(workers))
    kvbench("reproduce", "--shape", "all")
    kvbench("reproduce", "--shape", "all", "--dry-run")
    assert asked == workers


def test_a_dry_run_of_findings_on_texts_names_an_unknown_model(kvbench):
    answer = kvbench("reproduce", "--shape", "all", "--model", "minni", "--dry-run")
    assert answer.code == 2 and "unknown model 'minni'. Did you mean 'mini'?" in answer.err


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A folder with two runs: SnapKV with the question seen, and KNorm in twice the bytes without."""
    runs = tmp_path_factory.mktemp("runs")
    common = ["run", "--task", "niah", "--length", "384", "--samples", "4", "--out", str(runs)]
    assert call([*common, "--method", "snapkv"]) == 0
    assert call([*common, "--method", "knorm", "--visibility", "hidden", "--budget", "50%"]) == 0
    return runs, sorted((x.name for x in runs.iterdir()), reverse=True)


@pytest.mark.slow
def test_what_differs_is_said_and_flipped_one_by_one(kvbench, pair):
    """Method, budget and visibility alone; their own runs are kept, and the rest is what they do together."""
    runs, names = pair
    said = kvbench("explain", *names, "--out", runs, "--json")
    assert said.code == 0, said.err
    assert {x["name"]: x["note"] for x in said.json["differences"]} == dict.fromkeys(
        ("method", "budget", "visibility"), "add --run"
    )
    answer = kvbench("explain", *names, "--run", "--out", runs, "--json")
    effects = {x["name"]: x["effect"] for x in answer.json["differences"]}
    assert set(effects) == {"method", "budget", "visibility"}
    assert all(x["paired"] == 4 for x in effects.values())
    assert len(list(runs.glob("*/result.json"))) == 5
    means = [json.loads((runs / x / "result.json").read_text())["score"]["mean"] for x in names]
    assert answer.json["total"]["mean"] == pytest.approx(means[1] - means[0])
    alone = sum(x["mean"] for x in effects.values())
    assert answer.json["remainder"] == pytest.approx(means[1] - means[0] - alone)
    assert said.json["remainder"] is None


@pytest.mark.slow
def test_what_cannot_be_flipped_says_why(kvbench, pair, tmp_path):
    """The code of another day, and a value that makes no sense alone."""
    runs, names = pair
    shutil.copytree(runs, tmp_path / "runs")
    path = tmp_path / "runs" / names[1] / "result.json"
    document = json.loads(path.read_text())
    document["spec"]["versions"]["torch"] = "1.0"
    document["spec"]["mode"] = document["mode"] = "multi-turn"
    path.write_text(json.dumps(document))
    answer = kvbench("explain", *names, "--out", tmp_path / "runs", "--json")
    notes = {x["name"]: x["note"] for x in answer.json["differences"]}
    assert notes["spec.versions.torch"] == "cannot be run alone: package version"
    assert notes["mode"].startswith("cannot be run alone: not allowed: visibility 'visible' has no meaning")


@pytest.mark.slow
def test_how_claims_stand_is_read_off_a_folder(kvbench, paper, tmp_path):
    """Finished runs are judged as the command does it, in any folder; nothing else is started or claimed."""
    answer = kvbench("reproduce", f"{paper}:scores/mini/full", "--out", tmp_path / "results" / "here", "--json")
    assert answer.json[0]["verdict"] == "reproduced"
    verdicts = {
        x.claim.id.partition("mini/")[2]: (x.verdict, [y.why for y in x.missing])
        for x in judgments(tmp_path / "results", paper)
    }
    assert verdicts == {
        "full/needles": ("reproduced", []), "knorm/needles": ("not run", ["there is no run of it in this folder"]),
        "knorm/other": ("not run", ["needs a task that nobody has"]),
        "rocket/needles": ("not run", ["method unwritten is not in kvbench"]),
        "rocket/other": ("not run", ["needs a task that nobody has", "method unwritten is not in kvbench"]),
    }
