"""`--batch`: the journal of a run whose answers are decoded together, its record, and bad input."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvbench import log
from kvbench.engine import passes
from kvbench.engine.session import Session
from kvbench.errors import DeviceLostError, UserError
from kvbench.hf.tiny import tiny_model
from kvbench.method import Budget
from kvbench.methods.eviction.h2o import H2O
from kvbench.methods.merging.kvmerger import KVMerger
from kvbench.methods.retrieval.instinfer import InstInfer
from kvbench.methods.retrieval.shadowkv import ShadowKV
from kvbench.runs import batch as batching
from kvbench.runs.batch import count_different, divide_batch, predict_bytes
from kvbench.runs.examples import make_examples
from kvbench.runs.files import read_lines
from kvbench.runs.lines import SampleFailedError, fail
from kvbench.runs.options import Request
from kvbench.runs.prepare import prepare
from kvbench.runs.runner import run
from kvbench.store.entries import storage_bytes
from kvbench.task import Encoded, EncodedTurn, Mode

TOYS = Path(__file__).parents[1] / "toys" / "toy.py"
CHANGED = {"times": None, "batch": None, "started": "", "seconds": 0.0, "agreement": None}

FAULTY = '''
from dataclasses import dataclass
from typing import ClassVar
import torch
import weakref
from kvbench.method import BudgetKind, Card, Method

def card(name):
    return Card(name=name, title=name, idea="i. i.", arxiv=None, year=None, family="test", stages=(),
                budget=BudgetKind.STORED, heads="independent", upstream=None)

class Last(Method):
    def evict(self, kv, step):
        if step.moment.compresses:
            kv.keep(torch.arange(kv.n - self.rows, kv.n).expand(*kv.keys.shape[:2], -1))

@dataclass(frozen=True)
class Own(Last):
    """Generates in its own way."""
    card: ClassVar[Card] = card("own")
    def generate(self, session, max_new_tokens, stop):
        return session.greedy(1, stop)

@dataclass(frozen=True)
class Picky(Last):
    """Raises on one of the contexts, while its answer is generated."""
    card: ClassVar[Card] = card("picky")
    def attend(self, kv, step):
        if step.moment == "decode" and abs(float(kv.keys[0, 0, 0, 0]) - PLACE) < 1e-6:
            raise ValueError("not this one")
        return kv.attend(step)

@dataclass(frozen=True)
class Leaky(Last):
    """Raises on every context, and counts the tensors of earlier ones that are still there."""
    card: ClassVar[Card] = card("leaky")
    held: ClassVar[list] = []
    counts: ClassVar[list] = []
    def attend(self, kv, step):
        self.counts.append(sum(x() is not None for x in self.held))
        tensor = torch.ones(9)
        self.held.append(weakref.ref(tensor))
        raise ValueError("no room")

@dataclass(frozen=True)
class Overflowing(Last):
    """Attention that is not a number, from the first token of the answer on."""
    card: ClassVar[Card] = card("overflowing")
    def attend(self, kv, step):
        return kv.attend(step) * (torch.nan if step.moment == "decode" else 1)
'''


def make_request(model_folder, out, **options):
    """A run on four contexts."""
    options = {"method": "snapkv", "length": 180, "samples": 4, **options}
    return Request(task=f"{TOYS}:Toy", model=str(model_folder), device="cpu", out=out, **options)


def make_lines(request):
    """The result of a run, and its lines without the fields that a batch changes; agreements apart."""
    outcome = run(prepare(request))
    lines = read_lines(outcome.folder / "samples.jsonl")
    agreements = [x.agreement for x in lines]
    return outcome.result, [x.model_copy(update=CHANGED) for x in lines], agreements, lines


MODES = {
    "single": {}, "multi-request": {"mode": "multi-request"}, "multi-turn": {"mode": "multi-turn"},
    "own history": {"mode": "multi-turn", "history": "own"}, "chunks": {"mode": "multi-request", "chunk": 50},
    "recompress": {"mode": "multi-turn", "recompress": True},
}


@pytest.mark.parametrize("batch", ["1", "3"])
def test_an_answer_to_a_visible_question_reads_the_decoded_stream(model_folder, tmp_path, batch):
    """One at a time, and where the questions of a conversation are asked ahead."""
    request = make_request(
        model_folder, tmp_path, method="cachegen", mode="multi-turn", samples=1, batch=batch
    )
    found = [x.bytes for x in make_lines(request)[1]]
    assert found[0].stored_bytes < found[0].end_full_bytes
    assert [x.read_bytes_per_step for x in found] == [x.end_full_bytes for x in found]
    assert found[0].peak_bytes >= found[0].end_bytes >= found[0].end_full_bytes


@pytest.mark.few
@pytest.mark.parametrize("batch", ["2", "7"])
@pytest.mark.parametrize("mode", MODES)
def test_a_batch_changes_no_line(model_folder, tmp_path, mode, batch):
    """Contexts, questions, or both together: tokens, scores, bytes and counters are those of one at a time."""
    result, lines, agreements, _ = make_lines(make_request(model_folder, tmp_path, **MODES[mode]))
    other, found, compared, full = make_lines(make_request(model_folder, tmp_path, **MODES[mode], batch=batch))
    assert found == lines
    for a, b in zip(agreements, compared, strict=True):
        assert (a.top1, a.n, a.kl) == (b.top1, b.n, pytest.approx(b.kl, abs=1e-5))
    assert other.run_id != result.run_id
    assert (result.batch, result.latency.untimed) == (None, None)
    contexts, questions = divide_batch(int(batch), other.spec)
    assert other.batch.size == min(4, contexts) * questions
    assert other.batch.alone is None
    assert other.latency.untimed == f"answers were decoded in batches of up to {other.batch.size}"
    assert all(x.times is None for x in full)
    assert (other.latency.n, other.latency.ttft_s) == (0, None)


@pytest.mark.parametrize(("mode", "history", "batch", "found"), [
    ("single", "reference", 6, (6, 1)), ("multi-request", "reference", 6, (2, 3)),
    ("multi-turn", "reference", 6, (2, 3)), ("multi-turn", "own", 6, (6, 1)),  # each question waits for an answer
    ("multi-request", "reference", 2, (1, 2)), ("multi-request", "reference", 8, (2, 3)),
])
def test_a_batch_takes_the_questions_of_a_context_first(mode, history, batch, found):
    """Contexts at a time, and questions about each of three."""
    turns = 1 if mode == "single" else 3
    spec = SimpleNamespace(mode=Mode(mode), history=history, turns=turns, batch=batch, visibility="hidden")
    assert divide_batch(batch, spec) == found
    assert batching.count_contexts(SimpleNamespace(spec=spec), None, SimpleNamespace(context=(1,))) == found[0]


@pytest.mark.parametrize(("visibility", "tokens"), [("hidden", 5), ("visible", 8)])
def test_a_question_belongs_to_the_shared_prefill_where_it_is_visible(visibility, tokens):
    asked = []
    spec = SimpleNamespace(mode=Mode.SINGLE, history="reference", turns=1, batch=2, visibility=visibility)
    shared = SimpleNamespace(fits=lambda _, n: asked.append(n))
    first = Encoded(context=(1,) * 5, turns=(EncodedTurn(first=(2,) * 3, later=(), answer=()),))
    batching.count_contexts(SimpleNamespace(spec=spec, model=None), shared, first)
    assert asked == [tokens]


def test_tokens_differ_where_only_one_answer_has_them():
    """Of three and two tokens the second differs, and the third has no other; an answer may have no counterpart."""
    first, second, third = (SimpleNamespace(ids=x) for x in ((1, 2, 3), (1, 9), (4,)))
    assert count_different([first], [second]) == (3, 2)
    assert count_different([first, third], [first]) == (4, 1)
    assert count_different([first], [first, third]) == (4, 1)


def test_the_questions_of_a_batch_run_together_and_the_first_is_answered_again(model_folder, tmp_path, monkeypatch):
    """Alone, which in float32 gives the same tokens; the seconds of the batch are divided over its answers."""
    job = prepare(make_request(model_folder, tmp_path, mode="multi-request", dtype="float32", batch="6"))
    really, together = passes.run_together, []
    monkeypatch.setattr(passes, "run_together", lambda x: together.append(len(x)) or really(x))
    begun = time.perf_counter()
    done = batching.run_batch(job, list(make_examples(job, range(2))), None, compare=True)
    lines = [x for found, _ in done for x in found]
    assert max(together) == len(lines) == 6
    assert [(x.batch.size, x.times) for x in lines] == [(6, None)] * 6
    assert [(x.batch.tokens, x.batch.different) for x in lines] == [(len(lines[0].ids), 0)] + [(None, None)] * 5
    assert sum(x.seconds for x in lines) <= time.perf_counter() - begun


def test_batch_1_is_a_plain_run(model_folder, tmp_path):
    """The same run id, with times."""
    plain, one = (prepare(make_request(model_folder, tmp_path, batch=x)) for x in (None, "1"))
    assert plain.spec.run_id == one.spec.run_id
    assert run(one).result.latency.n == 4


def test_a_method_that_generates_in_its_own_way_runs_one_by_one(model_folder, tmp_path):
    """The result names the reason, and has no times all the same."""
    (tmp_path / "own.py").write_text(FAULTY)
    request = make_request(model_folder, tmp_path, method=f"{tmp_path}/own.py:Own", batch="4", dtype="bfloat16")
    result, *_ = make_lines(request)
    assert (result.batch.size, result.batch.alone) == (1, "own generates answers in its own way")
    assert result.batch.tokens is None  # there is no other answer to compare
    assert result.latency.untimed is not None


def test_answers_that_run_one_by_one_have_their_own_seconds(model_folder, tmp_path):
    """A mean over the batch could be less than the plain decoding that a lossless method times within a long one."""
    (tmp_path / "own.py").write_text(FAULTY)
    *_, lines = make_lines(make_request(model_folder, tmp_path, method=f"{tmp_path}/own.py:Own", batch="4"))
    assert len({x.seconds for x in lines}) == len(lines) == 4


def test_samples_of_a_batch_start_with_it(model_folder, tmp_path, monkeypatch):
    """Their seconds are shares of its time: a late one's, from its own start on, would end after the batch."""
    late = SimpleNamespace(now=lambda _: datetime(2100, 1, 1, tzinfo=UTC))
    monkeypatch.setattr("kvbench.runs.sample.datetime", late)
    *_, lines = make_lines(make_request(model_folder, tmp_path, batch="4"))
    assert all(x.started < "2100" for x in lines)


