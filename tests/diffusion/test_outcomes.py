"""How runs on a diffusion model end: killed and gone on with, failed, scored again, compared, swept."""

from __future__ import annotations

import json

import pytest

from kvbench.runs import batch

from .conftest import TOYS, read_lines


@pytest.mark.slow
@pytest.mark.parametrize("how", [["temperature=0.9"], ["remasking=random"]])
def test_a_run_that_was_killed_comes_to_the_same(kvbench, arguments, tmp_path, monkeypatch, how):
    """Also what is drawn: answers of a sample do not depend on those before it in the process."""
    options = [*arguments, "--method", "dkv-cache-decode", "--mode", "multi-turn", *(f"--gen={x}" for x in how)]
    whole = kvbench(*options).json
    wanted = [(x["sample"], x["turn"], x["ids"], x["score"]) for x in read_lines(tmp_path / "runs")]

    def stop(job, index, example, encoded):
        if index == 2:
            raise KeyboardInterrupt
        return fill(job, index, example, encoded)

    fill = batch.fill_sample
    options[options.index("--out") + 1] = tmp_path / "again"
    with monkeypatch.context() as patch:
        patch.setattr(batch, "fill_sample", stop)
        assert kvbench(*options).code == 130
    assert len(read_lines(tmp_path / "again")) == 2 * 3
    resumed = kvbench(*options).json
    assert [(x["sample"], x["turn"], x["ids"], x["score"]) for x in read_lines(tmp_path / "again")] == wanted
    assert (resumed["run_id"], resumed["score"]) == (whole["run_id"], whole["score"])


@pytest.mark.few
@pytest.mark.parametrize(("method", "how"), [
    (f"{TOYS}:Thoughtless", "max_new_tokens=8"), ("dkv-cache-decode", "max_new_tokens=2"),
    ("dkv-cache-decode", "threshold=0"),
])
def test_a_policy_that_never_acts_fails_its_run(kvbench, arguments, method, how):
    """Whether it is written so, or its canvas is filled by the full passes that begin a block."""
    answer = kvbench(*arguments, "--method", method, "--gen", how)
    assert answer.code == 1
    assert answer.json["status"] == "failed"
    assert "acted in 0 of 4 samples" in answer.json["error"]


@pytest.mark.few
@pytest.mark.parametrize(("how", "status"), [("threshold=0.9", "ok"), ("steps=8", "failed")])
def test_a_threshold_may_leave_a_sample_nothing_to_reuse(kvbench, arguments, how, status):
    """Where texts decide how many passes there are, acting in some samples is enough; the row still counts them."""
    result = kvbench(*arguments, "--method", f"{TOYS}:Moody", "--gen", how).json
    assert 0 < result["effect"]["n_acted"] < result["effect"]["n"] == 4
    assert result["status"] == status


@pytest.mark.slow
def test_a_sample_that_raises_is_failed_and_no_zero(kvbench, arguments, tmp_path):
    """The others stand; the first line of what was raised is in the journal, the traceback next to it."""
    answer = kvbench(*arguments, "--method", f"{TOYS}:Breaking", "--mode", "multi-turn", "--turns", "2")
    assert answer.code == 1
    result = answer.json
    assert (result["status"], result["n_failed"], result["score"]["mean"]) == ("failed", 1, None)
    assert result["score"]["partial_mean"] is not None
    lines = [x for x in read_lines(tmp_path / "runs") if x["index"] == 0]
    assert [x["error"] for x in lines] == [None, "ValueError: a bug (toys.py, line 116)"]
    assert "second line" in next((tmp_path / "runs").glob("*/errors.log")).read_text()


def test_random_weights_have_speed_and_no_score(kvbench, arguments, folder):
    """A diffusion model's architecture alone."""
    arguments[4] = f"random:{folder}"
    result = kvbench(*arguments, "--method", "fast-dllm-dual", "--gen", "block=4").json
    assert (result["status"], result["score"]["mean"], result["scores"]) == ("ok", None, {})
    assert result["diffusion"]["baselines"]["none"]["mean"] is None
    assert result["diffusion"]["baselines"]["none"]["speedup"] > 0


def test_a_sweep_runs_and_is_predicted(kvbench, arguments, folder, tmp_path):
    """A grid of policies and regimes; without a cache its time is measured first."""
    grid = tmp_path / "grid.toml"
    grid.write_text(f"""
        out = "{tmp_path / 'runs'}"
        [run]
        model = "{folder}"
        task = "{arguments[2]}"
        samples = 1
        device = "cpu"
        [[grid]]
        method = ["none", "fast-dllm-dual"]
        gen.block = [2, 4]
    """)
    dry = kvbench("sweep", grid, "--dry-run", "--json")
    assert (dry.code, (tmp_path / "runs").exists()) == (0, False), dry.err
    swept = kvbench("sweep", grid, "--json")
    assert swept.code == 0, swept.err
    assert [x["status"] for x in swept.json] == ["ok"] * 4


@pytest.mark.slow
def test_runs_are_scored_again_and_compared(kvbench, arguments, tmp_path):
    """As any other; a difference of regimes is said."""
    out = tmp_path / "runs"
    ids = [
        kvbench(*arguments, "--method", *options).json["run_id"]
        for options in (["none"], ["dkv-cache-decode"], ["none", "--gen", "steps=4"])
    ]
    again = kvbench("score", ids[1], "--scorer", "length@1", "--task", arguments[2], "--out", out, "--json")
    assert again.code == 0
    lines = [json.loads(x) for x in (out / ids[1] / "samples.jsonl").read_text().splitlines()]
    assert again.json["score"]["mean"] == pytest.approx(sum(len(x["prediction"]) / 8 for x in lines) / 4)
    compared = kvbench("compare", *ids[:2], "--out", out, "--json")
    assert (compared.code, compared.json["warnings"]) == (0, [])
    assert compared.json["regressions"][0]["full"] == ids[0]
    assert "spec.generation differs" in kvbench("compare", ids[0], ids[2], "--out", out).err


def test_a_policy_is_shown(kvbench):
    """Its card, its settings and their defaults; what it stores depends on its schedule, and runs measure it."""
    found = kvbench("show", "dkv-cache-decode", "--json").json
    assert "stored" not in found
    assert (found["kind"], found["models"], found["arxiv"]) == ("method", "diffusion", "2505.15781")
    assert {x["name"]: x["default"] for x in found["settings"]} == {"refresh": 8, "first": None, "shift": "un"}
