"""kvbench bench: what is timed, outcomes of cells that fail, and the file of a job."""

from __future__ import annotations

import gc
import itertools
import json
import math
import re
import weakref
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel

from kvbench.bench import decode, grid, timing
from kvbench.bench.__main__ import main
from kvbench.bench.answer import time_answers
from kvbench.bench.decode import WrongStepError, open_attention, open_steps
from kvbench.bench.outcome import Failure, attempt
from kvbench.bench.records import Bench, Speedup
from kvbench.bench.references import WrongKernelError, compare_operations, measure
from kvbench.bench.run import BenchRequest, check_positions, run_bench
from kvbench.bench.state import Setting, open_context
from kvbench.bench.table import format_speedup, list_lines, make_tables
from kvbench.bench.timing import CAPTURED_CALLS, capture, compare, find_median, interleave, measure_copy, time_calls
from kvbench.errors import UndeclaredError, UserError
from kvbench.hf import Model
from kvbench.hf.rope import NO_ROPE
from kvbench.hf.tiny import tiny_model
from kvbench.kernels import choice
from kvbench.kernels.choice import using
from kvbench.method import Budget, BudgetKind
from kvbench.methods.baseline.full import Full
from kvbench.registry import find_method, list_entries
from kvbench.runs.files import holding

ROOT = Path(__file__).parents[2]
CPU, GPU = torch.device("cpu"), torch.device("cuda")
LENGTH, LATER = 96, 24
METHODS = [x.name for x in list_entries("method") if x.models == "autoregressive"]
FEW = {"kvbench.bench.measure.STEPS": 4, "kvbench.bench.run.STEPS": 4, "kvbench.bench.answer.STEPS": 4,
       "kvbench.bench.answer.BLOCK": 2, "kvbench.bench.timing.COPIES": 1}


@pytest.fixture
def few(monkeypatch):
    """Four steps and small copies, so that a job takes a second."""
    for name, value in FEW.items():
        monkeypatch.setattr(name, value)
    monkeypatch.setitem(timing.COPIED_BYTES, "cpu", 1 << 20)


def fitted(name, length=LENGTH, model=None):
    """A method at a quarter of a short context."""
    model = model or tiny_model()
    made = find_method(name)().bind(model)
    held = made.budget_kind in (BudgetKind.STORED, BudgetKind.READ)
    return made.fit(Budget("rows", max(made.minimum_entries(), length // 4)) if held else None, model.shape(length))


def setting(**options):
    """A tiny model's."""
    return Setting(model=tiny_model(), later=LATER, **options)


# Time


class FakeTime:
    """A clock under the control of the test."""

    seconds = 0.0

    def spend(self, seconds):
        """A call that takes this many seconds."""
        def call():
            self.seconds += seconds
        return call


@pytest.fixture
def fake_time(monkeypatch):
    """Replaces time.perf_counter."""
    found = FakeTime()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: found.seconds)
    return found


def test_preparation_is_not_timed(fake_time):
    """Three calls of two seconds, each after a preparation of five."""
    assert time_calls(CPU, fake_time.spend(2.0), 3, before=fake_time.spend(5.0)) == 2.0
    assert fake_time.seconds == 21.0


def test_gpu_events_enclose_only_the_call(monkeypatch):
    """The flush is outside, the device waits while the call is launched, and times are read after a synchronization."""
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("event")

        def elapsed_time(self, other):
            assert log[-1] == "synchronized"
            return 4.0  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: log.append("synchronized"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda _: log.append("wait"))
    seconds = time_calls(GPU, lambda: log.append("call"), 2, before=lambda: log.append("flush"))
    assert log == [*["flush", "wait", "event", "call", "event"] * 2, "synchronized"]
    assert seconds == 0.004


def test_rounds_rotate_and_garbage_collection_is_off():
    """A, B, C, then B, C, A: every timer goes first equally often."""
    order = []
    timers = {name: lambda name=name: order.append((name, gc.isenabled())) or 1.0 for name in "abc"}
    assert interleave(timers, 4) == {name: [1.0] * 4 for name in "abc"}
    assert [name for name, _ in order] == [*"abc", *"bca", *"cab", *"abc"]
    assert not any(enabled for _, enabled in order)
    assert gc.isenabled()


def test_medians_and_ratios_by_hand():
    """A machine that slows down changes seconds but not paired ratios; unpaired ratios may change."""
    ours = [1.0, 2.0, 4.0, 8.0, 16.0]
    theirs = [2 * x for x in ours]
    assert find_median(ours).median == 4.0
    assert (find_median(ours).low, find_median(ours).high) == (1.0, 16.0)
    paired, apart = (compare(theirs, ours, paired=x) for x in (True, False))
    assert (paired.median, paired.low, paired.high, paired.n) == (2.0, 2.0, 2.0, 5)
    assert apart.median == 2.0
    assert apart.low < 1 < apart.high
    assert (paired.within_noise, apart.within_noise) == (False, True)
    assert compare(theirs[:4], ours[:4], paired=True).within_noise  # four rounds are too few


def test_large_factors_have_fewer_decimals():
    """A table is as wide with 145-fold speed-ups as with 1.45-fold ones."""
    shown = [format_speedup(Speedup(median=1.453 * x, low=x, high=2.0 * x, n=9, paired=True)) for x in (1, 10, 100)]
    assert shown == ["1.45 [1.00, 2.00] noise", "14.5 [10.0, 20.0]", "145 [100, 200]"]


@settings(deadline=None)
@given(
    st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=20), st.floats(0.1, 10), st.booleans(),
)
def test_intervals_contain_their_median_and_ratios_are_scale_free(seconds, factor, paired):
    """For arbitrary times; scaling both sides leaves the ratio unchanged."""
    found = find_median(seconds)
    assert found.low <= found.median <= found.high
    theirs = list(reversed(seconds))
    one = compare(theirs, seconds, paired=paired)
    other = compare([x * factor for x in theirs], [x * factor for x in seconds], paired=paired)
    assert other.median == pytest.approx(one.median)
    assert (other.low, other.high) == (pytest.approx(one.low), pytest.approx(one.high))


def test_copy_bandwidth_counts_reads_and_writes(few, fake_time, monkeypatch):
    """A copy of 1 MiB per second moves 2 MiB per second."""
    monkeypatch.setattr(timing, "_copy", lambda *_: fake_time.spend(1.0)())
    assert measure_copy(CPU) == 2 * (1 << 20)


# Graphs


@pytest.fixture
def cuda(monkeypatch):
    """A fake of the torch.cuda functions that a capture uses. `log` records calls, `fault` raises errors by place."""
    state = SimpleNamespace(log=[], fault={}, stream="main", mode="default", pool=None)

    @contextmanager
    def stream(name):
        before, state.stream = state.stream, name
        yield
        state.stream = before

    @contextmanager
    def graph(_, pool):
        state.stream, state.pool = "capture", pool
        state.log.append("capture begins")
        yield
        if "capture" in state.fault:  # as torch 2.11 does: the allocator stays in capture mode
            raise state.fault["capture"]
        state.pool = None
        state.log.append("capture ends")
        state.stream = "main"

    side = SimpleNamespace(wait_stream=lambda _: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: side)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: side)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: stream("side"))
    monkeypatch.setattr(torch.cuda, "set_stream", lambda _: setattr(state, "stream", "main"))
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: setattr(state, "mode", mode))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *x: state.log.append(("end", *x)), raising=False)

    def release(index, pool):
        assert state.log[-1] == ("end", index, pool)
        state.pool = None

    def empty_cache():
        if state.pool is not None:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    monkeypatch.setattr(torch._C, "_cuda_releasePool", release, raising=False)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: state.log.append("replay")))

    def call():
        state.log.append((state.stream, state.mode))
        if state.mode in state.fault:
            raise state.fault[state.mode]

    state.call = call
    return state