def test_a_sample_that_raises_fails_alone(model_folder, tmp_path, capsys):
    """The other samples of its batch have their answers, and the lines are those of one at a time."""
    job = prepare(make_request(model_folder, tmp_path, method=f"{TOYS}:Last"))
    _, _, encoded = list(make_examples(job, range(4)))[2]
    prompt = encoded.context + encoded.turns[0].first
    with Session(job.model, job.method.fit(job.budget, job.model.shape(len(prompt)))) as session:
        session.prefill(prompt)
        place = float(session.layers[0].keys[0, 0, 0, 0])
    (tmp_path / "picky.py").write_text(FAULTY.replace("PLACE", repr(place)))
    picky = f"{tmp_path}/picky.py:Picky"
    _, lines, *_ = make_lines(make_request(model_folder, tmp_path, method=picky))
    result, found, *_ = make_lines(make_request(model_folder, tmp_path, method=picky, batch="4"))
    assert [x.error is None for x in found] == [x.error is None for x in lines] == [True, True, False, True]
    assert found == lines
    assert "a batch of samples 0, 1, 2, 3 raised ValueError" in capsys.readouterr().err
    assert result.batch.alone == "a batch raised an error"


@pytest.mark.parametrize("batch", ["1", "3"])
def test_a_failed_sample_frees_its_tensors(model_folder, tmp_path, batch):
    """Before the next one is run: none runs out of memory because another one did."""
    (tmp_path / "own.py").write_text(FAULTY)
    job = prepare(make_request(model_folder, tmp_path, method=f"{tmp_path}/own.py:Leaky", batch=batch))
    assert run(job).result.n_failed == 4
    assert set(type(job.method).counts) == {0}
    assert len(type(job.method).counts) >= 4
    assert "in attend" in (job.folder / "errors.log").read_text()
    assert "SampleFailedError" not in (job.folder / "errors.log").read_text()


