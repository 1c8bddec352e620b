"""Shared prefills: the same journals as single runs bit for bit, one pass per context, and faults that are caught."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvbench.budget import BudgetKind
from kvbench.engine import shared as sharing
from kvbench.engine.shared import predict_bytes, record
from kvbench.hf.tiny import tiny_model
from kvbench.registry import find_method, list_entries
from kvbench.runs.files import read_lines
from kvbench.runs.options import Request
from kvbench.sweep.cell import ModelCache, SweepCell, group_cells, run_group

TOYS = Path(__file__).parents[1] / "toys" / "toy.py"
REFUSED = {"nvfp4"}
"""It needs keys of 16 channels, and the toy's have 8. Methods that reuse parts are refused, too: the toy names none."""
METHODS = [
    *(
        x.name for x in list_entries("method")
        if x.models == "autoregressive" and x.name not in REFUSED and not find_method(x.name).reads_parts
    ),
    "snapkv+adakv", "snapkv+kivi", "razor-attention+kivi",
]
BUDGET = "40%"
"""More than the smallest budget of every method here; 25 % is less than that of some."""
SETTINGS = {"polarquant": ("levels=3",), "qjl": ("outliers=0",), "turboquant": ("outliers=0",)}
"""Settings that keys of 8 channels need."""
FEW = ["expected-attention", "h2o", "kivi", "kvzip", "kvzip-plus", "quest", "snapkv"]
UNSHARED = {"times": None, "shared_prefill": False, "started": "", "seconds": 0.0}
"""The fields that may differ."""

FAULTY = '''
from dataclasses import dataclass
from typing import ClassVar
import torch
from kvbench.method import BudgetKind, Card, Method, Moment
from kvbench.store import LayerKV

def card(name):
    return Card(name=name, title=name, idea="i. i.", arxiv=None, year=None, family="test", stages=(),
                budget=BudgetKind.STORED, heads="independent", upstream=None)

class RoundingKV(LayerKV):
    def _entries(self, step):
        rows = super()._entries(step)
        return {name: (x * 4).round() / 4 for name, x in rows.items()}

@dataclass(frozen=True)
class Rounding(Method):
    """Quantizes entries as they are added, so the prefill is not exact; the store hides it from the method."""
    card: ClassVar[Card] = card("rounding")
    def layer(self, index):
        return RoundingKV()
    def evict(self, kv, step):
        if step.moment.compresses:
            kv.keep(torch.arange(kv.n - self.rows, kv.n).expand(*kv.keys.shape[:2], -1))

@dataclass(frozen=True)
class RaisingOnce(Rounding):
    """As above, and the first context raises."""
    card: ClassVar[Card] = card("raisingonce")
    calls: ClassVar[list] = []
    def attend(self, kv, step):
        if not self.calls:
            self.calls.append(1)
            raise ValueError("once")
        return kv.attend(step)

@dataclass(frozen=True)
class Layered(Method):
    """The layers of a pass have a number in common, which decides what each of them keeps."""
    card: ClassVar[Card] = card("layered")
    shares_layers: ClassVar[bool] = True
    def evict(self, kv, step):
        assert ("layers" in step.shared) == (step.layer > 0)
        step.shared["layers"] = step.shared.get("layers", torch.tensor(0)) + 1
        if step.moment.compresses:
            last = kv.n - int(step.shared["layers"])
            kv.keep(torch.arange(last - self.rows, last).expand(*kv.keys.shape[:2], -1))

@dataclass(frozen=True)
class Halving(Method):
    """Changes the attention of the prefill."""
    card: ClassVar[Card] = card("halving")
    def attend(self, kv, step):
        return kv.attend(step) * (0.5 if step.moment.in_context and step.seen > 150 else 1)
    def evict(self, kv, step):
        if step.moment.compresses:
            kv.keep(torch.arange(kv.n - self.rows, kv.n).expand(*kv.keys.shape[:2], -1))

@dataclass(frozen=True)
class Whole(Method):
    """Runs the context in one pass, however it is cut."""
    card: ClassVar[Card] = card("whole")
    def prefill(self, session, chunks):
        return session.run_chunks([torch.cat(list(chunks), dim=1)], Moment.CONTEXT_END)
    def evict(self, kv, step):
        if step.moment.compresses:
            kv.keep(torch.arange(kv.n - self.rows, kv.n).expand(*kv.keys.shape[:2], -1))

@dataclass(frozen=True)
class Early(Method):
    """Evicts after every chunk of the context."""
    card: ClassVar[Card] = card("early")
    def evict(self, kv, step):
        if step.moment.in_context and kv.n > self.rows:
            kv.keep(torch.arange(kv.n - self.rows, kv.n).expand(*kv.keys.shape[:2], -1))
'''