def test_a_graph_is_captured_after_warm_ups_on_another_stream(cuda):
    """The last warm-up runs in synchronization debug mode; the returned call is the replay."""
    call, reason = capture(cuda.call, GPU)
    call()
    assert reason is None
    assert cuda.log == [
        *[("side", "default")] * (CAPTURED_CALLS - 1), ("side", "error"), "capture begins", ("capture", "default"),
        "capture ends", "replay",
    ]


@pytest.mark.parametrize("where", ["error", "capture"])
def test_a_failed_capture_returns_the_call_and_the_reason(cuda, where):
    """Detected by a synchronization or by the capture itself; stream and mode are restored."""
    cuda.fault[where] = RuntimeError("called a synchronizing CUDA operation.\nmore")
    call, reason = capture(cuda.call, GPU)
    assert reason == "called a synchronizing CUDA operation"
    assert call is cuda.call
    assert (cuda.stream, cuda.mode) == ("main", "default")
    torch.cuda.empty_cache()  # works after a failed capture
    cuda.fault.clear()
    assert capture(cuda.call, GPU)[1] is None


def test_out_of_memory_in_a_capture_is_raised(cuda):
    """It becomes the outcome of the cell."""
    cuda.fault["capture"] = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        capture(cuda.call, GPU)


@pytest.fixture
def taped(monkeypatch, new_tape):
    """Replaces CUDA graphs by a tape of torch operations; recording one runs the call."""
    def tape_capture(call, device):
        for _ in range(CAPTURED_CALLS):
            call()
        with new_tape() as tape:
            call()
        tapes.append(tape)
        return tape.replay, None

    tapes = []
    monkeypatch.setattr(decode, "why_no_graph", lambda device: None)
    monkeypatch.setattr(decode, "capture", tape_capture)
    monkeypatch.setattr(decode, "CAPTURED_CALLS", CAPTURED_CALLS + 1)
    return tapes


@pytest.mark.parametrize("name", ["full", "full-int8", "snapkv", "quest"])
def test_replays_are_consecutive_steps(taped, name):
    """Ten replays advance tokens and cache entries as ten normal steps do."""
    job = setting()
    with open_context(job, fitted(name), LENGTH, 2) as stand:
        wanted = decode._run_plainly(job, stand.session, CAPTURED_CALLS + 2 + 10)
        with open_steps(job, stand.session, graph=True) as timed:
            assert timed.reason is None
            for _ in range(10):
                timed.call()
            logits = next(
                out for func, _, _, out in reversed(taped[-1].operations)
                if isinstance(out, torch.Tensor) and out.shape == wanted.shape
            )
            assert torch.allclose(logits, wanted, atol=1e-4)


@pytest.mark.parametrize("opener", [decode.open_attention, open_steps])
def test_replays_count_what_they_read(taped, opener):
    """Python counts at the capture alone, and counters on the device at replays alone: pages differ per KV head."""
    with (
        open_context(setting(), fitted("quest"), LENGTH, 2) as stand,
        opener(setting(), stand.session, graph=True) as timed,
    ):
        reads = timed.settle.__self__
        for store, one in zip(timed.session.layers, reads.captured, strict=True):
            store.reads.clear()
            store.reads.update(one)
            store.distinct.zero_()  # a tape runs what it records, a capture does not
        reads.replays = 0
        for _ in range(10):
            timed.prepare()
            timed.call()
        timed.settle()
        for store, one in zip(timed.session.layers, reads.captured, strict=True):
            assert store.reads["pages_read"] == 10 * one["pages_read"] > 0
            assert 0 < store.distinct_read_bytes() <= store.read_bytes()


def test_a_capture_with_other_logits_is_not_timed(taped, monkeypatch):
    """A replay that writes its entry to the same place every time gives other logits: WrongStepError."""
    def stuck(call, device):
        for _ in range(CAPTURED_CALLS + 1):
            call()
        return lambda: None, None  # a graph in which nothing happens

    monkeypatch.setattr(decode, "capture", stuck)
    with open_context(setting(), fitted("full"), LENGTH, 1) as stand, pytest.raises(WrongStepError, match="logits"):
        open_steps(setting(), stand.session, graph=True).__enter__()


