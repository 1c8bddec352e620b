"""The findings file, the journal of statistics, and verdicts."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.errors import UserError
from kvbench.hf import load_model
from kvbench.hf.tiny import tiny_model
from kvbench.registry import HERE
from kvbench.reproduce.findings import run
from kvbench.reproduce.findings.records import FindingsRecord
from kvbench.reproduce.findings.run import Plan, choose_findings, judge, make_text, measure, read_journal
from kvbench.reproduce.findings.statements import StatisticCheck, find_findings
from kvbench.runs.environment import find_environment
from kvbench.runs.spec import ModelSpec


@pytest.fixture(scope="module")
def model():
    """The bundled model."""
    return load_model("mini", dtype="float32")


def plan(name: str = "all", texts: int = 2) -> Plan:
    """A small plan."""
    return Plan(find_findings(name), texts, 384)


def test_every_finding_has_a_statistic_and_can_be_judged():
    """Names are unique, statistics exist."""
    names = [x.name for x in find_findings("all")]
    assert len(set(names)) == len(names) >= 18
    assert {x.statistic for x in find_findings("all")} == {*run.OBSERVERS, *run.PASSES}


def test_an_unknown_finding_suggests_one():
    """The nearest name."""
    with pytest.raises(UserError, match="Did you mean 'attention-sinks'"):
        find_findings("attention-sink")


def test_texts_differ_and_repeat(model):
    """The same index gives the same tokens."""
    assert make_text(model, 0, 300) == make_text(model, 0, 300) != make_text(model, 1, 300)
    assert len(make_text(model, 0, 300)) == 300


def test_an_interrupted_measurement_goes_on(model, tmp_path):
    """A killed process leaves half a line: only what is missing is measured, and the numbers are the same."""
    asked, journal = plan("page-bounds"), tmp_path / "runs" / "j.jsonl"
    first = list(measure(model, asked, journal))
    whole = journal.read_bytes()
    assert first == [(0, "page-bounds"), (1, "page-bounds")]
    assert list(measure(model, asked, journal)) == []
    journal.write_bytes(whole[: len(whole) * 3 // 4])
    assert list(measure(model, asked, journal)) == [(1, "page-bounds")]
    assert journal.read_bytes() == whole


def judge_one(model, folder):
    """The findings that can be measured on a model, on one short text."""
    asked = Plan(choose_findings("all", model), 1, 640)
    list(measure(model, asked, folder / "j.jsonl"))
    return judge(asked, read_journal(folder / "j.jsonl"))


def test_a_hybrid_model_has_the_findings_about_layers_of_two_kinds(tmp_path):
    """On prompts of a task; others assume that every query attends to all tokens before it."""
    model = load_model("mini-hybrid", dtype="float32")
    found = judge_one(model, tmp_path)
    assert [x.name for x in found] == [x.name for x in find_findings("all") if x.task is not None]
    assert all(math.isfinite(y.mean) for x in found for y in x.checks)
    with pytest.raises(UserError, match="mini-hybrid has sliding windows, and sparse-attention is not measured"):
        choose_findings("sparse-attention", model)


def test_a_finding_about_two_kinds_of_layers_needs_both(model):
    """In one line, on models that rotate in every layer; with sliding windows there is nothing to measure."""
    with pytest.raises(UserError, match="hybrid-keys compares layers that rotate keys with layers that do not"):
        choose_findings("hybrid-keys", model)
    with pytest.raises(UserError, match="has sliding windows"):
        choose_findings("all", tiny_model(window=16))


@pytest.mark.slow
def test_all_findings_are_judged_on_a_model(model, tmp_path):
    """Every check of every finding has a finite mean, and its statistic is there."""
    found = judge_one(model, tmp_path)
    assert {x.name for x in found} == {x.name for x in find_findings("all") if x.task is None}
    assert all(math.isfinite(y.mean) for x in found for y in x.checks)
    assert {x.verdict for x in found} <= {"holds", "does not hold", "undecided"}


@pytest.mark.parametrize(("check", "values", "verdict"), [
    (StatisticCheck(value="x", least=0.5), [0.6, 0.7, 0.8], "holds"),
    (StatisticCheck(value="x", least=0.5), [0.3, 0.7, 0.8], "undecided"),
    (StatisticCheck(value="x", least=0.5), [0.3, 0.2, 0.1], "does not hold"),
    (StatisticCheck(value="x", most=0.5), [0.3, 0.2, 0.1], "holds"),
    (StatisticCheck(value="x", most=0.5), [0.6, 0.7, 0.8], "does not hold"),
    (StatisticCheck(value="x", above="y"), [0.6, 0.7, 0.8], "holds"),
    (StatisticCheck(value="x", above="z"), [0.6, 0.7, 0.8], "does not hold"),
    (StatisticCheck(value="x", above="y"), [0.0, 0.0, 0.0], "does not hold"),
    (StatisticCheck(value="x", above="y"), [0.0, 0.7, 0.8], "undecided"),
    (StatisticCheck(value="x", above="y"), [0.6], "undecided"),
    (StatisticCheck(value="x", least=0.5), [0.6], "undecided"),
    (StatisticCheck(value="x", most=0.5), [0.6], "undecided"),
])
def test_a_check_by_hand(check, values, verdict):
    """The whole interval, a part of it, or none of it satisfies the bound."""
    texts = [{"x": x, "y": 0.0, "z": 1.0} for x in values]
    assert run._judge_check(check, texts).verdict == verdict


def test_one_text_agrees_with_no_other():
    """Its correlation with itself is 1."""
    found = run._judge_check(StatisticCheck(value="x", agreement=0.8), [{"x": [1.0, 2.0, 3.0]}])
    assert (found.mean, found.verdict) == (pytest.approx(1.0), "undecided")


def test_the_line_is_fitted_to_the_mean_curve():
    """Two texts are bent in opposite ways: their mean is a line, and drawing either text alone is not."""
    bent, other = [0.0, 1.0, 4.0, 9.0], [0.0, 3.0, 4.0, 3.0]
    check = StatisticCheck(value="x", linear=0.95)
    found = run._judge_check(check, [{"x": bent}, {"x": other}])
    assert found.mean == pytest.approx(1.0)
    assert found.texts == pytest.approx((225 / 245, 25 / 45))
    assert found.ci95[0] == pytest.approx(25 / 45)
    assert found.verdict == "undecided"
    assert run._judge_check(check, [{"x": [1.0, 2.0, 3.0]}, {"x": [2.0, 4.0, 6.0]}]).verdict == "holds"
    assert run._judge_check(check, [{"x": other}, {"x": other}]).verdict == "does not hold"


def test_agreement_between_texts_by_hand():
    """Equal orders of layers agree by 1, reversed ones by -1."""
    same = [{"x": [1.0, 2.0, 3.0]}, {"x": [2.0, 4.0, 8.0]}]
    other = [{"x": [1.0, 2.0, 3.0]}, {"x": [8.0, 4.0, 2.0]}]
    check = StatisticCheck(value="x", agreement=0.8)
    assert run._judge_check(check, same).mean == pytest.approx(1.0)
    assert run._judge_check(check, other).mean == pytest.approx(-1.0)


def test_a_check_has_one_rule():
    """Two bounds are refused."""
    with pytest.raises(ValueError, match="exactly one"):
        StatisticCheck(value="x", least=0.1, most=0.2)


@given(st.binary(max_size=200))
def test_any_journal_is_read(tmp_path_factory, data):
    """Damaged lines are left out and cut off; what was whole before them is kept."""
    path = tmp_path_factory.getbasetemp() / "journal.jsonl"
    good = json.dumps({"text": 0, "statistic": "s", "values": {"x": 1.0}}).encode() + b"\n"
    path.write_bytes(good + data)
    assert read_journal(path)[0]["s"] == {"x": 1.0} or b"statistic" in data
    assert path.read_bytes().startswith(good)


@pytest.mark.parametrize("name", ["smollm2-135m-q4_1", "mini-hybrid"])
def test_the_page_has_the_numbers_of_the_record(name):
    """Every check of results/shape with its mean, interval and verdict stands in docs/findings.md."""
    root = HERE.parent
    record = FindingsRecord.model_validate_json((root / f"results/shape/{name}.json").read_text())
    page = (root / "docs/findings.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    for finding in record.findings:
        assert any(f"`{finding.name}`: {finding.statement}" in x for x in rows)
        for check in finding.checks:
            low, high = check.ci95
            cell = f"`{check.rule}` | {check.mean:.3f} [{low:.3f}, {high:.3f}]"
            assert any(cell in x and check.verdict in x for x in rows), check.rule
    measured = {x.name for x in record.findings}
    assert [x.name for x in record.findings] == [x.name for x in find_findings("all") if x.name in measured]


def test_the_page_compares_both_real_models():
    """Every check of both records with its mean, interval and verdict, in one row."""
    root = HERE.parent
    small, large = (
        FindingsRecord.model_validate_json((root / f"results/shape/{name}.json").read_text())
        for name in ("smollm2-135m-q4_1", "qwen2.5-coder-1.5b-q4_k_m")
    )
    rows = (root / "docs/findings.md").read_text().splitlines()
    for ours, theirs in zip(small.findings, large.findings, strict=True):
        for checks in zip(ours.checks, theirs.checks, strict=True):
            cells = [f"{x.mean:.3f} [{x.ci95[0]:.3f}, {x.ci95[1]:.3f}] {x.verdict}" for x in checks]
            assert any(f"`{checks[0].rule}` | {' | '.join(cells)} |" in x for x in rows), checks[0].rule


def test_a_record_takes_newer_findings_of_the_same_texts(model, tmp_path):
    """A finding that was measured again replaces its part; another length is refused."""
    environment = find_environment("cpu", started="2026-11-23T00:00:00+00:00", seconds=0.0)

    def record(name, length=384):
        asked = Plan(find_findings(name), 1, length)
        journal = tmp_path / f"{length}.jsonl"
        list(measure(model, asked, journal))
        return FindingsRecord(
            version=1, model=ModelSpec.of(model), texts=1, length=length, data="d", environment=environment,
            findings=judge(asked, read_journal(journal)),
        )

    first, other = record("page-bounds"), record("sparse-attention")
    both = first.renew(other)
    assert [x.name for x in both.findings] == ["page-bounds", "sparse-attention"]
    assert both.renew(other) == both
    assert both.renew(record("page-bounds", 448)) is None


def test_the_command_measures_and_resumes(kvbench, monkeypatch, tmp_path):
    """One finding on one text; run again it measures nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "LENGTH", 384)
    arguments = ("reproduce", "--shape", "sparse-attention", "--model", "mini", "--samples", "1", "--json")
    first, again = kvbench(*arguments), kvbench(*arguments)
    assert first.code == again.code == 0
    assert "text 1 of 1" in first.err and "text 1 of 1" not in again.err
    assert first.json["findings"] == again.json["findings"]
    assert not (tmp_path / "results").exists()  # only `all` makes a record


