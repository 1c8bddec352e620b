"""The rule of docs/reproducing.md for calling a number reproduced, on numbers made by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbench.analysis.explain import measure
from kvbench.reproduce import verdict
from kvbench.reproduce.claims import Claim, find_claims
from kvbench.reproduce.plan import Missing, plan_claim
from kvbench.reproduce.verdict import Number, find_unanchored, judge

CLAIM = "kivi:longbench/mistral-7b-instruct-v0.2/kivi-2/trec"
"""71.00, as that of the 16-bit cache."""


def one(claim: str) -> Claim:
    """The number of this id."""
    (found,) = find_claims(claim)
    return found


def ran(mean: float | None, ci95: tuple[float, float] | None = None, **changes: Any) -> Any:
    """A run as far as a verdict looks at it: LongBench's TREC, bare, cut to 31,500 tokens, the question seen."""
    facts = {"length": 31_564, "sha": None, "visibility": "visible", "dtype": "bfloat16", "kind": "bits", **changes}
    return SimpleNamespace(folder=Path("runs/x"), result=SimpleNamespace(
        run_id="x", status="ok", error=None, score=SimpleNamespace(mean=mean, ci95=ci95), history="reference",
        visibility=facts["visibility"], budget=SimpleNamespace(kind=facts["kind"]),
        model=SimpleNamespace(dtype=facts["dtype"]),
        task=SimpleNamespace(name="longbench_trec", chat_template_sha=facts["sha"]),
        spec=SimpleNamespace(task=SimpleNamespace(length=facts["length"])),
    ))


def judged(run: Any, claim: str = CLAIM, beside: Any = None, **how: Any) -> verdict.Judgment:
    """The verdict on one run, and on a second one for the baseline."""
    plan = plan_claim(one(claim), **how)
    runs = dict.fromkeys(plan.requests, run)
    baseline = None
    if beside is not None:
        baseline = plan_claim(one(CLAIM.replace("kivi-2", "16bit")), **how)
        runs |= dict.fromkeys(baseline.requests, beside)
    return judge(plan, runs, baseline)


def test_reproduced_is_the_printed_value_in_the_interval():
    """71.00 in 95 % of 0.68 to 0.74."""
    found = judged(ran(0.71, (0.68, 0.74)))
    assert (found.verdict, found.differs) == ("reproduced", ())
    assert found.ours is not None
    assert found.ours.value == pytest.approx(71.0)
    assert found.ours.ci95 == pytest.approx((68.0, 74.0))


def test_a_run_that_failed_its_certificate_says_nothing():
    """Its answers have a mean, but it is no measurement of the method."""
    run = ran(0.71, (0.68, 0.74))
    run.result.status, run.result.error = "failed", "kivi acted in 0 of 20 samples"
    found = judged(run)
    assert (found.verdict, found.ours) == ("not run", None)
    assert [x.why for x in found.missing] == ["x has no score: kivi acted in 0 of 20 samples"]


def test_a_failed_run_moves_no_score():
    """Nor does what it is compared with: neither mean is of the method."""
    whole, failed = ran(0.71, (0.68, 0.74)), ran(0.5, (0.4, 0.6))
    failed.result.status = "failed"
    assert measure(whole, failed) is None
    assert measure(failed, whole) is None


@pytest.mark.parametrize(("low", "holds"), [(0.71, True), (0.71004, True), (0.7101, False)])
def test_half_a_unit_of_the_last_digit_is_given(low, holds):
    """71.00 may have been 71.0049."""
    assert judged(ran(0.72, (low, 0.74))).verdict == ("reproduced" if holds else "not reproduced")


def test_the_same_value_under_another_protocol_is_partly():
    """Each difference is named."""
    found = judged(ran(0.71, (0.68, 0.74), length=4096, visibility="hidden"))
    assert found.verdict == "partly"
    assert found.differs == (
        "truncation: 31500 in the paper, 4032 here", "visibility: visible in the paper, hidden here"
    )


def test_the_same_difference_to_the_dense_cache_is_partly(monkeypatch):
    """Both are 5 points above the paper's, and as far from each other as there."""
    monkeypatch.setattr(verdict, "_differ", lambda first, other, scale: Number(0.5, (-1.0, 2.0)))
    found = judged(ran(0.76, (0.74, 0.78)), beside=ran(0.76, (0.74, 0.78), kind="none"))
    assert (found.verdict, found.printed_difference) == ("partly", 0.0)
    monkeypatch.setattr(verdict, "_differ", lambda first, other, scale: Number(-3.0, (-4.0, -2.0)))
    found = judged(ran(0.76, (0.74, 0.78)), beside=ran(0.79, (0.77, 0.81), kind="none"))
    assert found.verdict == "not reproduced"