def takes_budget(name):
    """Whether a budget decides what the method stores or reads."""
    return find_method(name).card.budget in (BudgetKind.STORED, BudgetKind.READ)


def runs_alone(name):
    """Whether a recorded prefill may lack the attention that it computes."""
    kind = find_method(name)
    return kind.card.family == "prefill" or kind.inexact_prefill is not None


def make_cells(methods, folder, model, **options):
    """One cell per method on the same three contexts."""
    request = Request(
        method="", task=f"{TOYS}:Toy", model=str(model), length=220, samples=2, device="cpu", out=folder, **options
    )
    return [
        SweepCell(i, name, replace(
            request, method=name, budget=BUDGET if takes_budget(name) else None, method_settings=SETTINGS.get(name, ()),
        ), {})
        for i, name in enumerate(methods)
    ]


def run_cells(cells, *, share):
    """The reports by method, and the lines of each journal without the fields that may differ."""
    found, cache = {}, ModelCache()
    for group in group_cells(cells, 1, share=share):
        for report in run_group(group, cache, lambda *_: None):
            assert report.folder is not None, report.error
            lines = read_lines(report.folder / "samples.jsonl")
            found[report.cell.name] = report, [without_times(x) for x in lines]
    return found


def without_times(line):
    """The line without the fields that may differ; plain decoding of lossless methods is timed, too."""
    lossless = None if line.lossless is None else line.lossless.model_copy(update={"plain_s": 0.0})
    return line.model_copy(update={**UNSHARED, "lossless": lossless})


def assert_same_lines(shared, alone):
    """The journals agree in every field: tokens, bytes, counters, agreement, kernels."""
    for name, (_, lines) in alone.items():
        assert shared[name][1] == lines, name


@pytest.mark.parametrize(("options", "shared"), [
    *(({x: y}, True) for x, y in (
        ("method", "h2o"), ("budget", "50%"), ("method_settings", ("window=16",)), ("samples", 3), ("batch", "2"),
        ("scorer", "ruler-string-match-all-strict@1"),
    )),
    *(({x: y}, False) for x, y in (
        ("model", "other"), ("device", "cuda"), ("dtype", "float32"), ("device_map", "auto"), ("task", "kv"),
        ("task_settings", ("haystack=noise",)), ("template", "none"), ("split", "dev"), ("seed", 1), ("length", 512),
        ("turns", 2), ("mode", "multi-turn"), ("visibility", "hidden"), ("chunk", 64), ("kernels", "triton"),
    )),
], ids=str)
def test_cells_share_the_prefills_that_are_the_same(options, shared):
    """Methods, their settings and scorers share them; a change of the entries or of the prompt does not."""
    first = Request(method="snapkv", task="niah", budget="25%")
    cells = [SweepCell(i, "", x, {}) for i, x in enumerate((first, replace(first, **options)))]
    assert group_cells(cells, 1, share=True) == ([cells] if shared else [[x] for x in cells])


@pytest.mark.parametrize("fits", [2, 1])
def test_a_shared_prefill_and_a_batch_go_together(model_folder, tmp_path, monkeypatch, fits):
    """Three questions about each context that fits into memory are decoded together, and each context is run once."""
    options = {"mode": "multi-request", "turns": 3, "batch": "6"}
    alone = run_cells(make_cells(["h2o", "snapkv"], tmp_path / "alone", model_folder, **options), share=False)
    made, record_really = [], sharing.record
    monkeypatch.setattr(sharing, "record", lambda *x, **y: made.append(x[1]) or record_really(*x, **y))

    def room(_, model):  # the first context has outputs
        return predict_bytes(model, 220, outputs=True) + int((fits - 0.5) * predict_bytes(model, 220, outputs=False))

    monkeypatch.setattr(sharing.SharedPrefill, "_room", room)
    shared = run_cells(make_cells(["h2o", "snapkv"], tmp_path / "shared", model_folder, **options), share=True)
    assert len(made) == 2
    for name, (report, lines) in shared.items():
        assert report.result.batch.size == 3 * fits
        tokens = [(x.ids, x.score, x.bytes, x.effect) for x in lines]
        assert tokens == [(x.ids, x.score, x.bytes, x.effect) for x in alone[name][1]]