def test_a_batch_that_loses_the_gpu_stops_the_run(model_folder, tmp_path, monkeypatch):
    """None of its samples is tried again."""
    (tmp_path / "own.py").write_text(FAULTY)
    job = prepare(make_request(model_folder, tmp_path, method=f"{tmp_path}/own.py:Leaky", batch="3"))
    monkeypatch.setattr("kvbench.runs.lines.is_device_lost", lambda: True)
    with pytest.raises(DeviceLostError, match=r"^samples 0, 1, 2 of leaky raised ValueError"):
        run(job)


def test_a_comparison_without_tokens_is_one(model_folder, tmp_path, monkeypatch):
    """Both answers may be empty, and no other batch has to be compared."""
    job = prepare(make_request(model_folder, tmp_path, batch="2"))
    monkeypatch.setattr(batching, "count_different", lambda *_: (0, 0))
    (lines, _), _ = batching.run_batch(job, list(make_examples(job, range(2))), None, compare=True)
    assert (lines[0].batch.tokens, lines[0].batch.different) == (0, 0)


def test_logits_that_are_not_numbers_fail_the_sample(model_folder, tmp_path):
    """With the element type and the next step; token 0 is no answer."""
    (tmp_path / "own.py").write_text(FAULTY)
    request = make_request(model_folder, tmp_path, method=f"{tmp_path}/own.py:Overflowing")
    result, *_ = make_lines(request)
    assert result.n_failed == 4
    assert "the model's logits are not numbers (NaN) in float32: method overflowing makes them so" in result.error