@pytest.mark.slow
def test_one_finding_on_all_texts_goes_into_the_record(kvbench, monkeypatch, tmp_path):
    """Next to the others of the same texts; a record of other texts stays as it is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "LENGTH", 384)
    monkeypatch.setattr(run, "TEXTS", 1)
    path = tmp_path / "results" / "shape" / "mini.json"
    first = kvbench("reproduce", "--shape", "sparse-attention", "--model", "mini", "--json")
    assert not path.exists()
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(first.json))
    kvbench("reproduce", "--shape", "page-bounds", "--model", "mini")
    names = [x["name"] for x in json.loads(path.read_text())["findings"]]
    assert names == ["sparse-attention", "page-bounds"]
    whole = path.read_text()
    monkeypatch.setattr(run, "LENGTH", 400)
    answer = kvbench("reproduce", "--shape", "page-bounds", "--model", "mini")
    assert "is of other weights, texts or statistics and stays as it is" in answer.out
    assert path.read_text() == whole


def test_fewer_texts_do_not_replace_a_record(kvbench, monkeypatch, tmp_path):
    """Of `all`, too; a record of fewer texts is replaced."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "LENGTH", 384)
    monkeypatch.setattr(run, "choose_findings", lambda *_: find_findings("sparse-attention"))
    path = tmp_path / "results" / "shape" / "mini.json"
    for texts, held in ((1, 1), (2, 2), (1, 2)):
        answer = kvbench("reproduce", "--shape", "all", "--model", "mini", "--samples", str(texts))
        assert json.loads(path.read_text())["texts"] == held
    assert "is of 2 texts and stays as it is" in answer.out


