"""Printed speeds: the cell of `kvbench bench` that is compared with each, and the verdict."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.bench.records import BenchCell, Median, Time
from kvbench.errors import DeviceLostError, UserError
from kvbench.reproduce import needs, speed
from kvbench.reproduce.claims import find_claims
from kvbench.reproduce.needs import look_around
from kvbench.reproduce.plan import ClaimPlan, Missing, SpeedRequest, plan_claim
from kvbench.reproduce.speed import TimedClaim, judge_speed, time_claim
from kvbench.runs.spec import MethodSpec


def one(claim: str) -> ClaimPlan:
    """The plan of the number of this id."""
    (found,) = find_claims(claim)
    return plan_claim(found)


def tiny(claim: str, **changes: object) -> ClaimPlan:
    """The same timed on two random layers at 64 tokens, on the CPU."""
    plan = one(claim)
    assert plan.timing is not None
    small = {"method": "knorm", "model": "random:two-layers", "length": 64, "batch": 1, "budget": None, "settings": ()}
    return replace(plan, timing=replace(plan.timing, **{**small, **changes}))


def test_a_throughput_is_of_the_batch_that_the_paper_ran():
    """ShadowKV at 122K: 24 sequences under a budget of 2048, the full cache 4."""
    asked = one("shadowkv:throughput/llama-3.1-8b/shadowkv/122k").timing
    assert asked == SpeedRequest(
        "shadowkv", "random:llama-3.1-8b", 124_928, 24, "step", "2048", ("chunk=8", "rank=160")
    )
    dense = one("shadowkv:throughput/llama-3.1-8b/full-attention/122k").timing
    assert dense is not None
    assert (dense.batch, dense.budget) == (4, None)


@pytest.mark.parametrize(("claim", "why"), [
    ("kivi:speed/llama-2-7b/kivi-2/throughput-most", "needs the batches and lengths of the measurement"),
    ("shadowkv:throughput/glm-4-9b-1m/shadowkv/60k", "kvbench has no architecture of GLM-4-9B-1M's shape"),
])
def test_what_cannot_be_timed_says_why(claim, why):
    """Missing are details that the paper does not give, and parts that kvbench does not have."""
    assert why in [x.why for x in one(claim).missing]


def test_without_a_gpu_no_speed_is_measured(monkeypatch):
    """Seconds of a CPU are nobody's claim."""
    monkeypatch.setattr(needs, "has_gpu", lambda: False)
    (plan,) = look_around([one("quest:latency/llama-2-7b/quest-1024/32k")])
    assert plan.missing == (Missing("GPU", "a speed is measured on a GPU, and this machine has none"),)
    assert judge_speed(plan, None).verdict == "not run"


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TimedClaim]:
    """A cell that was timed for a claim about milliseconds, and the folder that its job is in."""
    out = tmp_path_factory.mktemp("runs")
    found = time_claim(tiny("quest:latency/llama-2-7b/flashinfer-fp16/8k"), out)
    assert isinstance(found, TimedClaim)
    return out, found


@pytest.mark.slow
def test_a_speed_is_timed_once(timed, monkeypatch):
    """The same question again reads the file; another one does not."""
    out, found = timed
    plan = tiny("quest:latency/llama-2-7b/flashinfer-fp16/8k")
    monkeypatch.setattr("kvbench.bench.run.run_bench", lambda request: pytest.fail("timed again"))
    again = time_claim(plan, out)
    assert isinstance(again, TimedClaim)
    assert again.cell == found.cell
    with pytest.raises(pytest.fail.Exception, match="timed again"):
        time_claim(replace(plan, timing=replace(plan.timing, length=128)), out)