def test_the_16_bit_comparison_waits_for_a_batch_that_runs(model_folder, tmp_path):
    """A sample of the first batch raises, so the second batch is compared with single answers."""
    options = {"dtype": "bfloat16", "samples": 4, "batch": "2"}
    job = prepare(make_request(model_folder, tmp_path, method=f"{TOYS}:Last", **options))
    *_, encoded = next(iter(make_examples(job, [0])))
    prompt = encoded.context + encoded.turns[0].first
    with Session(job.model, job.method.fit(job.budget, job.model.shape(len(prompt)))) as session:
        session.prefill(prompt)
        place = float(session.layers[0].keys[0, 0, 0, 0])
    (tmp_path / "picky.py").write_text(FAULTY.replace("PLACE", repr(place)))
    result = run(prepare(make_request(model_folder, tmp_path, method=f"{tmp_path}/picky.py:Picky", **options))).result
    assert result.n_failed == 1
    assert result.batch.tokens is not None


def test_a_resumed_run_is_compared_in_16_bits_once(model_folder, tmp_path):
    """Its record is that of an uninterrupted run."""
    request = make_request(model_folder, tmp_path, dtype="bfloat16", batch="2")
    whole, _, _, lines = make_lines(request)
    folder = tmp_path / whole.run_id
    (folder / "samples.jsonl").write_text("".join(f"{x.model_dump_json()}\n" for x in lines if x.index < 2))
    (folder / "result.json").unlink()
    assert run(prepare(request)).result.batch == whole.batch


def test_an_answer_that_fails_alone_is_not_compared(model_folder, tmp_path, monkeypatch, capsys):
    """Its tokens do not count as different, and the next batch is compared."""
    really, calls = batching.run_sample, []

    def run_sample(job, index, example, encoded, *others, **options):
        calls.append(index)
        if len(calls) == 1:
            raise SampleFailedError([fail(example, index, 0, MemoryError("no room"), encoded.prompt_hash, "", 0.0)])
        return really(job, index, example, encoded, *others, **options)

    monkeypatch.setattr(batching, "run_sample", run_sample)
    job = prepare(make_request(model_folder, tmp_path, dtype="bfloat16", batch="2"))
    outcome = run(job)
    lines = read_lines(outcome.folder / "samples.jsonl")
    assert [x.batch.tokens is None for x in lines] == [True, True, False, True]
    assert "sample 0 alone failed, so the batch is not compared with it: MemoryError" in capsys.readouterr().err


def test_a_batch_says_how_many_contexts_it_has_prefilled(model_folder, tmp_path, monkeypatch, capsys):
    """No sample is finished before all of its batch are: there are lines until then, here after each context."""
    monkeypatch.setattr(log, "EVERY", 0.0)
    make_lines(make_request(model_folder, tmp_path, batch="3"))
    said = [x for x in capsys.readouterr().err.splitlines() if x.startswith("prefilled")]
    assert said == ["prefilled 1 of 3 contexts", "prefilled 2 of 3 contexts"]


def test_a_batch_counts_the_questions_that_a_context_has(model_folder, tmp_path):
    """A record of a data set may have fewer than were asked for: here two and three in turn."""
    task = tmp_path / "few.py"
    fewer = TOYS.read_text().replace("range(turns))", 'range(turns - text.count("a") % 2))')
    task.write_text(fewer)
    request = make_request(model_folder, tmp_path, mode="multi-request", batch="12")
    *_, lines = make_lines(replace(request, task=f"{task}:Toy"))
    assert {x.batch.size for x in lines} == {len(lines)}
    assert 8 < len(lines) < 12


