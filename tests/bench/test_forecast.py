"""Forecasts, compared with the ledger of real sessions and with numbers computed by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.bench.forecast import COPY_SHARE, GPUS, LATER, Need, make_forecast, make_methods, read_budget
from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf import load_model, predict_memory
from kvbench.registry import find_method, list_entries

LENGTH, BATCH, STEPS = 256, 2, 4
UNDECLARED = {"cachegen", "kvtc"}
"""Methods whose bytes depend on the text, which nothing predicts."""
METHODS = [x.name for x in list_entries("method") if x.models == "autoregressive" and x.name not in UNDECLARED]
PROFILED = {"duo-attention", "razor-attention"}
"""Methods that profile every head of the model first, which is slow."""
COMPOSED = ["snapkv+adakv", "snapkv+kivi"]


@pytest.fixture(scope="module")
def mini():
    """The bundled model."""
    return load_model("mini")


def needed(model, name, budget="50%", length=LENGTH):
    """A method's predicted memory on a bundled model."""
    made = find_method(name)().bind(model)
    return Need(predict_memory("mini", length=length), made.fit(read_budget(budget, made), model.shape(length)))


def measured(model, need):
    """The ledger's bytes after a prefill and an answer on a fork, the bytes that its last step read, and another peak.

    That peak is of a prefill in chunks.
    """
    ids = torch.randint(4096, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    with Session(model, need.method, capacity=LENGTH + LATER) as session:
        session.prefill(ids)
        with session.fork() as fork:
            fork.answer(STEPS + 1, stop=frozenset())
            read = sum(store.read_bytes() for store in fork.layers)
        memory = session.memory()
    with Session(model, need.method, capacity=LENGTH + LATER, chunk=LENGTH // 4) as session:
        session.prefill(ids)
        return memory, read, session.memory().peak_bytes


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.slow) if x in PROFILED else x for x in METHODS + COMPOSED]
)
def test_predicted_bytes_are_those_the_ledger_measures(mini, name):
    """Stored bytes agree to 0.1 %, and upper bounds are not exceeded.

    In chunks, every layer holds all entries and all that is kept for scoring until the last one.
    """
    need = needed(mini, name)
    memory, read, peak_in_chunks = measured(mini, need)
    assert abs(memory.stored_bytes - need.stored(BATCH)) <= 0.001 * memory.stored_bytes
    assert memory.host_bytes == BATCH * need.method.declared_host_bytes(need.model.shape)
    assert memory.spare_bytes <= BATCH * need.spare
    assert max(memory.peak_bytes, peak_in_chunks) <= BATCH * need.bytes_while_running
    method, shape = need.method, need.model.shape
    declared, later = BATCH * method.declared_read_bytes(shape), STEPS * BATCH * need.spare // LATER
    least = BATCH * method.least_read_bytes(shape) - (BATCH - 1) * method.shared_bytes(shape)
    assert 0.999 * least <= read <= declared + later + 0.002 * declared


def test_the_lower_bound_by_hand():
    """Llama-3.1-8B at 131,072 tokens on an H200: weights without embeddings, 128 KiB per token, 0.9 x 4.8 TB/s."""
    plan = make_forecast("random:llama-3.1-8b", ["kivi"], gpu="h200", length=131_072, batch=1)
    weights, cache = 2 * (8_030_261_248 - 128_256 * 4096), 131_072 * 131_072
    full, int8, kivi = plan.methods
    assert (full.method, int8.method, kivi.method) == ("full", "full-int8", "kivi")
    assert full.step_bytes == weights + cache
    assert full.bound_s == pytest.approx((weights + cache) / 4.32e12)
    assert full.speedup_bound == full.speedup_graph == full.speedup_python == 1
    assert int8.stored_bytes == cache * (128 + 2) // 256  # a byte per element, and a scale of two for 128
    assert kivi.speedup_bound == pytest.approx((weights + cache) / (weights + kivi.stored_bytes))


@pytest.mark.parametrize(("length", "batch", "bound", "visible"), [
    (131_072, 4, (15.01 + 68.72) / (15.01 + 8.59), 1.0),  # 20.5 ms of Python hide 19.4 ms of the full cache
    (131_072, 16, (15.01 + 274.9) / (15.01 + 34.36), 67.1 / 20.48),
], ids=["all of it", "half of it"])
def test_python_launch_time_hides_a_speedup(length, batch, bound, visible):
    """A step launched by Python takes at least the launch time, whatever it reads."""
    plan = make_forecast("random:llama-3.1-8b", ["snapkv"], gpu="h200", length=length, batch=batch, budget="12.5%")
    snapkv = plan.methods[2]
    assert snapkv.speedup_bound == pytest.approx(bound, rel=0.01)
    assert snapkv.speedup_graph == pytest.approx(snapkv.speedup_bound)
    assert snapkv.speedup_python == pytest.approx(visible, rel=0.01)