@pytest.mark.parametrize(("name", "graph", "reason"), [
    ("full", True, "no CUDA graph on a CPU"), ("kivi", True, "entries are packed in blocks"),
    ("full", False, "the method that it is compared with runs without a CUDA graph"),
])
def test_the_reason_for_no_graph(name, graph, reason):
    """The method's own reason where it has one."""
    with open_context(setting(), fitted(name), LENGTH, 1) as stand:
        with open_steps(setting(), stand.session, graph=graph) as timed:
            timed.call()
        assert reason in timed.reason


def test_an_operation_that_writes_in_place_is_compared(monkeypatch):
    """ShadowKV's restored keys: the reference writes into a copy, so a wrong implementation is noticed."""
    def find(package, implementation, name):
        function = getattr(__import__(f"{package}.torch", fromlist=[name]), name)

        def changed(*args, **kwargs):
            result = function(*args, **kwargs)
            if name == "restore_keys":
                args[0].mul_(1.5)
            return result

        changed.__module__ = f"{package}.triton"
        return changed

    monkeypatch.setattr(choice, "_find", find)
    with using("triton"), pytest.raises(WrongKernelError, match="restore_keys"):
        compare_operations(setting(), fitted("shadowkv"), LENGTH)


def test_attention_is_called_for_every_layer_with_other_queries_in_turn(monkeypatch):
    """Once per layer and call, over entries that no call changes; queries repeat after four calls."""
    job = setting()
    with open_context(job, fitted("full"), LENGTH, 1) as stand, open_attention(job, stand.session, graph=True) as timed:
        seen = []
        attend = Full.attend
        monkeypatch.setattr(Full, "attend", lambda self, kv, step: (
            seen.append((step.layer, step.query.sum().item(), kv.n)), attend(self, kv, step)
        )[1])
        for _ in range(2 * decode.ROTATED):
            timed.prepare()
            timed.call()
    assert [layer for layer, _, _ in seen] == [0, 1] * 2 * decode.ROTATED
    queries = [query for layer, query, _ in seen if layer == 0]
    assert queries[: decode.ROTATED] == queries[decode.ROTATED :]
    assert len(set(queries)) == decode.ROTATED
    assert {entries for _, _, entries in seen} == {LENGTH + decode.ROTATED}


# States


@pytest.mark.few(5)
@pytest.mark.parametrize("name", METHODS)
def test_synthetic_contexts_take_as_many_bytes_as_real_ones(name):
    """Stored bytes and entries kept by layer are equal, and steps can be decoded."""
    try:
        fitted(name).declared_bytes(tiny_model().shape(LENGTH))
    except UndeclaredError:  # its cells are refused
        return
    found = {}
    for state in ("prefill", "synthetic"):
        job = setting(state=state)
        method = find_method(name)
        if state == "synthetic" and (method.replays_context or method.reads_hidden or method.skips_layers):
            with pytest.raises(UserError, match="synthetic entries"), open_context(job, fitted(name), LENGTH, 2):
                pass
            return
        with open_context(job, fitted(name), LENGTH, 2) as stand:
            memory = stand.session.memory()
            found[state] = memory.stored_bytes, memory.host_bytes, sum(stand.session.effect().entries_kept)
            assert (stand.prefill_s is None) == (state == "synthetic")
            with open_steps(job, stand.session, graph=True) as timed:
                timed.call()
    assert found["prefill"] == found["synthetic"]


def test_synthetic_contexts_respect_sliding_windows():
    """A sliding-window layer holds its window only, as after a prefill."""
    model = tiny_model(window=16)
    job = Setting(model=model, state="synthetic", later=LATER)
    with open_context(job, Full(), LENGTH, 1) as stand:
        assert stand.session.memory().stored_bytes == model.shape(LENGTH).full_bytes


# Operations that are wrong


@pytest.fixture
def triton_is(monkeypatch):
    """Replaces the triton implementations by torch's, with one of them altered."""
    tiny_model()  # proved before an operation is altered

    def replace(operation, change):
        def find(package, implementation, name):
            module = __import__(f"{package}.torch", fromlist=[name])
            function = getattr(module, name)
            alter = change if package.endswith(operation) else lambda x: x
            changed = lambda *x, **y: alter(function(*x, **y))  # noqa: E731  # it needs a __module__ of its own
            changed.__module__ = f"{package}.triton"
            return changed
        monkeypatch.setattr(choice, "_find", find)
    return replace


@pytest.mark.parametrize(("change", "message"), [
    (lambda x: x * 1.01, "dense_attention differs from its torch implementation by 0.01, allowed 0.0001: not timed"),
    (lambda x: x.masked_fill(x == x.max(), torch.nan), "differs from its torch implementation by inf"),
    (lambda x: x[:, :, :, :-1], "inf"),
])
def test_a_method_with_a_wrong_operation_is_not_timed(triton_is, change, message):
    """1 % off, a NaN, or another shape: the error names the operation."""
    triton_is("dense_attention", change)
    with using("triton"), pytest.raises(WrongKernelError, match="dense_attention") as error:
        compare_operations(setting(), Full(), LENGTH)
    assert message in str(error.value)


def test_rounding_is_allowed(triton_is):
    """Under torch, nothing is compared."""
    triton_is("dense_attention", lambda x: x * (1 + 1e-6))
    with using("triton"):
        compare_operations(setting(), Full(), LENGTH)
    with using("torch"):
        compare_operations(setting(), Full(), LENGTH)


def test_differences_by_hand():
    """Floats by relative RMS, integers by the share that differs, infinities by their places."""
    one = torch.tensor([3.0, 4.0, -torch.inf])
    assert measure(one, one) == 0
    assert measure(torch.tensor([3.0, 4.5, -torch.inf]), one) == pytest.approx(0.1)
    assert measure(torch.tensor([3.0, 4.0, 0.0]), one) == torch.inf
    assert measure(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 5])) == 0.25


# Outcomes


def test_the_memory_of_a_failed_call_is_freed():
    """The frames of the exception hold tensors; they are gone when attempt returns."""
    refs = []

    def fail():
        tensor = torch.empty(10)
        refs.append(weakref.ref(tensor))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nsee there")

    found = attempt(fail)
    assert found == Failure("out of memory", "CUDA out of memory. Tried to allocate 2 GiB")
    assert refs[0]() is None