@pytest.mark.parametrize("method", ["h2o", "locret", "instinfer", "shadowkv"])
def test_every_turn_of_a_conversation_holds_a_copy(model_folder, tmp_path, method):
    """All questions of a conversation are asked before the first batch of answers."""
    later, found = 20, []
    for mode in ("multi-request", "multi-turn"):
        job = prepare(make_request(model_folder, tmp_path, method=method, mode=mode, turns=6, batch="2"))
        shape = job.model.shape(160)
        fitted = job.method.fit(job.budget, shape)
        found.append(predict_bytes(2, job.spec, fitted, shape, 160 + later))
        copied = fitted.declared_bytes(shape) if method in ("h2o", "locret") else fitted.copied_bytes(shape)
    assert found[1] - found[0] == 4 * (2 * later * shape.full_bytes // shape.length + copied)


def test_the_bytes_of_a_batch_are_those_of_two_full_caches_and_of_its_answers(model_folder, tmp_path):
    """By hand, in full caches of a context: two contexts are kept to a quarter, and what follows is half as long.

    Each of the three answers about a context has the entries that follow, and a copy of them.
    """
    options = {"method": "random", "mode": "multi-request", "turns": 3, "batch": "6"}
    job = prepare(make_request(model_folder, tmp_path, **options))
    shape = job.model.shape(160)
    fitted = job.method.fit(job.budget, shape)
    assert predict_bytes(6, job.spec, fitted, shape, 240) == (2 + 2 * (0.25 + 0.5 + 3 * 2 * 0.5)) * shape.full_bytes


def test_the_bytes_of_a_batch_include_what_is_kept_for_scoring(model_folder, tmp_path):
    """Next to the full caches; bytes that a method cannot declare are those of the full cache."""
    job = prepare(make_request(model_folder, tmp_path, batch="2"))
    shape = job.model.shape(160)
    fitted = H2O().fit(job.budget, shape)
    scoring = fitted.running_bytes(shape)
    stored = fitted.declared_bytes(shape)
    assert predict_bytes(2, job.spec, fitted, shape, 160) == 2 * shape.full_bytes + scoring + 2 * 2 * stored
    assert scoring > 0
    undeclared = KVMerger(mode="eps").fit(None, shape)
    expected = 4 * shape.full_bytes + undeclared.running_bytes(shape) + 2 * undeclared.copied_bytes(shape)
    assert predict_bytes(2, job.spec, undeclared, shape, 160) == expected


def test_answers_that_wait_for_each_other_need_no_more_than_those_of_other_contexts(model_folder, tmp_path):
    """One question of a conversation is held at a time."""
    found = []
    for options in ({"mode": "multi-turn", "history": "own"}, {"mode": "single"}):
        job = prepare(make_request(model_folder, tmp_path, **options))
        shape = job.model.shape(160)
        found.append(predict_bytes(2, job.spec, job.method.fit(job.budget, shape), shape, 180))
    assert found[0] == found[1]


@pytest.mark.parametrize("method", [InstInfer(), ShadowKV()])
def test_bytes_that_a_fork_copies_are_those_that_its_method_declares(method):
    """Entries are shared; keys by channel, and slots with their numbers, are not."""
    model = tiny_model()
    shape = model.shape(160)
    fitted = method.fit(Budget.parse("25%"), shape)
    with Session(model, fitted, capacity=160) as session:
        session.prefill([x * 7 % 64 for x in range(160)])
        held = [x for store in session.layers for x in store.tensors()]
        forked = [x for store in session.fork().layers for x in store.tensors()]
        assert storage_bytes([*held, *forked]) - storage_bytes(held) == fitted.copied_bytes(shape) > 0


def test_differences_are_counted_in_16_bits(model_folder, tmp_path):
    """The first question is answered alone, too; in float32 the tests prove equality."""
    options = {"mode": "multi-request", "batch": "3", "method": "snapkv"}
    half, lines, *_ = make_lines(make_request(model_folder, tmp_path, dtype="bfloat16", **options))
    assert half.batch.different is not None
    assert half.batch.tokens - half.batch.different <= len(lines[0].ids) <= half.batch.tokens
    single, *_ = make_lines(make_request(model_folder, tmp_path, dtype="float32", **options))
    assert (single.batch.tokens, single.batch.different) == (None, None)


@pytest.mark.parametrize(("batch", "message"), [
    ("0", "batch '0' must be a whole number, 1 or more, or auto"), ("-2", "batch '-2' must be"),
    ("many", "batch 'many' must be"), ("1.5", "batch '1.5' must be"),
])
def test_bad_batches_are_refused(kvbench, arguments, batch, message):
    """With the value, the rule and the next step; nothing is written."""
    answer = kvbench(*arguments, "--method", "full", "--batch", batch)
    assert answer.code == 2
    assert message in answer.err


def test_a_batch_beyond_the_memory_is_refused(model_folder, tmp_path, monkeypatch):
    """The message names what fits, and `auto` chooses it."""
    job = prepare(make_request(model_folder, tmp_path, mode="multi-request"))
    shape = job.model.shape(160)
    fitted = job.method.fit(job.budget, shape)
    limit = predict_bytes(4, job.spec, fitted, shape, 180)
    weights = job.model.module.num_parameters() * 4
    monkeypatch.setattr(batching, "_total_bytes", lambda _: limit / batching.SHARE_OF_MEMORY + weights)
    assert batching.resolve_batch(None, job, fitted, shape, 180) == 4
    assert batching.resolve_batch(4, job, fitted, shape, 180) == 4
    with pytest.raises(UserError, match=r"batch 64 needs about .* Use --batch 4 or less, or --batch auto"):
        batching.resolve_batch(64, job, fitted, shape, 180)


def test_no_memory_left_is_no_negative_limit(model_folder, tmp_path, monkeypatch):
    """In the message, where the weights take everything."""
    job = prepare(make_request(model_folder, tmp_path))
    shape = job.model.shape(160)
    monkeypatch.setattr(batching, "_total_bytes", lambda _: 0)
    fitted = job.method.fit(job.budget, shape)
    allowed = r" and 0\.00 GB are allowed \(50% of cpu memory left by the weights\)\. Use --batch 1 or less"
    with pytest.raises(UserError, match=allowed):
        batching.resolve_batch(2, job, fitted, shape, 180)
    assert batching.resolve_batch(1, job, fitted, shape, 180) == 1


def test_a_model_on_several_gpus_has_the_memory_of_all(model_folder, tmp_path, monkeypatch):
    """Its weights on disk take none of it."""
    job = prepare(make_request(model_folder, tmp_path, mode="multi-request"))
    shape = job.model.shape(160)
    fitted = job.method.fit(job.budget, shape)
    places = {"cuda:0": 5_000_000, "cuda:1": 7_000_000, "meta": 90_000_000}
    weights = [SimpleNamespace(nbytes=size, device=torch.device(place)) for place, size in places.items()]
    module = SimpleNamespace(parameters=lambda: weights, num_parameters=lambda: sum(places.values()) // 4)
    model = SimpleNamespace(
        masking=None, module=module, device=torch.device("cuda:0"),
        device_map={"embedding": "cuda:0", "first": "cuda:0", "second": "cuda:1", "third": "disk"},
    )
    limit = predict_bytes(4, job.spec, fitted, shape, 180) / batching.SHARE_OF_MEMORY
    total = round(limit + 12_000_000) // 2 + 1
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=total))
    job = replace(job, model=model, spec=job.spec.model_copy(update={"device": "cuda"}))
    assert batching.resolve_batch(None, job, fitted, shape, 180) == 4


