"""`kvbench answers` and `kvbench show RUN`: a reader finds a wrong answer without opening a file."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pytest

from kvbench.analysis.load import refer_to
from kvbench.runs.files import read_lines

ROOT = Path(__file__).parents[2]
LAST = f"{ROOT / 'tests' / 'toys' / 'toy.py'}:Last"
CURATED = ROOT / "results" / "cpu-2-cores"


@pytest.fixture
def two(kvbench, arguments, tmp_path):
    """A run of the full cache and a run of a method that loses the answers."""
    ids = [kvbench(*arguments, "--method", *x.split()).json["run_id"] for x in ("full", f"{LAST} --budget 10%")]
    return [tmp_path / "runs" / x for x in ids]


def test_the_answers_of_a_run(kvbench, two):
    """Question, reference answer, answer, score and how it ended, for every line of the journal."""
    answer = kvbench("answers", two[0], "--json")
    assert answer.code == 0, answer.err
    lines = read_lines(two[0] / "samples.jsonl")
    assert [(x["sample"], x["turn"]) for x in answer.json["answers"]] == [(x.sample, x.turn) for x in lines]
    for shown, line in zip(answer.json["answers"], lines, strict=True):
        assert shown["question"] == line.question
        assert shown["references"] == list(line.references)
        assert shown["answers"][0]["prediction"] == line.prediction
        assert shown["answers"][0]["stop_reason"] == line.stop_reason
        assert f"{line.sample}, question {line.turn + 1}: {line.score:.3f}" in answer.out
    assert all(len(x) <= 80 for x in answer.out.splitlines()[:-1])


def test_two_runs_show_changed_answers_first(kvbench, two):
    """With both answers under their methods, and the scores in the order of the runs."""
    answer = kvbench("answers", *two, "--json")
    shown = answer.json["answers"]
    changed = [x["changed"] for x in shown]
    assert any(changed) and changed == sorted(changed, reverse=True)
    full, last = ({(x.index, x.turn): x for x in read_lines(y / "samples.jsonl")} for y in two)
    for x in shown:
        key = x["index"], x["turn"]
        assert [y["prediction"] for y in x["answers"]] == [full[key].prediction, last[key].prediction]
    first = shown[0]["answers"]
    assert f"{first[0]['score']:.3f} -> {first[1]['score']:.3f}" in answer.out.splitlines()[0]


def test_wrong_answers_and_one_sample(kvbench, two):
    """`--wrong` leaves right ones out; `--sample` takes a number or an id."""
    wrong = kvbench("answers", two[1], "--wrong", "--json").json["answers"]
    every = kvbench("answers", two[1], "--json").json["answers"]
    assert [x for x in every if x["answers"][0]["score"] < 1] == wrong
    for name in ("2", every[2]["sample"]):
        (one,) = kvbench("answers", two[1], "--sample", name, "--json").json["answers"]
        assert one == every[2]


def test_an_id_that_is_a_number_names_its_own_sample(kvbench, two):
    """And not also the one that has this number in the run."""
    journal = two[0] / "samples.jsonl"
    lines = [json.loads(x) for x in journal.read_text().splitlines()]
    journal.write_text("".join(f"{json.dumps({**x, 'sample': str(x['index'] + 1)})}\n" for x in lines))
    for name, number in (("1", 0), ("0", 0)):
        answers = kvbench("answers", two[0], "--sample", name, "--json").json["answers"]
        assert {x["index"] for x in answers} == {number}


def test_no_wrong_answer_is_no_fault_of_the_journal(kvbench, tmp_path):
    """A run of this version without wrong answers shows none, and does not blame kvbench 0.1."""
    folder = tmp_path / "run"
    shutil.copytree(next(CURATED.glob("full-niah*")), folder)
    journal = folder / "samples.jsonl.gz"
    before = gzip.decompress(journal.read_bytes()).splitlines()
    lines = [{**json.loads(x), "score": 1.0, "question": "q?"} for x in before]
    journal.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    answer = kvbench("answers", folder, "--wrong")
    assert (answer.code, "0 with a wrong answer" in answer.out, "kvbench 0.1" in answer.err) == (0, True, False)


@pytest.mark.parametrize("score", [0.5, 2.5])
def test_answers_of_a_metric_without_a_full_score_are_not_wrong(kvbench, tmp_path, score):
    """As a negative log-likelihood, of which 0.5 is better than 1."""
    folder = tmp_path / "run"
    shutil.copytree(next((ROOT / "results" / "smollm2-135m-text").glob("full-ppl*")), folder)
    journal = folder / "samples.jsonl.gz"
    lines = [{**json.loads(x), "score": score} for x in gzip.decompress(journal.read_bytes()).splitlines()]
    journal.write_bytes(gzip.compress("".join(f"{json.dumps(x)}\n" for x in lines).encode()))
    answer = kvbench("answers", folder)
    assert (answer.code, answer.out.splitlines()[-1]) == (0, f"{len(lines)} of {len(lines)} questions shown.")
    answer = kvbench("answers", folder, "--wrong")
    assert (answer.code, "the metric of this run has no full score" in answer.err) == (2, True)


@pytest.mark.parametrize(("options", "message"), [
    ("--sample 9", "there is no sample '9'. Give a number from 0 to 3"),
    ("mini", "'mini' is a model, not a run."), ("nothing", "unknown run 'nothing'"),
])
def test_bad_input_is_refused(kvbench, two, options, message):
    """In one line with the next step."""
    answer = kvbench("answers", two[0], *options.split())
    assert answer.code == 2
    assert message in answer.err


def test_an_older_journal_has_no_questions(kvbench):
    """A curated run shows the rest, and says so."""
    folder = next(CURATED.glob("expected-attention*"))
    assert b'"question"' not in gzip.decompress((folder / "samples.jsonl.gz").read_bytes())
    answer = kvbench("answers", folder, "--sample", "0")
    assert answer.code == 0
    assert "reference" in answer.out and "kvbench 0.1 made it" in answer.err


def test_show_describes_a_run(kvbench, two, tmp_path):
    """By folder, id or hash, as `kvbench run` printed it, with its command; an unfinished run shows how far it is."""
    hashed = two[0].name.rpartition("-")[2]
    for line in (["show", two[0]], *(["show", x, "--out", two[0].parent] for x in (two[0].name, hashed))):
        answer = kvbench(*line, "--json")
        assert answer.json["run_id"] == two[0].name
        assert "kvbench run --method full" in answer.out
    part = tmp_path / "part"
    shutil.copytree(two[0], part)
    (part / "result.json").unlink()
    whole = (part / "samples.jsonl").read_text().splitlines(keepends=True)
    (part / "samples.jsonl").write_text("".join(whole[:3]))
    answer = kvbench("show", part, "--json")
    assert (answer.json["kind"], answer.json["samples"]) == ("run", 3)
    assert "3 of 4" in answer.out


def test_a_printed_command_finds_the_run(kvbench, two, monkeypatch):
    """By its hash in runs/, and by its folder elsewhere."""
    monkeypatch.chdir(two[0].parents[1])
    assert refer_to(Path("runs") / two[0].name) == two[0].name.rpartition("-")[2]
    assert refer_to(two[0]) == two[0].name.rpartition("-")[2]
    monkeypatch.chdir(two[0])
    assert refer_to(two[0]) == str(two[0])
    assert refer_to(Path("a b") / two[0].name) == f"'a b/{two[0].name}'"


@pytest.mark.parametrize("name", ["ir/kvzip-niah_multikey_1-08c9508d351a", "kvzip-niah-08c9508d351a", "08c9508d351a"])
def test_a_missing_run_is_not_a_model(kvbench, tmp_path, name):
    """Nor a method: `show` refuses its name as `answers` does, without a look at the Hugging Face Hub."""
    shown, answers = (kvbench(x, name, "--out", tmp_path) for x in ("show", "answers"))
    assert (shown.code, shown.err) == (answers.code, answers.err) == (2, (
        f"kvbench: unknown run '{name}'. Give the folder of a run, or the id of a run in {tmp_path}/.\n"
    ))


def test_a_run_is_not_a_model(kvbench, two):
    """And the message names the command that describes it."""
    answer = kvbench("run", "--method", "full", "--task", "niah", "--model", two[0])
    assert answer.code == 2
    assert f"'{two[0]}' is the folder of a run, not of a model. Give a model; `kvbench show" in answer.err


@pytest.mark.parametrize("command", ["show", "answers", "score"])
def test_a_folder_of_runs_is_not_a_run(kvbench, two, command):
    """The message names one of its runs, and the command that takes all."""
    answer = kvbench(command, two[0].parent)
    assert answer.code == 2
    assert f"'{two[0].parent}' is a folder of runs, not a run. Give one of them, such as {min(two)}" in answer.err


def test_a_metric_is_not_a_scorer(kvbench):
    """The message names the scorers of the metric."""
    answer = kvbench("run", "--method", "full", "--task", "niah", "--scorer", "string_match_all")
    assert "'string_match_all' is the metric of ruler-string-match-all@1: give its id." in answer.err