@pytest.mark.few
@pytest.mark.parametrize("error", [
    torch.AcceleratorError("CUDA error: out of memory\nmore"), RuntimeError("CUDA driver error: out of memory"),
    MemoryError("out of memory"),
])
def test_host_memory_that_runs_out_is_out_of_memory_too(error):
    """Pinned allocations raise other errors than torch.OutOfMemoryError."""
    def fail():
        raise error

    assert attempt(fail).outcome == "out of memory"


def test_pinned_memory_that_does_not_fit_is_not_tried():
    """The host's limit holds on a GPU too: beyond it the system may kill the process."""
    need = SimpleNamespace(peak=lambda *_: 0, pinned_bytes=lambda batch: batch * 10**9)
    job = SimpleNamespace(host_memory=3 * 10**9, device=GPU, setting=setting(state="synthetic"))
    assert grid._foresee(job, need, 3) is None
    found = grid._foresee(job, need, 4)
    assert found.outcome == "out of memory"
    assert found.reason == "not tried: 4.00 GB of pinned memory predicted, 3.00 GB available"


def test_memory_is_freed_between_lengths_and_batches(monkeypatch):
    """After the cells of each, on a GPU."""
    log = []
    monkeypatch.setattr(grid, "_cells", lambda job, wrong, length, asked: [f"{length} x {asked}"])
    monkeypatch.setattr(grid, "free_device_memory", lambda: log.append("freed"))
    grid._emit_all(SimpleNamespace(lengths=(8, 16), batches=("max",), device=GPU), {}, log.append)
    assert log == ["8 x max", "freed", "16 x max", "freed"]


@pytest.fixture
def lost(monkeypatch):
    """A CUDA context in which every call fails after an illegal address."""
    def synchronize(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.cuda, "empty_cache", synchronize)


@pytest.mark.slow
def test_an_unusable_cuda_context_is_noticed(lost):
    """It is not cleaned up, and the failure says that nothing more can be timed."""
    def fail():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    assert attempt(fail).device_lost


FAULTY = '''
from dataclasses import dataclass
from typing import ClassVar
import torch
from kvbench.method import BudgetKind, Card, Method, Moment

@dataclass(frozen=True)
class Greedy(Method):
    """Runs out of memory in its second step."""
    card: ClassVar[Card] = Card(
        name="greedy", title="", idea="", arxiv=None, year=None, family="toy", stages=(), budget=BudgetKind.NONE,
        heads="independent", upstream=None,
    )
    kind: str = "memory"

    def attend(self, kv, step):
        if step.moment is Moment.DECODE and kv.seen > 97:
            raise torch.OutOfMemoryError("no room") if self.kind == "memory" else ValueError("no reason")
        return super().attend(kv, step)
'''


@pytest.fixture
def greedy(tmp_path):
    """A method in a file."""
    path = tmp_path / "greedy.py"
    path.write_text(FAULTY)
    return f"{path}:Greedy"


@pytest.fixture
def bench(kvbench, few):
    """The command on two layers with random weights, and a short context."""
    def call(*arguments):
        return kvbench(
            "bench", "--model", "random:two-layers", "--length", LENGTH, "--rounds", 2, "--json", *arguments
        )
    return call


@pytest.mark.few
@pytest.mark.parametrize(("kind", "outcome", "code"), [("memory", "out of memory", 0), ("other", "failed", 1)])
def test_a_failure_is_the_outcome_of_its_own_cell(bench, greedy, kind, outcome, code):
    """At every timing level, with its reason. Running out of memory is a result (code 0), an error is not (code 1)."""
    timings = ("kernel", "step", "end-to-end") if kind == "memory" else ("step",)
    answer = bench("--method", greedy, "--set", f"kind={kind}", "--timing", ",".join(timings))
    assert answer.code == code
    cells = answer.json["cells"]
    assert [(x["timing"], x["method"]["name"], x["outcome"]) for x in cells] == [
        (level, name, outcome if name == "greedy" else "ok")
        for level in timings for name in ("full", "full-int8", "greedy")
    ]
    failed = [x for x in cells if x["outcome"] != "ok"]
    reason = "no room" if kind == "memory" else "ValueError: no reason (greedy.py, line 18)"
    assert {x["reason"] for x in failed} == {reason}
    assert all(x["times"] == {} and x["tokens_per_s"] is None for x in failed)


def test_a_method_that_cannot_declare_its_bytes_is_refused_in_its_cell_only(bench):
    """As CacheGen, whose streams depend on the text: memory is foreseen for every cell."""
    named = ("--method", "cachegen", "--method", "snapkv", "--budget", "50%")
    answer = bench(*named, "--timing", "step", "--state", "synthetic")
    assert answer.code == 0
    cells = {x["method"]["name"]: x for x in answer.json["cells"]}
    assert {name: x["outcome"] for name, x in cells.items()} == {
        "cachegen": "refused", "full": "ok", "full-int8": "ok", "snapkv": "ok"
    }
    assert "cannot declare its bytes" in cells["cachegen"]["reason"]


@pytest.mark.slow
def test_an_invalid_budget_is_refused_in_its_cell_only(bench):
    """With the message of `kvbench run`."""
    cells = bench("--method", "snapkv", "--method", "streaming-llm", "--budget", "20", "--timing", "step").json["cells"]
    outcomes = {x["method"]["name"]: x["outcome"] for x in cells}
    assert outcomes == {"full": "ok", "full-int8": "ok", "snapkv": "refused", "streaming-llm": "ok"}
    assert "snapkv needs at least" in cells[0]["reason"]  # refused cells come before timed ones


@pytest.mark.slow
def test_a_command_fails_if_every_requested_method_is_refused(bench):
    """Cells of anchors do not count."""
    for methods, code in (("snapkv", 1), ("streaming-llm", 0)):
        assert bench("--method", methods, "--budget", "20", "--timing", "step").code == code