def test_a_later_method_that_reads_hidden_states_costs_no_second_pass(model_folder, tmp_path, monkeypatch):
    """Batches are as small for the methods before it: each context is run once, where two fit without these states."""
    options = {"mode": "multi-request", "turns": 3, "batch": "6"}
    cells = make_cells(["h2o", "snapkv", "kvzip-plus"], tmp_path, model_folder, **options)
    made, record_really = [], sharing.record
    monkeypatch.setattr(sharing, "record", lambda *x, **y: made.append(x[1]) or record_really(*x, **y))
    monkeypatch.setattr(sharing.SharedPrefill, "_room", lambda _, model: 2 * predict_bytes(model, 220, outputs=True))
    reports = list(run_group(cells, ModelCache(), lambda *_: None))
    assert [(x.status, x.result.batch.size) for x in reports] == [("ok", 3)] * 3
    assert len(made) == 2


def test_memory_that_a_batch_takes_frees_no_recording(model_folder, tmp_path, monkeypatch):
    """Each context is run once, though less memory is free after the first recording."""
    made, record_really = [], sharing.record
    free = iter([10**9])
    monkeypatch.setattr(sharing, "free_bytes", lambda _: next(free, 1000))
    monkeypatch.setattr(sharing, "record", lambda *x, **y: made.append(x[1]) or record_really(*x, **y))
    options = {"mode": "multi-request", "turns": 3, "batch": "6"}
    cells = make_cells(["h2o", "snapkv"], tmp_path, model_folder, **options)
    assert [x.status for x in run_group(cells, ModelCache(), lambda *_: None)] == ["ok"] * 2
    assert len(made) == 2


def test_a_later_group_has_as_much_room_on_a_gpu(monkeypatch):
    """torch keeps the blocks of the first group's recordings and caches, and gives them to those of the next."""
    total, weights = 80 * 10**9, 16 * 10**9
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: weights)
    rooms = []
    for reserved in (weights, weights + 50 * 10**9):
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda x=reserved: x)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda x=reserved: (total - x, total))
        rooms.append(sharing.SharedPrefill()._room(SimpleNamespace(device=torch.device("cuda"))))
    assert rooms == [int(sharing.SHARE_OF_MEMORY * (total - weights))] * 2


@pytest.mark.parametrize(("methods", "mode", "chunk"), [
    (FEW, "single", 70), pytest.param(METHODS, "single", None, marks=pytest.mark.slow),
    pytest.param(METHODS, "multi-turn", 70, marks=pytest.mark.slow),
])
def test_a_shared_prefill_changes_no_method(model_folder, tmp_path, methods, mode, chunk):
    """Every method of the registry has the same lines, in one chunk and in several."""
    options = {"mode": mode, "visibility": "hidden", "chunk": chunk}
    alone = run_cells(make_cells(methods, tmp_path / "alone", model_folder, **options), share=False)
    shared = run_cells(make_cells(methods, tmp_path / "shared", model_folder, **options), share=True)
    assert_same_lines(shared, alone)
    latencies = {name: report.result.latency for name, (report, _) in shared.items()}
    sharing = {name for name, x in latencies.items() if x.untimed is not None}
    assert sharing >= {x for x in methods if not runs_alone(x)}
    assert all((latencies[name].ttft_s, latencies[name].n) == (None, 0) for name in sharing)