@pytest.mark.parametrize("how", [{"model": "mini"}, {"samples": 10}])
def test_another_model_or_a_part_of_the_samples_shows_a_shape_only(how):
    """However near the value is."""
    assert judged(ran(0.71, (0.68, 0.74)), **how).verdict == "shape only"


def test_a_number_that_nobody_here_has_read_is_not_reproduced():
    """The card's rule: read in a copy, it may be met, and no more."""
    claim = one("kvmerger:longbench/llama2-7b-chat/h2o-50/trec")
    plan = plan_claim(claim)
    found = judge(plan, {x: ran(0.63, (0.60, 0.66), length=4096, kind="stored") for x in plan.requests})
    assert (found.verdict, found.differs) == ("partly", ("the number was read in a copy of the paper",))


def test_a_corrected_number_is_what_is_compared():
    """PyramidKV prints 39.75 for cells that have a mean of 41.13."""
    claim = one("pyramidkv:longbench/mistral-7b-instruct-v0.2/fullkv/avg.")
    plan = plan_claim(claim)
    near = judge(plan, dict.fromkeys(plan.requests, ran(0.4113, (0.38, 0.44), kind="none", length=31_500)))
    assert near.verdict == "partly"  # a stop was missing there
    far = judge(plan, dict.fromkeys(plan.requests, ran(0.3975, (0.39, 0.40), kind="none", length=31_500)))
    assert far.verdict == "not reproduced"


def test_the_mean_of_several_runs_has_a_narrower_interval():
    """Sixteen independent runs of half width 4: 4 / sqrt(16) = 1."""
    plan = plan_claim(one("pyramidkv:longbench/mistral-7b-instruct-v0.2/fullkv/avg."))
    found = judge(plan, dict.fromkeys(plan.requests, ran(0.40, (0.36, 0.44), kind="none")))
    assert found.ours is not None
    assert found.ours.value == pytest.approx(40.0)
    assert found.ours.ci95 == pytest.approx((39.0, 41.0))


def test_what_was_not_run_says_what_is_missing():
    """A run that is not there, one that failed, weights without a meaning."""
    plan = plan_claim(one(CLAIM))
    assert judge(plan, {}).missing == (Missing("run", "1 of 1 runs are not finished"),)
    failed = ran(None)
    failed.result.error = "out of memory"
    assert judge(plan, dict.fromkeys(plan.requests, failed)).missing == (
        Missing("run", "x has no score: out of memory"),
    )
    random = judge(plan, {x: ran(None) for x in plan.requests})
    assert (random.verdict, random.missing[0].why) == ("not run", "x has no score: its weights are random")
    lacking = replace(plan, missing=(Missing("weights", "not here"),))
    assert judge(lacking, {}).missing == lacking.missing


def test_a_dense_cache_that_misses_by_a_point_anchors_nothing():
    """By paper, table and model."""
    far, near = judged(ran(0.74, (0.72, 0.76), kind="none"), CLAIM.replace("kivi-2", "16bit")), judged(
        ran(0.715, (0.70, 0.73), kind="none"), CLAIM.replace("kivi-2", "16bit")
    )
    assert find_unanchored([far, near]) == {("kivi", "longbench", "Mistral-7B-Instruct-v0.2"): pytest.approx(3.0)}
    assert find_unanchored([near]) == {}


def test_a_speed_anchors_nothing():
    """Its unit is no point: 50 tokens per second more than the paper's are no 50 points."""
    claim = one("shadowkv:throughput/llama-3.1-8b/full-attention/60k")
    base = replace(claim, table=claim.table.model_copy(update={"baseline": claim.row}))
    found = verdict.Judgment(base, "not reproduced", Number(claim.value + 50, (claim.value + 49, claim.value + 51)))
    assert find_unanchored([found]) == {}


def test_a_verdict_can_be_sent_on():
    """As JSON, with everything that a page needs."""
    document = judged(ran(0.71, (0.68, 0.74))).document
    assert document["id"] == CLAIM
    assert (document["printed"], document["verdict"], document["evidence"]) == (71.0, "reproduced", "verified")
    assert document["ours"] == {"value": pytest.approx(71.0), "ci95": pytest.approx([68.0, 74.0])}


@pytest.mark.parametrize(("ci95", "said"), [
    ((-4.0, -1.0), "moves as printed"), ((1.0, 4.0), "moves against the printed"),
    ((-1.0, 1.0), "no significant difference"),
])
def test_a_shape_says_which_way_the_score_moves(ci95, said):
    """The paper's fell by 2; ours fell, rose, or cannot be told from the full cache's."""
    difference = Number(sum(ci95) / 2, ci95)
    found = verdict.Judgment(one(CLAIM), "shape only", printed_difference=-2.0, difference=difference)
    assert found.direction == said
    assert replace(found, printed_difference=0.0).direction == ""