def test_minimum_kernel_latency_hides_a_small_speedup():
    """At 1,024 tokens the attention takes its minimum latency, over the full cache and over a tenth of it."""
    methods = ["snapkv", "random-decode"]
    plan = make_forecast("random:llama-3.1-8b", methods, gpu="h200", length=1024, batch=1, budget="10%")
    full, _, snapkv, random = plan.methods
    assert snapkv.speedup_bound > 1
    assert snapkv.speedup_graph == full.speedup_graph == 1
    assert random.speedup_graph is None  # it is no graph


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(
    gigabytes=st.integers(8, 200), length=st.sampled_from([1024, 32_768]), budget=st.sampled_from(["10%", "50%"]),
    state=st.sampled_from(["prefill", "synthetic"]),
)
def test_the_largest_batch_is_the_last_that_fits(gigabytes, length, budget, state):
    """It fits, one more does not, and a smaller budget never allows fewer sequences."""
    outline = predict_llama(length)
    made = find_method("snapkv")()
    need, half = (Need(outline, made.fit(read_budget(x, made), outline.shape)) for x in (budget, "50%"))
    memory = gigabytes * 10**9
    spare = min(2 << 30, memory // 20)
    most = need.max_batch(memory, state)
    assert need.peak(most, state) <= memory - spare or most == 0
    assert need.peak(most + 1, state) > memory - spare
    assert most >= half.max_batch(memory, state)


@pytest.mark.few
@pytest.mark.parametrize(("length", "most"), [(4096, 512), (32_768, 64), (131_072, 16)])
def test_pinned_host_memory_limits_the_largest_batch(length, most):
    """ShadowKV's values are pinned in one block per layer, which torch rounds up to a power of two."""
    outline = predict_llama(length)
    method = find_method("shadowkv")()
    need = Need(outline, method.fit(read_budget("25%", method), outline.shape))
    device, host = 141 * 10**9, int(0.6 * (120 << 30))
    batch = need.max_batch(device, "synthetic", host)
    assert 0 < batch < need.max_batch(device, "synthetic")
    assert need.pinned_bytes(batch) <= host < need.pinned_bytes(batch + 1)
    block = need.pinned_bytes(batch) // len(outline.shape.layers)
    assert block & (block - 1) == 0
    assert batch < most


def predict_llama(length, known={}):  # noqa: B006  # built once
    """Llama-3.1-8B's sizes at a length."""
    if length not in known:
        known[length] = predict_memory("random:llama-3.1-8b", length=length)
    return known[length]


def test_chunks_need_less_room_than_a_whole_prompt():
    """A forward pass over 1,024 of 32,768 tokens takes 1/32 of the work space."""
    outline = predict_llama(32_768)
    whole, parts = (Need(outline, find_method("full")(), chunk) for chunk in (None, 1024))
    found, wanted = (x.prefill - x.bytes_while_running for x in (parts, whole))
    assert found / wanted == pytest.approx(1 / 32, rel=0.01)


def test_methods_that_repeat_the_context_need_twice_the_entries():
    """KVzip repeats the context before it compresses."""
    outline = predict_llama(32_768)
    peaks = []
    for name in ("knorm", "kvzip"):
        made = find_method(name)()
        peaks.append(Need(outline, made.fit(None, outline.shape)).bytes_while_running)
    assert peaks[1] == 2 * peaks[0]


@pytest.mark.few(3)
@pytest.mark.parametrize(("line", "message"), [
    ("--gpu b300", "unknown gpu 'b300'"), ("--length 0", "length 0 must be 1 or more"),
    ("--budget 1%", "h2o needs at least"), ("--set window=3 --method kivi", "--set applies to one method"),
    ("--model random:llada-8b", "nothing to plan"), ("--model nothing", "unknown model"),
    ("--dtype int4", "unknown dtype"), ("--method none", "none is for diffusion models"),
])
def test_wrong_requests_are_refused(kvbench, line, message):
    """In one line, with the next step."""
    answer = kvbench("plan", "--method", "h2o", "--length", "64", *line.split())
    assert answer.code == 2
    assert message in answer.err
    assert len(answer.err.splitlines()) == 1


def test_the_help_promises_nothing_for_diffusion_models(kvbench):
    """`plan` refuses them; `bench` times them."""
    assert "diffusion" not in kvbench("plan", "--help").out
    assert "diffusion" in kvbench("bench", "--help").out


def test_a_method_without_a_graph_has_a_legend(kvbench):
    """`kivi` packs blocks, so its steps cannot be captured."""
    answer = kvbench("plan", "--method", "kivi", "--length", "4096")
    assert "no graph" in answer.out
    assert "`no graph`: " in answer.err


def test_a_setting_is_not_for_all_methods():
    """None of them would take it."""
    with pytest.raises(UserError, match="--set applies to one method"):
        make_methods(["all"], {"window": "64"}, "mini", "autoregressive")


def test_the_command_prints_a_row_per_method_and_ends_in_json(kvbench):
    """Anchors come first; the columns are explained."""
    answer = kvbench("plan", "--method", "snapkv", "--gpu", "a100", "--budget", "25%", "--json")
    assert answer.code == 0
    assert [x["method"] for x in answer.json["methods"]] == ["full", "full-int8", "snapkv"]
    assert answer.json["bandwidth"] == COPY_SHARE * GPUS["a100"].bandwidth
    assert "random:llama-3.1-8b, 32,768 tokens x 1 on NVIDIA A100 SXM 80 GB" in answer.out
    assert "graph, python: " in answer.err and "11 us" in answer.err
    assert max(map(len, [*answer.out.splitlines()[:-1], *answer.err.splitlines()])) <= 80


@pytest.mark.slow
def test_every_method_can_be_planned_for(capsys):
    """`all` stands for the anchors and every registered method, each once; no weights are created.

    Two encode entries as streams, whose length depends on the text: `all` leaves them out and says so.
    """
    plan = make_forecast("random:qwen2.5-7b", ["all"], gpu="rtx-4090", length=4096, batch=1)
    names = [x.method for x in plan.methods]
    assert sorted(names) == sorted(set(METHODS) - {"cachegen", "kvtc"})
    assert names[:2] == ["full", "full-int8"]
    assert "not predicted: kvtc cannot declare its bytes" in capsys.readouterr().err


def test_a_method_whose_bytes_depend_on_the_text_is_refused_if_it_is_named():
    """With the reason."""
    with pytest.raises(UserError, match="cachegen cannot declare its bytes"):
        make_forecast("random:two-layers", ["cachegen"], gpu="h200", length=64, batch=1)


def test_a_forecast_refuses_the_budgets_that_a_run_refuses():
    """A budget below the method's minimum raises the same error."""
    with pytest.raises(UserError, match="needs at least"):
        make_forecast("random:two-layers", ["snapkv"], gpu="h200", length=64, batch=1, budget="2")


def test_a_lossless_method_breaks_even_where_a_round_reads_as_much_as_its_tokens_would():
    """MagicDec by hand: three draft passes read a quarter of the cache, the fourth all, and each the weights."""
    length, batch = 32_768, 8
    plan = make_forecast("random:llama-3.1-8b", ["magicdec"], gpu="h200", length=length, batch=batch)
    full, found = plan.methods[0], plan.methods[-1]
    weights = predict_memory("random:llama-3.1-8b").step_bytes
    cache = batch * length * 131_072
    whole = 4 * weights + 3 * cache / 4 + cache
    assert found.drafted == 3
    assert found.break_even == pytest.approx(whole / (weights + cache) - 1, rel=1e-3)
    assert found.step_bytes == pytest.approx(whole / 4, rel=1e-3)
    assert full.step_bytes == weights + cache
    assert (full.drafted, full.break_even) == (None, None)


@pytest.mark.parametrize(("name", "passes"), [
    ("vericache", 26), ("triforce", 7), ("quantspec", 5), ("prompt-lookup", 1),
])
def test_passes_of_a_round(name, passes):
    """TriForce drafts six tokens in two rounds of two drafts and one pass each; a lookup runs nothing."""
    shape = predict_memory("random:llama-3.1-8b", length=4096).shape
    method = find_method(name)()
    assert method.fit(read_budget("25%", method), shape).round(shape).passes == passes


def test_a_length_beyond_the_models_positions_is_named(capsys):
    """The numbers are right, but no run of that length is possible."""
    make_forecast("random:llama-3.1-8b", ["kivi"], gpu="h200", length=131_072, batch=1)
    assert not capsys.readouterr().err
    make_forecast("random:llama-3.1-8b", ["kivi"], gpu="h200", length=131_073, batch=1)
    said = "random:llama-3.1-8b takes 131,072 positions: `kvbench run` refuses 131,073 tokens.\n"
    assert capsys.readouterr().err == said