def test_auto_is_no_larger_than_the_run(model_folder, tmp_path):
    """Four contexts, or four with three questions each, unless these wait for answers; and at most 64 of any number."""
    assert prepare(make_request(model_folder, tmp_path, batch="auto")).spec.batch == 4
    assert prepare(make_request(model_folder, tmp_path, batch="auto", mode="multi-request")).spec.batch == 12
    own = prepare(make_request(model_folder, tmp_path, batch="auto", mode="multi-turn", history="own"))
    assert own.spec.batch == 4
    shape = own.model.shape(160)
    many = replace(own, spec=own.spec.model_copy(update={"samples": 1000}))
    assert batching.resolve_batch(None, many, own.method.fit(own.budget, shape), shape, 180) == 64


def test_a_last_batch_of_one_is_no_failure(model_folder, tmp_path):
    """Four samples, three at a time: no answer was decoded alone for a reason."""
    result, *_, lines = make_lines(make_request(model_folder, tmp_path, batch="3"))
    assert [x.batch.size for x in lines] == [3, 3, 3, 1]
    assert (result.batch.size, result.batch.alone) == (3, None)


def test_a_batch_of_one_says_why_it_has_no_times(model_folder, tmp_path):
    """A run of a single answer."""
    result, *_ = make_lines(make_request(model_folder, tmp_path, batch="4", samples=1))
    assert result.latency.untimed == "a batch was asked for, but only one answer was left to decode"
