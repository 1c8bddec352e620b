"""Findings: statements that can fail, judged by tests worked out by hand; and the record that is kept of them."""

from __future__ import annotations

import gzip
import shutil
from itertools import product
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest

from kvbench.analysis.significance import adjust, find_margin_p, flip_signs
from kvbench.cli.findings import check_findings
from kvbench.errors import UserError
from kvbench.reproduce.findings import statements
from kvbench.reproduce.shape import (
    Compared,
    Comparison,
    Finding,
    FindingsFile,
    Finished,
    ShapeRecord,
    decide,
    find_findings,
    read_shape,
    split,
)
from kvbench.runs.files import read_file
from kvbench.runs.request import check
from kvbench.toml import read_toml

CURATED = Path(__file__).parents[2] / "results" / "cpu-2-cores"
RECORD = Path(__file__).parent.parent.parent / "results" / "shape" / "findings.json"
SEVEN = {
    "later-turns", "hidden-question", "low-precision", "merging", "retrieval-heads", "delayed-cache", "window-scores",
}


def run(scores: list[list[float]], ratio: float = 0.25, beside: float | None = None) -> Any:
    """A finished run with these scores by context and turn, holding a share of the bytes."""
    denoising = None if beside is None else SimpleNamespace(baselines={"none": SimpleNamespace(score=beside)})
    lines = [
        SimpleNamespace(sample=f"s{i}", turn=turn, prompt_hash=f"h{i}", score=score, denoising=denoising)
        for i, turns in enumerate(scores) for turn, score in enumerate(turns)
    ]
    memory = SimpleNamespace(stored_bytes=ratio * 500, off_device_bytes=ratio * 500, full_bytes=1000)
    result = SimpleNamespace(memory=memory, method=SimpleNamespace(family="eviction"))
    return SimpleNamespace(result=result, lines=lines)


def finding(*comparisons: Comparison) -> Finding:
    """A finding of these."""
    return Finding(name="x", source="s", arxiv="a", statement="t", comparisons=list(comparisons))


def outcome(comparison: Comparison, **runs: Any) -> Compared:
    """The verdict of one comparison."""
    (record,) = decide([finding(comparison)], runs)
    assert record.verdict == record.comparisons[0].verdict
    return record.comparisons[0]


def test_the_seven_findings_are_registered_and_can_be_run():
    """Every run that they name is one that kvbench takes, and each is of a bundled model."""
    found = read_shape()
    assert {x.name for x in found.finding} >= SEVEN
    requests = found.requests(found.finding)
    assert set(requests) == set(found.runs)
    for request in requests.values():
        check(request)
    assert {x.model for x in requests.values()} == {"mini", "mini-diffusion"}


def test_runs_are_shared():
    """A run that two findings need is made once, and both sides of a comparison see the same questions."""
    found = read_shape()
    sides = [x for y in found.finding for z in y.comparisons for x in (z.more, z.less)]
    assert len(found.requests(found.finding)) < len(sides)
    for comparison in (x for y in found.finding for x in y.comparisons):
        more, less = (found.requests(found.finding)[split(x)[0]] for x in (comparison.more, comparison.less))
        asked = [(x.task, x.samples, x.length, x.turns, x.seed, x.model) for x in (more, less)]
        assert asked[0] == asked[1]


def test_a_difference_above_what_was_said_holds():
    """Ten contexts, all 0.5 apart: p is 2 of the 2**10 signs for 0, and forty are enough for 0.1."""
    ten = outcome(Comparison(more="a", less="b", by=0.0), a=run([[1.0]] * 10), b=run([[0.5]] * 10))
    assert (ten.p, ten.verdict) == (pytest.approx(2 / 2**10), "holds")
    forty = outcome(Comparison(more="a", less="b", by=0.1), a=run([[1.0]] * 40), b=run([[0.5]] * 40))
    assert (forty.p, forty.verdict) == (find_margin_p([0.5] * 40, 0.1), "holds")
    assert (forty.mean_more, forty.mean_less) == (1.0, 0.5)


def test_a_difference_without_variance_has_an_interval():
    """Of 40 contexts that agree, up to 1 - 0.025 ** (1 / 40) may differ, by as much as scores allow."""
    found = outcome(Comparison(more="a", less="b", by=0.1), a=run([[1.0]] * 40), b=run([[1.0]] * 40))
    assert found.ci95 == pytest.approx((-(1 - 0.025 ** (1 / 40)), 1 - 0.025 ** (1 / 40)))


