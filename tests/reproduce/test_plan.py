"""From a number to runs: the paper's own protocol where kvbench has it, and every missing ingredient by name."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from types import SimpleNamespace

import pytest

from kvbench.hf import ModelSize, predict_memory
from kvbench.reproduce import needs
from kvbench.reproduce.claims import Claim, find_claims
from kvbench.reproduce.needs import look_around
from kvbench.reproduce.plan import Missing, find_baseline, plan_claim, with_baselines

QASPER = "snapkv:longbench/mistral-7b-v0.2/snapkv-1024/qasper"


def one(claim: str) -> Claim:
    """The number of this id."""
    (found,) = find_claims(claim)
    return found


def test_a_number_is_asked_as_the_paper_asked_it():
    """SnapKV's Qasper: 200 rows cut to 31,500 tokens next to an answer of 128, half precision, its own window."""
    (request,) = plan_claim(one(QASPER)).requests
    assert (request.method, request.budget, request.task) == ("snapkv", "1024", "longbench_qasper")
    assert (request.model, request.dtype) == ("mistralai/Mistral-7B-Instruct-v0.2", "float16")
    assert (request.samples, request.length, request.visibility) == (200, 31_500 + 128, "visible")
    assert request.method_settings == ("window=32", "kernel=7", "pool=max")
    assert request.suite == "longbench-16@1"


@pytest.mark.parametrize(("claim", "template"), [
    (QASPER, "none"), ("pyramidkv:remeasured-2026/after-kv-head/snapkv/mf-en", "own"),
    ("kivi:longbench/mistral-7b-instruct-v0.2/kivi-2/trec", "own"),
])
def test_a_paper_that_has_no_template_is_run_without(claim, template):
    """SnapKV's LongBench; a paper with one, or that does not say, has the model's own."""
    (request,) = plan_claim(one(claim)).requests
    assert request.template == template


def test_a_mean_is_of_the_runs_that_its_cells_are():
    """The 16 runs of PyramidKV's last column are those of the 16 columns before it: nothing is run twice."""
    claims = find_claims("pyramidkv:longbench/llama-3-8b-instruct/fullkv")
    *cells, mean = (plan_claim(x).requests for x in claims)
    assert len(mean) == 16
    assert set(mean) == {x for requests in cells for x in requests}


def test_columns_of_several_tasks_and_lengths():
    """SCBench's categories are 3, 4, 3 and 2 tasks; RULER's lengths are 13 tasks each, their mean all 78."""
    claims = find_claims("scbench:multi-turn/llama-3.1-8b/kivi/retr.string")
    (plan,) = (plan_claim(x) for x in claims)
    assert [x.task for x in plan.requests] == ["scbench_kv", "scbench_prefix_suffix", "scbench_vt"]
    assert {(x.mode, x.visibility, x.turns) for x in plan.requests} == {("multi-turn", "first-turn", 5)}
    by_column = {x.column: plan_claim(x).requests for x in find_claims("ruler:readme/llama3.1-8b")}
    assert {column: len(requests) for column, requests in by_column.items()} == {
        **dict.fromkeys(("4K", "8K", "16K", "32K", "64K", "128K"), 13), "Avg.": 78
    }
    assert {x.length for x in by_column["8K"]} == {8192}


def test_a_difference_is_to_the_row_that_the_table_names():
    """The same model's and column's, and it is run too."""
    claim = one(QASPER)
    baseline = find_baseline(claim)
    assert baseline is not None
    assert (baseline.row, baseline.printed) == ("All KV", 33.06)
    assert with_baselines([claim]) == [baseline, claim]
    assert find_baseline(baseline) is None
    decode = one("dkv-cache:llada/llada-8b-instruct/dkv-decode/gsm8k")
    assert getattr(find_baseline(decode), "row", None) == "base confidence"


def test_another_model_or_fewer_samples_is_not_the_claim():
    """Whole is the paper's model with all samples; more samples than there are change nothing."""
    claim = one(QASPER)
    assert plan_claim(claim).whole
    assert not plan_claim(claim, model="mini").whole
    fewer = plan_claim(claim, samples=10)
    assert (fewer.whole, [x.samples for x in fewer.requests]) == (False, [10])
    assert plan_claim(claim, samples=1000) == plan_claim(claim)


@pytest.mark.parametrize("claim", [
    "quest:latency/llama-2-7b/quest-1024/32k", "snapkv:speed/mistral-7b-v0.2/snapkv-1024/context-on-one-a100-80gb",
])
@pytest.mark.parametrize("options", [{"model": "mini"}, {"samples": 2}])
def test_speeds_and_bytes_are_not_planned_for_another_model(claim, options):
    """They are the paper's model's, whatever is asked; without the options they are planned."""
    assert not plan_claim(one(claim)).missing
    plan = plan_claim(one(claim), **options)
    assert [x.why for x in plan.missing] == [
        "--model and --samples change runs of scores, and this number is a speed or follows from shapes"
    ]
    assert (plan.timing, plan.prediction) == (None, None)


