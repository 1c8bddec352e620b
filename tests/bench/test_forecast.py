"""What is told before anything runs: held against the ledger of runs, and against numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.bench.forecast import COPY_SHARE, GPUS, LATER, Need, make_plan, read_budget
from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf import load_model, predict_memory
from kvbench.method import BudgetKind
from kvbench.registry import find_method, list_entries

LENGTH, BATCH, STEPS = 256, 2, 4
METHODS = [x.name for x in list_entries("method") if x.models == "autoregressive"]
PROFILED = {"duo-attention", "razor-attention"}
"""They look at every head of the model first."""
COMPOSED = ["snapkv+adakv", "snapkv+kivi"]


@pytest.fixture(scope="module")
def mini():
    """The bundled model."""
    return load_model("mini")


def needed(model, name, budget="50%", length=LENGTH):
    """A method's need on a bundled model."""
    made = find_method(name)().bind(model)
    return Need(predict_memory("mini", length=length), made.fit(read_budget(budget, made), model.shape(length)))


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.slow) if x in PROFILED else x for x in METHODS + COMPOSED]
)
def test_what_is_predicted_is_what_the_ledger_measures(mini, name):
    """Bytes after compression are a method's own account, but for a word or two; what is an upper bound is one."""
    need = needed(mini, name)
    ids = torch.randint(4096, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    with Session(mini, need.method, capacity=LENGTH + LATER) as session:
        session.prefill(ids)
        with session.fork() as fork:
            fork.answer(STEPS + 1, stop=frozenset())
            read = sum(store.read_bytes() for store in fork.layers)
        memory = session.memory()
    assert abs(memory.stored_bytes - BATCH * need.cache) <= 0.001 * memory.stored_bytes
    assert memory.host_bytes == BATCH * need.method.declared_host_bytes(need.model.shape)
    assert memory.spare_bytes <= BATCH * need.tail
    assert memory.peak_bytes <= BATCH * need.rows_while_running
    declared, later = need.step_bytes(BATCH) - need.model.step_bytes, STEPS * BATCH * need.tail // LATER
    least = 0.5 if need.method.card.budget is BudgetKind.READ else 0.999  # what is found again is not read again
    assert least * declared <= read <= declared + later + 0.002 * declared


def test_a_floor_by_hand():
    """Llama-3.1-8B at 131,072 tokens on an H200: all weights but a table, and 128 KiB a token, at 0.9 x 4.8 TB/s."""
    plan = make_plan("random:llama-3.1-8b", ["kivi"], gpu="h200", length=131_072, batch=1)
    weights, cache = 2 * (8_030_261_248 - 128_256 * 4096), 131_072 * 131_072
    full, int8, kivi = plan.forecasts
    assert (full.method, int8.method, kivi.method) == ("full", "full-int8", "kivi")
    assert full.step_bytes == weights + cache
    assert full.floor_s == pytest.approx((weights + cache) / 4.32e12)
    assert full.gain == full.gain_captured == full.gain_python == 1
    assert int8.stored_bytes == cache * (128 + 2) // 256  # a byte per element, and a scale of two for 128
    assert kivi.gain == pytest.approx((weights + cache) / (weights + kivi.stored_bytes))


@pytest.mark.parametrize(("length", "batch", "gain", "seen"), [
    (131_072, 4, (15.01 + 68.72) / (15.01 + 8.59), 1.0),  # 20.5 ms of Python hide 19.4 ms of the dense cache
    (131_072, 16, (15.01 + 274.9) / (15.01 + 34.36), 67.1 / 20.48),
], ids=["all of it", "half of it"])
def test_what_python_takes_hides_a_gain(length, batch, gain, seen):
    """Where a step is launched by Python it takes as long as that at least, whatever it reads."""
    plan = make_plan("random:llama-3.1-8b", ["snapkv"], gpu="h200", length=length, batch=batch, budget="12.5%")
    snapkv = plan.forecasts[2]
    assert snapkv.gain == pytest.approx(gain, rel=0.01)
    assert snapkv.gain_captured == pytest.approx(snapkv.gain)
    assert snapkv.gain_python == pytest.approx(seen, rel=0.01)


def test_a_small_gain_is_hidden_by_a_kernel_s_least_time():
    """At 1,024 tokens an attention takes as long as one takes at its least, with the whole cache and with a tenth."""
    plan = make_plan("random:llama-3.1-8b", ["snapkv", "h2o"], gpu="h200", length=1024, batch=1, budget="10%")
    full, _, snapkv, h2o = plan.forecasts
    assert snapkv.gain > 1
    assert snapkv.gain_captured == full.gain_captured == 1
    assert h2o.gain_captured is None  # it is no graph


@settings(deadline=None, max_examples=30)
@given(
    gigabytes=st.integers(8, 200), length=st.sampled_from([1024, 32_768]), budget=st.sampled_from(["10%", "50%"]),
    state=st.sampled_from(["prefill", "synthetic"]),
)
def test_the_largest_batch_is_the_last_that_fits(gigabytes, length, budget, state):
    """It fits, one more does not, and a smaller budget never holds fewer."""
    outline = predict_llama(length)
    made = find_method("snapkv")()
    need, half = (Need(outline, made.fit(read_budget(x, made), outline.shape)) for x in (budget, "50%"))
    memory = gigabytes * 10**9
    spare = min(2 << 30, memory // 20)
    most = need.largest_batch(memory, state)
    assert need.peak(most, state) <= memory - spare or most == 0
    assert need.peak(most + 1, state) > memory - spare
    assert most >= half.largest_batch(memory, state)


def predict_llama(length, known={}):  # noqa: B006  # built once
    """Llama-3.1-8B's sizes at a length."""
    if length not in known:
        known[length] = predict_memory("random:llama-3.1-8b", length=length)
    return known[length]


def test_chunks_need_less_room_than_a_whole_prompt():
    """A pass over 1,024 tokens of 32,768 takes a 32nd of its work space."""
    outline = predict_llama(32_768)
    whole, parts = (Need(outline, find_method("full")(), chunk) for chunk in (None, 1024))
    assert parts.prefill - parts.rows_while_running < 0.1 * (whole.prefill - whole.rows_while_running)


def test_who_runs_the_context_again_holds_more():
    """KVzip repeats the context before it compresses."""
    outline = predict_llama(32_768)
    peaks = []
    for name in ("snapkv", "kvzip"):
        made = find_method(name)()
        peaks.append(Need(outline, made.fit(None, outline.shape)).rows_while_running)
    assert peaks[1] == 2 * peaks[0]


@pytest.mark.parametrize(("line", "message"), [
    ("--gpu b300", "unknown gpu 'b300'"), ("--length 0", "length 0 must be 1 or more"),
    ("--budget 1%", "h2o needs at least"), ("--set window=3 --method kivi", "--set is for one method"),
    ("--model random:llada-8b", "nothing to plan"), ("--model nothing", "unknown model"),
    ("--dtype int4", "unknown dtype"), ("--method none", "none is for diffusion models"),
])
def test_wrong_requests_are_refused(kvbench, line, message):
    """In one line, with what to do."""
    answer = kvbench("plan", "--method", "h2o", "--length", "64", *line.split())
    assert answer.code == 2
    assert message in answer.err
    assert len(answer.err.splitlines()) == 1


def test_the_command_prints_a_row_per_method_and_ends_in_json(kvbench):
    """The anchors first; an absent host tier is no number."""
    answer = kvbench("plan", "--method", "snapkv", "--gpu", "a100", "--budget", "25%", "--json")
    assert answer.code == 0
    assert [x["method"] for x in answer.json["forecasts"]] == ["full", "full-int8", "snapkv"]
    assert answer.json["bandwidth"] == COPY_SHARE * GPUS["a100"].bandwidth
    assert "random:llama-3.1-8b, 32,768 tokens x 1 on NVIDIA A100 SXM 80 GB" in answer.out
    assert "an attention takes 11 us at least" in answer.err


def test_every_method_can_be_planned_for():
    """`all` are the anchors and every registered method of this kind, none twice; no weights are made."""
    plan = make_plan("random:qwen2.5-7b", ["all"], gpu="rtx-4090", length=4096, batch=1)
    names = [x.method for x in plan.forecasts]
    assert sorted(names) == sorted(METHODS)
    assert names[:2] == ["full", "full-int8"]


def test_methods_refuse_a_budget_here_as_in_a_run():
    """A plan promises nothing that a run would refuse."""
    with pytest.raises(UserError, match="needs at least"):
        make_plan("random:two-layers", ["snapkv"], gpu="h200", length=64, batch=1, budget="2")