def test_no_difference_refutes_one_that_was_said():
    """Equal scores are significantly less than 0.1 apart: the statement can fail."""
    found = outcome(Comparison(more="a", less="b", by=0.1), a=run([[1.0]] * 100), b=run([[1.0]] * 100))
    assert found.verdict == "does not hold"


def test_falling_behind_by_less_can_be_said_too():
    """Equal scores hold that one is behind by less than 0.05; being behind by 0.5 refutes it."""
    near = Comparison(more="a", less="b", by=-0.05)
    assert outcome(near, a=run([[1.0]] * 160), b=run([[1.0]] * 160)).verdict == "holds"
    assert outcome(near, a=run([[0.5]] * 160), b=run([[1.0]] * 160)).verdict == "does not hold"


def test_contexts_without_a_loss_do_not_exclude_rare_losses():
    """If 5 % of answers are lost, none of 30 is lost with probability 0.21."""
    near = Comparison(more="a", less="b", by=-0.05)
    found = outcome(near, a=run([[1.0]] * 30), b=run([[1.0]] * 30))
    assert found.p >= 0.95**30 and found.verdict == "undecided"


def test_few_contexts_decide_nothing():
    """Four contexts: 2 of 16 signs are 0.125, however far apart they are."""
    sides = {"a": run([[1.0]] * 4), "b": run([[0.0]] * 4)}
    found = outcome(Comparison(more="a", less="b", by=0.0), **sides)
    assert (found.p, found.verdict) == (0.125, "undecided")
    assert outcome(Comparison(more="a", less="b", by=0.1), **sides).verdict == "undecided"


def test_scores_that_are_no_shares_are_refused():
    """Nothing is known of a margin between scores without bounds."""
    with pytest.raises(UserError, match="scores outside 0 to 1"):
        outcome(Comparison(more="a", less="b", by=0.1), a=run([[31.0]] * 9), b=run([[12.0]] * 9))


def test_all_comparisons_are_adjusted_together():
    """Twenty of p = 2/2**10 come to 0.039 each by Holm; thirty to 0.059, which decides nothing."""
    for count, verdict in ((20, "holds"), (30, "undecided")):
        one = finding(*[Comparison(more="a", less="b", by=0.0)] * count)
        (record,) = decide([one], {"a": run([[1.0]] * 10), "b": run([[0.5]] * 10)})
        assert {x.verdict for x in record.comparisons} == {verdict}
        assert record.comparisons[0].p_adjusted == pytest.approx(count * 2 / 2**10)


def test_a_finding_holds_where_all_of_it_does():
    """One refuted comparison refutes it; one that is open leaves it open."""
    good, bad = Comparison(more="a", less="b", by=0.1), Comparison(more="b", less="a", by=0.1)
    runs = {"a": run([[1.0]] * 40), "b": run([[0.5]] * 40), "c": run([[1.0]] * 20 + [[0.0]] * 20)}
    noise = Comparison(more="c", less="b", by=0.0)
    outcomes = [decide([finding(*x)], runs)[0].verdict for x in ((good,), (good, bad), (good, noise), (noise, bad))]
    assert outcomes == ["holds", "does not hold", "undecided", "does not hold"]


def test_the_unit_is_the_context():
    """Five equal turns are one difference: four contexts stay four."""
    found = outcome(Comparison(more="a", less="b", by=0.0), a=run([[1.0] * 5] * 4), b=run([[0.0] * 5] * 4))
    assert (len(found.contexts), found.p) == (4, 0.125)


def test_parts_of_a_run():
    """All turns, the first, the later ones, and the same job without a cache."""
    runs = {"a": run([[1.0, 0.5, 0.0]] * 10, beside=0.75), "b": run([[0.0, 0.0, 0.0]] * 10)}
    means = {
        part: outcome(Comparison(more=f"a{part}", less="b", by=0.0), **runs).mean_more
        for part in ("", "/first", "/later", "/none")
    }
    assert means == {"": 0.5, "/first": 1.0, "/later": 0.25, "/none": 0.75}


def test_more_bytes_make_a_comparison_at_equal_bytes_void():
    """2 % more are let pass, 10 % are not."""
    equal = Comparison(more="a", less="b", by=0.0, equal_bytes=True)
    runs = {"b": run([[0.5]] * 10, 0.25)}
    verdicts = [outcome(equal, a=run([[1.0]] * 10, x), **runs).verdict for x in (0.20, 0.255, 0.275)]
    assert verdicts == ["holds", "holds", "undecided"]