def test_a_batch_that_memory_cannot_hold_is_not_tried_on_a_cpu(bench):
    """The system would kill the process; the reason has the prediction."""
    (first, *_) = bench("--method", "full", "--timing", "step", "--batch", "100000", "--memory", 0.1).json["cells"]
    assert first["outcome"] == "out of memory"
    assert first["reason"].startswith("not tried: ")
    assert first["predicted"]["peak_bytes"] > 100_000_000 > first["predicted"]["stored_bytes"] / 100


# Jobs


def test_cells_of_all_timing_levels(bench, tmp_path):
    """Quantities, speed-ups over the anchors before the method, bytes, memory and kernels."""
    out = tmp_path / "bench.json"
    answer = bench("--method", "snapkv", "--budget", "50%", "--batch", "2", "--out", out)
    assert answer.code == 0
    found = Bench.model_validate_json(out.read_text())
    assert found.model_dump(mode="json") == answer.json
    assert (found.status, found.environment.gpu, found.command["methods"]) == ("done", None, ["snapkv"])
    assert found.copy_bandwidth.before > 0 and found.copy_bandwidth.after > 0
    assert [(x.batch, x.timing, x.method.name) for x in found.cells] == [
        (2, level, name) for level in ("kernel", "step", "end-to-end") for name in ("full", "full-int8", "snapkv")
    ]
    for name in choice.IMPLEMENTATIONS:
        assert Bench.model_validate(answer.json | {"kernels": name}).kernels == name
    answer_parts = {"prefill", "compression", "token", "answer"}
    quantities = {"kernel": {"attention"}, "step": {"step"}, "end-to-end": answer_parts}
    for cell in found.cells:
        assert cell.times.keys() == quantities[cell.timing]
        assert cell.graph is (None if cell.timing == "end-to-end" else False)
        anchors = {"full": set(), "full-int8": {"full"}, "snapkv": {"full", "full-int8"}}[cell.method.name]
        assert all(x.speedups.keys() == anchors for name, x in cell.times.items() if name != "compression")
        assert all(x.seconds.n == 2 for x in cell.times.values())
        assert cell.steps == (8 if cell.timing == "end-to-end" else 4)
        assert cell.kernels["dense_attention" if cell.method.name != "full-int8" else "int8_attention"] == "torch"
        assert cell.memory.stored_bytes == cell.predicted.stored_bytes
        assert cell.device_memory is None
        assert cell.budget == ("50%" if cell.method.name == "snapkv" else None)
    assert "compression," in answer.out and re.search(r"\d% of", answer.out)
    assert max(len(x) for x in answer.out.splitlines() if x[:1] in "┏┡│└") <= 80
    answered = found.cells[8].times
    assert answered["answer"].seconds.median > answered["prefill"].seconds.median > answered["compression"].seconds.low


@pytest.mark.slow
def test_bytes_of_a_step_by_hand(bench):
    """The attention reads the stored entries; a step also reads the weights, except the embedding table."""
    found = bench("--method", "full", "--timing", "kernel,step", "--batch", 2).json
    cells = found["cells"]
    entry = 2 * 2 * 2 * 64 * 2  # layers, keys and values, heads, channels, bytes
    full = [x for x in cells if x["method"]["name"] == "full"]
    moved = {x["timing"]: next(iter(x["times"].values()))["bytes_moved"] for x in full}
    assert moved["kernel"] == 2 * (LENGTH + decode.ROTATED) * entry
    weights = 2 * (1_443_072 - 512 * 256)
    entries = (moved["step"] - weights) / (2 * entry)
    assert LENGTH < entries <= LENGTH + 4 + timing.WARM_UPS
    attention = cells[0]["times"]["attention"]
    achieved = moved["kernel"] / attention["seconds"]["median"]
    assert attention["bandwidth_share"] == pytest.approx(achieved / found["copy_bandwidth"]["before"])
@pytest.mark.slow
def test_every_method_has_its_own_largest_batch(bench):
    """As predicted; the speed-up is of the time per token and not paired."""
    found = bench("--method", "snapkv", "--budget", "50%", "--batch", "max", "--timing", "step", "--memory", "0.006")
    full, _, snapkv = found.json["cells"]
    assert full["asked_batch"] == snapkv["asked_batch"] == "max"
    assert [x["batch"] == x["predicted"]["max_batch"] for x in (full, snapkv)] == [True, True]
    speedup = snapkv["times"]["step"]["speedups"]["full"]
    assert speedup["paired"] is False
    per_token = [x["times"]["step"]["seconds"]["median"] / x["batch"] for x in (full, snapkv)]
    assert speedup["median"] == pytest.approx(per_token[0] / per_token[1])
    assert snapkv["tokens_per_s"] == pytest.approx(1 / per_token[1])


@pytest.mark.slow
def test_a_largest_batch_that_does_not_fit_is_reduced(bench, tmp_path):
    """By a quarter at a time; the cell has the batch that ran and the predicted one."""
    path = tmp_path / "greedy.py"
    path.write_text(FAULTY.replace("kv.seen > 97", "step.key.shape[0] > 3"))
    answer = bench("--method", f"{path}:Greedy", "--batch", "max", "--timing", "step", "--memory", "0.009")
    full, _, greedy = answer.json["cells"]
    assert full["batch"] == full["predicted"]["max_batch"] > 3
    assert greedy["outcome"] == "ok"
    assert greedy["batch"] in (2, 3)
    assert greedy["predicted"]["max_batch"] == full["batch"]
    assert "no room; trying" in answer.err


@pytest.mark.slow
def test_a_method_that_does_not_fit_with_the_anchors_is_timed_alone(bench):
    """Its speed-ups are not paired."""
    answer = bench(
        "--method", "quest", "--budget", "64", "--set", "page=8", "--batch", 64, "--timing", "step",
        "--state", "synthetic", "--memory", 0.033,  # weights of 3 MB, anchors of 8 and 5, and 22 for the method
    )
    found = answer.json["cells"]
    assert [(x["method"]["name"], x["outcome"]) for x in found] == [
        ("full", "ok"), ("full-int8", "ok"), ("quest", "ok")
    ]
    paired = [[y["paired"] for y in x["times"]["step"]["speedups"].values()] for x in found]
    assert paired == [[], [True], [False, False]]