def test_the_record_of_a_model_of_the_hub_has_no_slash(kvbench, model, monkeypatch, tmp_path):
    """Its id has one, which would be a folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "LENGTH", 384)
    monkeypatch.setattr(run, "choose_findings", lambda *_: find_findings("sparse-attention"))
    monkeypatch.setattr("kvbench.hf.load_model", lambda _: replace(model, id="ORG/NAME"))
    answer = kvbench("reproduce", "--shape", "all", "--model", "ORG/NAME", "--samples", "1")
    assert answer.code == 0, answer.err
    record = json.loads((tmp_path / "results" / "shape" / "ORG-NAME.json").read_text())
    assert record["model"]["id"] == "ORG/NAME"


def test_the_journal_of_a_model_in_a_folder_lies_below_out(kvbench, model, monkeypatch, tmp_path):
    """Its id is a path, which begins at the root."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "LENGTH", 384)
    monkeypatch.setattr("kvbench.hf.load_model", lambda _: replace(model, id=str(tmp_path / "models" / "mini")))
    arguments = ("--shape", "sparse-attention", "--model", tmp_path / "models" / "mini", "--samples", "1")
    answer = kvbench("reproduce", *arguments, "--out", tmp_path / "runs")
    assert answer.code == 0, answer.err
    (journal,) = tmp_path.rglob("*.jsonl")
    assert journal.parent == tmp_path / "runs" / "findings"