@pytest.mark.parametrize("unknown", ["more", "less"])
def test_bytes_that_were_not_measured_are_not_equal(unknown):
    """As those of an answer that no store counted."""
    sides = {"more": run([[1.0]] * 9), "less": run([[0.0]] * 9)}
    stated = Comparison(more="more", less="less", by=0.0, equal_bytes=True)
    assert outcome(stated, **sides).verdict == "holds"
    sides[unknown].result.memory = None
    assert outcome(stated, **sides).verdict == "undecided"


def test_a_journal_that_lacks_a_turn_is_refused(tmp_path):
    """The context would be averaged over the others."""
    source = next(CURATED.glob("snapkv-niah*"))
    shutil.copy(source / "result.json", tmp_path)
    lines = gzip.decompress((source / "samples.jsonl.gz").read_bytes()).splitlines(keepends=True)
    (tmp_path / "samples.jsonl").write_bytes(b"".join(lines))
    assert len(Finished.load(tmp_path).lines) == len(lines)
    (tmp_path / "samples.jsonl").write_bytes(b"".join(lines[:-1]))
    with pytest.raises(UserError, match=f"has {len(lines) - 1} answers about .* its result states {len(lines)} about"):
        Finished.load(tmp_path)


def test_other_questions_cannot_be_compared():
    """A context that only one of them was asked about."""
    with pytest.raises(UserError, match="have different questions"):
        outcome(Comparison(more="a", less="b", by=0.1), a=run([[1.0]] * 10), b=run([[1.0]] * 9))


@pytest.mark.parametrize(("text", "said"), [
    ('more = "c", less = "b", by = 0.1', "'c' is no run of the file"),
    ('more = "a/last", less = "b", by = 0.1', "'a/last' is no run of the file, or no part of one"),
    ('more = "a", less = "b"', "by is missing"),
])
def test_a_file_with_a_finding_that_cannot_be_tested_is_refused(tmp_path, text, said):
    """Where a run, a part or a number is missing."""
    path = tmp_path / "shape.toml"
    path.write_text(
        '[run]\ntask = "niah"\n[runs]\na = { method = "full" }\nb = { method = "full" }\n[[finding]]\nname = "x"\n'
        f'source = "s"\narxiv = "a"\nstatement = "t"\ncomparisons = [{{ {text} }}]\n'
    )
    with pytest.raises(UserError) as error:
        read_toml(path, FindingsFile, "findings file", "")
    assert said in str(error.value)


def test_a_finding_is_found_by_name():
    """One, all, or the nearest name."""
    found = read_shape()
    assert [x.name for x in find_findings(found, "merging")] == ["merging"]
    assert len(find_findings(found, "all")) == len(found.finding)
    with pytest.raises(UserError, match="Did you mean 'merging'"):
        find_findings(found, "mergin")


@pytest.mark.skipif(not RECORD.exists(), reason="nothing is recorded")
def test_what_is_recorded_follows_from_its_own_numbers():
    """p-values, Holm's adjustment, verdicts: made again from the differences by context that stand in the record."""
    record = read_file(RECORD, ShapeRecord)
    assert [(x.name, x.statement) for x in record.findings] == [(x.name, x.statement) for x in read_shape().finding]
    comparisons = [x for finding in record.findings for x in finding.comparisons]
    for x in comparisons:
        assert fmean(x.contexts) == pytest.approx(x.mean_more - x.mean_less)
        assert x.p == pytest.approx(find_margin_p(x.contexts, x.by) if x.by else flip_signs(x.contexts))
        assert x.ci95[0] <= fmean(x.contexts) <= x.ci95[1]
    assert [x.p_adjusted for x in comparisons] == pytest.approx(adjust([x.p for x in comparisons]))
    for x, side in product(comparisons, ("more", "less")):
        assert split(getattr(x, side))[0] in record.runs
    assert {x.id for x in record.models} == {"mini", "mini-diffusion"}
    assert record.environment.cpu


def test_a_name_of_both_kinds_of_findings_means_that_on_runs(monkeypatch, tmp_path):
    """Without a model; with one it means the finding on texts."""
    both = {x.name for x in read_shape().finding} & {x.name for x in statements.find_findings("all")}
    assert both == {"retrieval-heads"}
    asked: list[str] = []
    monkeypatch.setattr(
        "kvbench.cli.sweep.show_prediction", lambda cells, workers, as_json: asked.extend(x.name for x in cells) or 0
    )
    assert check_findings("retrieval-heads", None, tmp_path, dry_run=True, as_json=False) == 0
    assert asked == ["razor-hidden", "full-hidden", "streaming-hidden"]