def test_a_context_is_run_once(model_folder, tmp_path, monkeypatch):
    """Three methods on two contexts: two recordings, and no other pass over a context, not even for the agreement."""
    made, passes = [], []
    record_really, run_really = sharing.record, sharing.Session.forward
    monkeypatch.setattr(sharing, "record", lambda *x, **y: made.append(x[1]) or record_really(*x, **y))

    def forward(session, ids, moment, *, keep=1):
        if moment.in_context and session._recording is None:
            passes.append(ids.shape[1])
        return run_really(session, ids, moment, keep=keep)

    monkeypatch.setattr(sharing.Session, "forward", forward)
    cells = make_cells(["knorm", "snapkv", "keydiff"], tmp_path, model_folder)
    reports = list(run_group(cells, ModelCache(), lambda *_: None))
    assert [x.status for x in reports] == ["ok"] * 3
    assert len(made) == 2
    assert passes == [len(x) for x in made]


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["Rounding", "Halving", "Early", "Whole"])
def test_a_method_without_exact_prefill_runs_alone(model_folder, tmp_path, capsys, name):
    """Whether its store, attention, eviction or passes differ: its lines are those of a single run, with times."""
    (tmp_path / "faulty.py").write_text(FAULTY)
    method = f"{tmp_path}/faulty.py:{name}"
    alone = run_cells(make_cells([method], tmp_path / "alone", model_folder, chunk=80), share=False)
    shared = run_cells(make_cells([method, "knorm"], tmp_path / "shared", model_folder, chunk=80), share=True)
    assert_same_lines(shared, alone)
    assert capsys.readouterr().err.count(f"{name.lower()} runs every context alone") == 1
    assert not any(x.shared_prefill for x in read_lines(shared[method][0].folder / "samples.jsonl"))
    assert shared[method][0].result.latency.untimed is None
    assert shared["knorm"][0].result.latency.untimed is not None


def test_a_batch_of_a_method_without_exact_prefill_runs_together(model_folder, tmp_path, capsys):
    """Without the recordings."""
    (tmp_path / "faulty.py").write_text(FAULTY)
    method = f"{tmp_path}/faulty.py:Rounding"
    alone = run_cells(make_cells([method], tmp_path / "alone", model_folder, chunk=80), share=False)
    cells = make_cells([method, "knorm"], tmp_path / "shared", model_folder, chunk=80, batch="2")
    shared = run_cells(cells, share=True)
    assert [x.model_copy(update={"batch": None}) for x in shared[method][1]] == alone[method][1]
    assert capsys.readouterr().err.count("rounding runs every context alone") == 1
    found = shared[method][0].result.batch
    assert (found.size, found.alone) == (2, None)


@pytest.mark.parametrize(("name", "batch"), [("Rounding", None), ("RaisingOnce", None), ("RaisingOnce", "2")])
def test_no_method_takes_a_recording_that_it_was_not_compared_with(model_folder, tmp_path, monkeypatch, name, batch):
    """The first context has no room, or raises: the next one is compared. In a batch, all of its contexts run again."""
    if name == "Rounding":
        monkeypatch.setattr(sharing, "predict_bytes", lambda *_, outputs, hidden: 1 + outputs)  # without them, it fits
        monkeypatch.setattr(sharing.SharedPrefill, "_room", lambda *_: 1)
    found = []
    for share in (False, True):
        path = tmp_path / str(share) / "faulty.py"  # each loaded anew
        path.parent.mkdir()
        path.write_text(FAULTY)
        cells = make_cells([f"{path}:{name}", "knorm"], tmp_path / str(share), model_folder, batch=batch)
        found.append(list(run_cells(cells, share=share).values()))
    assert [lines for _, lines in found[1]] == [lines for _, lines in found[0]]


def test_layers_have_in_common_what_one_pass_left(model_folder, tmp_path):
    """In a replayed prefill, too, where the steps are those of another method's pass."""
    (tmp_path / "faulty.py").write_text(FAULTY)
    methods = [f"{tmp_path}/faulty.py:Layered", "knorm"]
    alone = run_cells(make_cells(methods, tmp_path / "alone", model_folder), share=False)
    shared = run_cells(make_cells(methods, tmp_path / "shared", model_folder), share=True)
    assert_same_lines(shared, alone)
    assert [x.error for x in shared[methods[0]][1]] == [None, None]
    assert shared[methods[0]][0].result.latency.untimed is not None


def test_a_line_of_the_log_has_its_cell_s_name(model_folder, tmp_path, capsys):
    """Also where cells take turns."""
    (tmp_path / "faulty.py").write_text(FAULTY)
    method = f"{tmp_path}/faulty.py:RaisingOnce"
    run_cells(make_cells(["knorm", method], tmp_path, model_folder), share=True)
    assert f"{method}: sample 0 failed: ValueError: once (faulty.py, line 35)" in capsys.readouterr().err


def test_one_context_is_no_plural(model_folder, tmp_path):
    """In the reason why a run has no times."""
    cells = make_cells(["knorm", "snapkv"], tmp_path, model_folder)
    cells = [replace(x, request=replace(x.request, samples=1)) for x in cells]
    untimed = [x.result.latency.untimed for x in run_group(cells, ModelCache(), lambda *_: None)]
    assert untimed == ["1 context took a prefill that other runs of the sweep share"] * 2