def test_an_interrupted_job_keeps_its_cells(few, tmp_path, monkeypatch):
    """The file is complete after every cell, with status `running`."""
    from kvbench.bench import run

    def interrupted(job, emit):
        original(job, lambda cell: (emit(cell), (_ for _ in ()).throw(KeyboardInterrupt)))

    original = run.run_cells
    monkeypatch.setattr(run, "run_cells", interrupted)
    out = tmp_path / "bench.json"
    with pytest.raises(KeyboardInterrupt):
        run.run_bench(run.BenchRequest(
            methods=("full",), model="random:two-layers", lengths=(LENGTH,), timings=("step",), rounds=1, out=out
        ))
    found = Bench.model_validate_json(out.read_text())
    assert (found.status, len(found.cells), found.cells[0].outcome) == ("running", 1, "ok")


@pytest.mark.slow
def test_a_lost_device_ends_the_job_and_the_same_command_continues(bench, greedy, monkeypatch, tmp_path):
    """The cell of the method that failed is saved. The second job times only the missing methods and the anchors."""
    monkeypatch.setattr("kvbench.bench.outcome.is_device_lost", lambda: True)
    out = tmp_path / "bench.json"
    asked = ("--method", greedy, "--set", "kind=other", "--timing", "step", "--out", out)
    first = bench(*asked)
    assert first.code == 3
    assert "the GPU cannot be used after an error of" in first.err
    assert "A command with --out FILE continues with the missing cells when it is run again." in first.err
    found = Bench.model_validate_json(out.read_text())
    assert found.status == "running"
    assert [(x.method.name, x.outcome) for x in found.cells] == [
        ("full", "ok"), ("full-int8", "ok"), ("greedy", "failed")
    ]
    out.write_text(found.model_copy(update={"cells": found.cells[:2]}).model_dump_json())
    monkeypatch.setattr("kvbench.bench.outcome.is_device_lost", lambda: False)
    second = bench(*asked)
    assert "has 2 cells of this job: continuing" in second.err
    again = Bench.model_validate_json(out.read_text())
    assert (again.status, again.cells[:2], len(again.cells)) == ("done", found.cells[:2], 3)


JOB = ("--method", "full", "--timing", "step")


@pytest.fixture
def finished(bench, tmp_path):
    """The file of a finished job, and a function that writes it with another status and changed fields."""
    out = tmp_path / "bench.json"
    assert bench(*JOB, "--out", out).code == 0
    record = json.loads(out.read_text())

    def write(status, **parts):
        changed = {name: {**record[name], **part} for name, part in parts.items()}
        out.write_text(json.dumps({**record, "status": status, **changed}))
        return out.read_bytes()

    return out, write


@pytest.fixture
def untimed(monkeypatch):
    """No cell may be timed."""
    monkeypatch.setattr("kvbench.bench.run.run_cells", lambda *_: pytest.fail("timed"))


def test_a_finished_job_is_shown_and_not_timed_again(bench, finished, untimed):
    """With another --seconds, too; on another machine, too, and the log says so."""
    out, write = finished
    held = write("done")
    for options in ((), ("--seconds", 5)):
        answer = bench(*JOB, *options, "--out", out)
        assert (answer.code, answer.json, out.read_bytes()) == (0, json.loads(held), held)
        assert f"already finished: showing {out}. Delete the file" in answer.err
    held = write("done", environment={"cpu": "abacus"})
    answer = bench(*JOB, "--out", out)
    assert (answer.code, out.read_bytes()) == (0, held)
    assert "another machine or other code (cpu abacus, now " in answer.err


def test_the_file_of_another_job_is_not_replaced(bench, finished, untimed):
    """Finished or not; neither is one that is not a job's."""
    out, write = finished
    for status in ("done", "running"):
        held = write(status)
        answer = bench("--method", "snapkv", "--timing", "step", "--out", out)
        assert (answer.code, out.read_bytes()) == (2, held)
        assert f"--out {out} holds another job (methods full, now snapkv). Give another --out" in answer.err
    for text in ("notes", "", "{}"):
        out.write_text(text)
        answer = bench(*JOB, "--out", out)
        assert (answer.code, out.read_text()) == (2, text)
        assert f"--out {out} exists and is no file of `kvbench bench`: " in answer.err


@pytest.mark.parametrize(("part", "field", "value", "message"), [
    ("environment", "cpu", "abacus", "another machine or other code (cpu abacus, now "),
    ("environment", "gpu", "NVIDIA H200", "(gpu NVIDIA H200, now none)"),
    ("environment", "threads", 99, "(threads 99, now "),
    ("environment", "torch", "1.0", "(torch 1.0, now "),
    ("environment", "git", {"commit": "a" * 40, "dirty": True}, "(git commit aaaaaaaaaaaa with changes, now "),
    ("model", "sha256", "b" * 64, "another model or method (model sha256 bbbbbbbbbbbb, now "),
])
def test_an_unfinished_job_of_another_machine_is_not_continued(bench, finished, untimed, part, field, value, message):
    """Nor of other code or weights; the message names the difference."""
    out, write = finished
    held = write("running", **{part: {field: value}})
    answer = bench(*JOB, "--out", out)
    assert (answer.code, out.read_bytes()) == (2, held)
    assert message in answer.err


def test_a_job_of_a_changed_method_is_not_shown(bench, greedy, tmp_path):
    """The code of a user's own file is a part of the job, finished or not."""
    out = tmp_path / "bench.json"
    asked = ("--method", greedy, "--timing", "step", "--out", out)
    assert bench(*asked).code == 0
    held = out.read_bytes()
    path = Path(greedy.partition(":")[0])
    path.write_text(path.read_text() + "# changed")
    answer = bench(*asked)
    assert (answer.code, out.read_bytes()) == (2, held)
    assert "another model or method (greedy code " in answer.err