@pytest.mark.slow
def test_on_another_machine_a_speed_is_a_shape(timed):
    """In the unit of the table, with the regime."""
    _, found = timed
    judged = judge_speed(one("quest:latency/llama-2-7b/flashinfer-fp16/8k"), found)
    seconds = found.cell.times["step"].seconds
    assert judged.verdict == "shape only"
    assert judged.ours is not None
    assert judged.ours.value == pytest.approx(1e3 * seconds.median)
    assert judged.ours.ci95 == pytest.approx((1e3 * seconds.low, 1e3 * seconds.high))
    assert "two-layers" in judged.regime
    assert "64 tokens x 1, step timing" in judged.regime


@pytest.mark.slow
def test_on_the_paper_s_gpu_a_speed_is_partly_reproduced_at_most(timed, monkeypatch):
    """The code is another, whatever the number says."""
    _, found = timed
    plan = one("shadowkv:throughput/llama-3.1-8b/full-attention/60k")
    bench = found.bench
    where = bench.environment.model_copy(update={"gpu": "NVIDIA A100-SXM4-80GB"})
    gpu = bench.model_copy(update={"environment": where})
    rate = found.cell.tokens_per_s
    assert rate is not None
    far = judge_speed(plan, TimedClaim(found.cell.model_copy(update={"tokens_per_s": 1.0}), gpu))
    assert far.verdict == "not reproduced"
    near = judge_speed(plan, TimedClaim(found.cell.model_copy(update={"tokens_per_s": 160.93}), gpu))
    assert (near.verdict, near.differs[0]) == ("partly", speed.ENGINE)


@pytest.mark.slow
def test_a_factor_is_over_the_dense_cache_in_the_same_job(timed):
    """The ratio that the job itself gives."""
    _, found = timed
    judged = judge_speed(one("snapkv:speed/mistral-7b-v0.2/snapkv-1024/tokens-per-second-at-16k"), found)
    assert judged.ours is not None
    assert judged.ours.value == found.cell.times["step"].speedups["full"].median


def test_the_interval_of_a_throughput_is_that_of_the_time_per_token():
    """An answer's time has the prompt's, too, and varies with it."""
    token, answer = (Median(median=x, low=0.8 * x, high=y * x, n=5) for x, y in ((0.01, 1.25), (9.0, 1.5)))
    cell = BenchCell(
        method=MethodSpec(name="full", version="1", family="baseline", settings={}), budget=None, timing="end-to-end",
        length=64, batch=1, asked_batch="1", state="prefill", outcome="ok", tokens_per_s=100.0,
        times={"token": Time(seconds=token), "answer": Time(seconds=answer)},
    )
    ours = speed._number(one("shadowkv:throughput/llama-3.1-8b/full-attention/60k").claim, cell)
    assert ours is not None
    assert (ours.value, *ours.ci95) == pytest.approx((100.0, 80.0, 125.0))


def test_a_damaged_file_is_missing(tmp_path):
    """The file of one number, with its path; the other numbers are still timed."""
    plan = tiny("quest:latency/llama-2-7b/quest-512/8k")
    path = speed._job_file(plan, tmp_path)
    path.parent.mkdir(parents=True)
    path.write_text("{")
    found = time_claim(plan, tmp_path)
    assert isinstance(found, Missing)
    assert str(path) in found.why


def test_a_lost_gpu_ends_the_command(monkeypatch, tmp_path):
    """No later number can be timed by this process."""
    def lose(request: object) -> None:
        raise DeviceLostError("lost.")

    monkeypatch.setattr("kvbench.bench.run.run_bench", lose)
    with pytest.raises(DeviceLostError, match="lost"):
        time_claim(tiny("quest:latency/llama-2-7b/quest-512/8k"), tmp_path)


def test_what_fails_to_be_timed_is_missing(monkeypatch, tmp_path):
    """With the reason that the job gives."""
    def refuse(request: object) -> None:
        raise UserError("too long.")

    monkeypatch.setattr("kvbench.bench.run.run_bench", refuse)
    plan = tiny("quest:latency/llama-2-7b/quest-512/8k")
    found = time_claim(plan, tmp_path)
    assert found == Missing("run", "too long.")
    assert judge_speed(plan, found).missing == (found,)