def test_a_cell_that_is_left_of_a_group_has_no_times(model_folder, tmp_path):
    """It records and takes its prefills by itself: another worker may still use its GPU."""
    (cell,) = make_cells(["knorm"], tmp_path, model_folder)
    (report,) = run_group([cell], ModelCache(), lambda *_: None, share=True)
    assert report.result.latency.untimed is not None


def test_a_cell_that_ends_first_takes_nothing_from_the_others(model_folder, tmp_path):
    """Of two cells of a method that uses the model itself, the later one is finished already."""
    cells = make_cells(["infinigen"] * 2, tmp_path / "shared", model_folder)
    cells = [replace(x, request=replace(x.request, budget=y)) for x, y in zip(cells, ("30%", "50%"), strict=True)]
    for _ in run_group(cells[1:], ModelCache(), lambda *_: None):
        pass
    reports = {x.cell.request.budget: x for x in run_group(cells, ModelCache(), lambda *_: None)}
    assert reports["50%"].existing
    assert [x.result.n_failed for x in reports.values()] == [0, 0]


def test_a_batch_of_auto_that_is_another_cell_s_batch_is_refused(model_folder, tmp_path):
    """The batch is known once the model is loaded; the first of the two cells runs."""
    cells = [
        replace(x, name=y, request=replace(x.request, batch=y))
        for x, y in zip(make_cells(["snapkv"] * 2, tmp_path, model_folder), ("2", "auto"), strict=True)
    ]
    reports = {x.cell.name: x for x in run_group(cells, ModelCache(), lambda *_: None)}
    assert reports["auto"].error == "'auto' is the same run as '2'. Remove one of them."
    assert reports["2"].status == "ok"


def test_a_recording_too_large_for_the_memory_is_not_made(model_folder, tmp_path, monkeypatch, capsys):
    """The methods run alone, and a line names the bytes."""
    monkeypatch.setattr(sharing, "free_bytes", lambda _: 1000)
    cells = make_cells(["knorm", "snapkv"], tmp_path, model_folder)
    reports = list(run_group(cells, ModelCache(), lambda *_: None))
    assert [x.result.latency.untimed for x in reports] == [None, None]
    assert capsys.readouterr().err.count("every method runs it alone") == 1


def test_contexts_that_are_not_shared_are_still_decoded_together(model_folder, tmp_path, monkeypatch):
    """Where no recording fits into memory, there is none for which a batch would have to be smaller."""
    monkeypatch.setattr(sharing, "free_bytes", lambda _: 1000)
    cells = make_cells(["knorm", "snapkv"], tmp_path, model_folder, batch="2")
    reports = list(run_group(cells, ModelCache(), lambda *_: None))
    assert [x.result.batch.size for x in reports] == [2, 2]


def test_predicted_bytes_are_those_of_the_recording():
    """With and without attention outputs and hidden states."""
    model = tiny_model(query_heads=4, kv_heads=2)
    for outputs, hidden in itertools.product((False, True), repeat=2):
        made = record(model, list(range(40)), 16, "torch", outputs=outputs, hidden=hidden)
        steps = [step for part in made.passes for step in part.steps]
        found = [x for part in made.passes for x in part.outputs]
        found += [x for step in steps for x in (step.query, step.key, step.value, step.hidden) if x is not None]
        assert sum(x.nbytes for x in found) == predict_bytes(model, 40, outputs=outputs, hidden=hidden)


def test_groups_hold_the_cells_on_the_same_contexts(model_folder, tmp_path):
    """By seed here; divided where there are more workers than groups; alone without sharing."""
    cells = make_cells(["knorm", "snapkv", "keydiff"], tmp_path, model_folder)
    other = [replace(x, request=replace(x.request, seed=1)) for x in cells]
    names = lambda groups: [[(x.name, x.request.seed) for x in group] for group in groups]  # noqa: E731
    assert names(group_cells([*cells, *other], 1, share=True)) == [
        [(x, 0) for x in ("knorm", "snapkv", "keydiff")], [(x, 1) for x in ("knorm", "snapkv", "keydiff")],
    ]
    assert [len(x) for x in group_cells(cells, 2, share=True)] == [2, 1]
    assert [len(x) for x in group_cells(cells, 1, share=False)] == [1, 1, 1]