@pytest.mark.slow
def test_absolute_times_of_a_cpu_are_not_printed(bench):
    """Speed-ups are; a synthetic state is stated."""
    answer = bench("--method", "full", "--timing", "step", "--state", "synthetic")
    table = answer.out.splitlines()[:-1]
    assert not any(x in " ".join(table) for x in (" ms ", " us ", "tokens/s"))
    assert {x["graph_reason"] for x in answer.json["cells"]} == {"there is no CUDA graph on a CPU"}
    assert {x["state"] for x in answer.json["cells"]} == {"synthetic"}
    assert "synthetic contexts, no prompt was run" in " ".join(answer.out.split())


@pytest.mark.few(5)
@pytest.mark.parametrize(("line", "message"), [
    ("--timing wall", "unknown timing level 'wall'"),
    ("--state synthetic", "end-to-end timing runs the prompt"),
    ("--state warm --timing step", "unknown state 'warm'"), ("--batch 0", "batch '0' must be a number"),
    ("--batch many", "batch 'many' must be a number"), ("--length 1k", "must be whole numbers"),
    ("--length 0", "length 0 must be 1 or more"), ("--seconds 0", "seconds 0.0 must be 1 or more"),
    ("--memory 0", "0.0 must be 0.001 or more"), ("--out nowhere/bench.json", "in an existing folder"),
    ("--kernels cuda", "unknown kernels 'cuda'"),
    (f"--length {'9' * 5000}", "must be whole numbers from 1 to 2,147,483,647"),
    (f"--batch {'9' * 5000}", "must be a number from 1 to 2,147,483,647"),
    ("--kernels flash", "flash"), ("--method nope", "unknown method 'nope'"),
    ("--set window=3 --method h2o", "--set applies to one method"), ("--method none", "none is for diffusion models"),
    ("--model random:llada-8b --method none", "use --timing end-to-end"),
    ("--device cuda:77", "not on this machine"),
])
def test_wrong_requests_are_refused_before_anything_runs(kvbench, few, line, message):
    """In one line, with the next step; no model is loaded."""
    answer = kvbench("bench", "--method", "snapkv" if "none" not in line else "none", *line.split())
    assert answer.code == 2
    assert message in answer.err
    assert len(answer.err.splitlines()) == 1


def test_a_cell_that_is_asked_for_twice_is_timed_once(few):
    """Lengths and batches."""
    found = run_bench(BenchRequest(
        methods=("full",), model="random:two-layers", lengths=(32, 32), batches=("1", "01"), timings=("step",),
        rounds=1,
    ))
    assert [(x.method.name, x.length, x.asked_batch) for x in found.cells] == [
        ("full", 32, "1"), ("full-int8", 32, "1")
    ]


def test_a_file_without_a_prefill_has_a_table(few):
    """Bench files may be damaged, or made by others."""
    cells = run_bench(BenchRequest(methods=("full",), model="random:two-layers", lengths=(32,), rounds=1))
    (cell, *_) = (x for x in cells.cells if x.timing == "end-to-end")
    times = {"compression": cell.times["prefill"]}
    empty = cell.memory.model_copy(update={"full_bytes": 0})
    damaged = cells.model_copy(update={"cells": (cell.model_copy(update={"times": times, "memory": empty}),)})
    ((_, columns, rows),) = make_tables(damaged)
    assert columns[:2] == ["method", "quantity"] and rows[0][:2] == ["full", "compression"]
    assert "compression " in next(iter(list_lines(damaged)))


def test_positions_that_a_model_cannot_compute_are_refused(few):
    """Learned positions end with their table; rotations do not end."""
    request = BenchRequest(methods=("full",), lengths=(100,))
    learned = SimpleNamespace(ropes=(NO_ROPE, replace(NO_ROPE, movable=False)), max_length=100, id="opt")
    with pytest.raises(UserError, match="length 100 and 4 more tokens are beyond the 100 positions"):
        check_positions(request, learned, 4)
    check_positions(request, SimpleNamespace(ropes=(NO_ROPE,), max_length=100, id="llama"), 4)


def test_positions_of_many_rounds_are_checked(few, monkeypatch, tmp_path):
    """Every round has at least one step: 110 need more positions than the steps of one, which fit."""
    config = GPT2Config(vocab_size=64, n_positions=128, n_embd=32, n_layer=2, n_head=2)
    monkeypatch.setattr("kvbench.bench.run.load_model", lambda *_: Model.from_module(GPT2LMHeadModel(config)))
    asked = BenchRequest(methods=("full",), model="random:two-layers", lengths=(32,), timings=("step",), rounds=1)
    assert {x.outcome for x in run_bench(asked).cells} == {"ok"}
    with pytest.raises(UserError, match="more tokens are beyond the 128 positions"):
        run_bench(replace(asked, rounds=110))


def test_a_diffusion_model_is_timed_by_whole_answers(kvbench, few):
    """Compared with no cache at the same number of denoising steps."""
    answer = kvbench(
        "bench", "--model", "mini-diffusion", "--method", "dkv-cache-decode", "--timing", "end-to-end", "--length", 32,
        "--rounds", 2, "--json",
    )
    assert answer.code == 0
    none, policy = answer.json["cells"]
    assert (none["method"]["name"], policy["method"]["name"]) == ("none", "dkv-cache-decode")
    assert policy["times"].keys() == {"token", "answer"}
    assert policy["times"]["answer"]["speedups"].keys() == {"none"}


def answers_of(job, **options):
    """Times two methods end to end."""
    methods = {"full": Full(), "snapkv": fitted("snapkv")}
    return time_answers(SimpleNamespace(
        **{"setting": job, "kernels": "torch", "rounds": {"end-to-end": 3}, "late": False, **options}
    ), methods, LENGTH, {"full": 1, "snapkv": 1})


def test_end_to_end_rounds_follow_one_warm_up_round(few):
    """Answers have equal length and include the prompt's time."""
    for answers in answers_of(setting()).values():
        seconds = answers.seconds
        assert {name: len(x) for name, x in seconds.items()} == {
            "prefill": 3, "compression": 3, "token": 3, "answer": 3
        }
        assert all(
            whole == pytest.approx(prompt + 4 * token)
            for whole, prompt, token in zip(seconds["answer"], seconds["prefill"], seconds["token"], strict=True)
        )