@pytest.mark.parametrize(("claim", "what", "why"), [
    ("longctx-bench:longbench/llama-3-8b-instruct/llmlingua-2-2x/code", "method",
     "method llmlingua-2 is not in kvbench"),
    ("dkv-cache:llada/llada-8b-instruct/dkv-decode/mbpp", "task", "needs a sandbox for model-generated code"),
    ("razor-attention:longbench/qwen1.5-7b-chat/h2o/avg.", "task", "needs the names of the averaged tasks"),
    ("zipcache:gsm8k/mistral-7b/zipcache/gsm8k", "checkpoint", "needs the name of the checkpoint"),
])
def test_what_kvbench_lacks_is_named(claim, what, why):
    """And there is nothing to run."""
    plan = plan_claim(one(claim))
    assert plan.missing == (Missing(what, why),)
    assert plan.requests == ()


@pytest.mark.slow
def test_weights_and_data_that_are_not_here_are_missing():
    """Without a network and an empty cache; the memory is predicted all the same, from the shape."""
    (plan,) = look_around([plan_claim(one(QASPER))])
    assert [x.what for x in plan.missing] == ["data", "weights"]
    shape = predict_memory("random:llama-3.1-8b", "float16")
    dense = replace(shape.shape, length=31_628).full_bytes
    assert plan.predicted_bytes == shape.weight_bytes + dense


@pytest.mark.slow
def test_a_large_model_needs_a_gpu_and_room(monkeypatch):
    """On a CPU it is not begun; on a GPU with too little memory neither."""
    claim = one("ruler:readme/llama3.1-8b/full/4k")
    plan = plan_claim(claim)
    plan = replace(plan, requests=plan.requests[2:3])  # niah_single_1, which has no data
    monkeypatch.setattr(needs, "_predict", lambda model, dtype: llama())
    monkeypatch.setattr("kvbench.runs.prepare.find_device", lambda request: "cpu")
    assert [x.what for x in look_around([plan])[0].missing] == ["GPU"]
    monkeypatch.setattr("kvbench.runs.prepare.find_device", lambda request: "cuda")
    monkeypatch.setattr("kvbench.machine.free_bytes", lambda device: 16 * 10**9)
    (missing,) = look_around([plan])[0].missing
    assert missing == Missing("memory", (
        "meta-llama/Meta-Llama-3.1-8B-Instruct needs about 16.6 GB for weights and a full cache, and 16.0 GB are free "
        "on cuda"
    ))
    monkeypatch.setattr("kvbench.machine.free_bytes", lambda device: 24 * 10**9)
    assert look_around([plan])[0].missing == ()


def llama() -> ModelSize:
    """Of Llama 3.1 8B."""
    return predict_memory("random:llama-3.1-8b", "bfloat16")


@pytest.mark.parametrize(("endpoint", "proxies", "reached", "offline"), [
    ("https://hub.example", {}, [("hub.example", 443)], False),
    ("http://hub.example", {}, [("hub.example", 80)], False),
    ("http://hub.example:8000/hub", {}, [("hub.example", 8000)], False),
    ("http://hub.example:port", {}, [], True),
    ("https://away.example", {}, [("away.example", 443)], True),
    ("https://away.example", {"https_proxy": "http://proxy.example:3128"}, [], False),
    ("https://away.example", {"https_proxy": "http://proxy.example:3128", "no_proxy": "away.example"},
     [("away.example", 443)], True),
])
def test_the_hub_is_looked_for_where_its_client_does(monkeypatch, capsys, endpoint, proxies, reached, offline):
    """A mirror without encryption has another port, and a proxy reaches what this machine does not."""
    def connect(address, timeout):
        asked.append(address)
        if address[0] == "away.example":
            raise OSError("no route")
        return SimpleNamespace(close=lambda: None)

    asked: list[tuple[str, int]] = []
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "")  # restored after the test
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    for name, value in proxies.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(socket, "create_connection", connect)
    needs._reach_hub()
    assert asked == reached
    assert ("HF_HUB_OFFLINE" in os.environ, "cannot be reached" in capsys.readouterr().err) == (offline, offline)


def test_each_thing_is_looked_for_once(monkeypatch):
    """Sixteen tasks of one model ask for its weights once."""
    asked = []
    monkeypatch.setattr(needs, "_predict", lambda model, dtype: asked.append(model) or llama())
    look_around([plan_claim(x) for x in find_claims("kivi:longbench/mistral-7b-instruct-v0.2/kivi-2")])
    assert asked == ["mistralai/Mistral-7B-Instruct-v0.2"]