@pytest.mark.parametrize(("calls", "rounds"), [(5, 0), (8, 1)])
def test_a_device_that_is_lost_within_a_round_leaves_whole_rounds(few, monkeypatch, calls, rounds):
    """The methods before it in the round have one time more, which there is nothing to compare with."""
    made = itertools.count(1)

    def attempt_until_lost(make):
        return Failure("failed", "illegal address", device_lost=True) if next(made) == calls else attempt(make)

    monkeypatch.setattr("kvbench.bench.answer.attempt", attempt_until_lost)
    job = SimpleNamespace(setting=setting(), kernels="torch", rounds={"end-to-end": 3}, late=False)
    methods = {name: fitted(name) for name in ("full", "full-int8", "snapkv")}
    found = time_answers(job, methods, LENGTH, dict.fromkeys(methods, 1))
    lost = [name for name, x in found.items() if isinstance(x, Failure) and x.device_lost]
    left = [0 if isinstance(x, Failure) else len(x.seconds["answer"]) for name, x in found.items() if name not in lost]
    assert (len(lost), left) == (1, [rounds, rounds])


def test_no_cell_is_started_after_the_deadline(bench, monkeypatch):
    """The rest are `skipped` at every timing level, which is no failure. Here time is up after the first cell."""
    times = itertools.chain([0.0] * 3, itertools.repeat(math.inf))  # two anchors and a cell
    monkeypatch.setattr("kvbench.bench.job.time", SimpleNamespace(perf_counter=lambda: next(times)))
    answer = bench("--method", "snapkv", "--budget", "50%", "--seconds", 1)
    assert answer.code == 0
    first, *late = answer.json["cells"]
    assert (first["outcome"], {x["outcome"] for x in late}) == ("ok", {"skipped"})
    assert {x["timing"] for x in late} == {"kernel", "step", "end-to-end"}
    assert {x["reason"] for x in late} == {"no time was left for it"}


def test_a_file_that_another_process_writes_is_refused(tmp_path):
    """Both would time on one device, and each would write over the other's cells."""
    asked = BenchRequest(("full",), model="random:two-layers", lengths=(32,), out=tmp_path / "bench.json")
    with (
        holding(tmp_path / ".bench.json.lock", asked.out, "--out"),
        pytest.raises(UserError, match=r"another process is working on .*bench\.json\. Wait for it, or give another"),
    ):
        run_bench(asked)
    assert not asked.out.exists()


def test_operations_are_not_compared_after_the_deadline(triton_is, monkeypatch):
    """Comparing them compiles kernels for seconds, and the cells would be skipped."""
    triton_is("dense_attention", lambda x: x * 1.01)
    monkeypatch.setattr("kvbench.bench.job.time", SimpleNamespace(perf_counter=lambda: math.inf))
    options = {"kernels": "triton", "device": "cpu", "dtype": "float32"}
    asked = BenchRequest(("snapkv",), lengths=(64,), budget="50%", seconds=1, **options)
    assert {(x.outcome, x.reason) for x in run_bench(asked).cells} == {("skipped", "no time was left for it")}


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_on_a_gpu_steps_and_attention_are_graphs(kvbench, kernels):
    """If the method allows it, and then its anchors too; memory is the allocator's."""
    answer = kvbench(
        "bench", "--model", "random:two-layers", "--method", "snapkv", "--method", "h2o", "--budget", "25%", "--length",
        2048, "--batch", "2,max", "--memory", 1, "--kernels", kernels, "--device", "cuda", "--rounds", 5, "--json",
    )
    assert answer.code == 0, answer.err
    cells = answer.json["cells"]
    assert {x["outcome"] for x in cells} == {"ok"}
    graphs = {x["method"]["name"]: x["graph"] for x in cells if x["timing"] == "step"}
    assert graphs == {"full": True, "full-int8": True, "snapkv": True, "h2o": False}
    for cell in cells:
        assert cell["device_memory"]["steady_bytes"] >= cell["memory"]["stored_bytes"]
        assert cell["device_memory"]["peak_bytes"] >= cell["device_memory"]["steady_bytes"]
        for name, time in cell["times"].items():
            assert 0 < time["seconds"]["median"] < 10
            assert name == "compression" or cell["method"]["name"] == "full" or "full" in time["speedups"]


@pytest.mark.slow
def test_the_json_line_is_the_file(bench):
    """--json prints the same document."""
    answer = bench("--method", "full", "--timing", "step")
    assert json.loads(answer.out.splitlines()[-1])["schema_version"] == 2


@pytest.mark.parametrize("path", [
    *ROOT.glob("results/bench/*-steps.json"), *ROOT.glob("results/gpu/*/*.json"), *ROOT.glob("results/h[12]00/*.json"),
])
def test_committed_results_can_be_read(path):
    """Every committed file has this schema, and its cells without a time say why."""
    found = Bench.model_validate_json(path.read_text())
    assert found.cells
    assert all(x.reason for x in found.cells if x.outcome != "ok")
    if found.environment.gpu is None:
        assert found.status == "done"
        assert {x.outcome for x in found.cells} <= {"ok", "out of memory", "refused", "skipped"}


def test_the_printer_of_saved_files_names_synthetic_contexts(capsys):
    """Their times are no times of answers; prefilled contexts need no word."""
    gpu, cpu = (ROOT / "results" / x for x in ("gpu/nvidia-h200/core.json", "bench/cpu-2-cores-steps.json"))
    assert main(["--brief", str(gpu), str(cpu)]) == 0
    titles = [x for x in capsys.readouterr().out.splitlines() if x.startswith(str(ROOT))]
    assert [x.endswith("; synthetic contexts, no prompt was run") for x in titles] == [True, False]


@pytest.mark.parametrize(("arguments", "wrong"), [
    ([], "no file."), (["--help"], "no file --help."), (["--brief", "/nope"], "no file /nope."),
])
def test_the_printer_of_saved_files_says_which_files_it_wants(capsys, arguments, wrong):
    """`python -m kvbench.bench`: they are no folders of runs, and no file at all is no success."""
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert f"kvbench: {wrong}" in said and "files of `kvbench bench --out`" in said
