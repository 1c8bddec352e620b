"""DuoAttention: streaming heads are StreamingLLM's, retrieval heads the full cache's, and gates say which is which."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf.rope import NO_ROPE
from kvbench.hf.tiny import VOCABULARY, tiny_model
from kvbench.method import Budget, LayerShape, Moment, Shape, Step
from kvbench.methods.baseline.full import Full
from kvbench.methods.eviction.streaming_llm import StreamingLLM
from kvbench.methods.heads.duo_attention import DuoAttention
from kvbench.methods.heads.store import HeadGroupsKV, StreamingKV
from kvbench.store import Fact

SINKS, RECENT = 4, 12
PAPER = Budget.parse("paper")
pytestmark = pytest.mark.usefixtures("profile_cache")


def ids(count, seed=1):
    """Random tokens. [1, T]"""
    return torch.randint(VOCABULARY, (1, count), generator=torch.Generator().manual_seed(seed))


def conversation(model, method, length):
    """Logits of a context, a question longer than the window, 24 decode steps, and a short question."""
    with Session(model, method, capacity=length + 60) as session:
        found = [session.prefill(ids(length)), session.forward(ids(17, 2), Moment.TURN_END, keep=17)[0]]
        found += [session.forward(ids(1, 10 + i), Moment.DECODE)[0] for i in range(24)]
        found += [session.forward(ids(5, 3), Moment.TURN_END, keep=5)[0]]
    return torch.cat(found)


def fitted(model, length, sparsity):
    """The paper's division: a share of the heads streams."""
    method = DuoAttention(sinks=SINKS, recent=RECENT, sparsity=sparsity)
    return method.bind(model).fit(PAPER, model.shape(length))


@pytest.mark.few
@pytest.mark.parametrize("length", [60, 17, 16, 9])
@pytest.mark.parametrize("shape", [(4, 2, None), (2, 2, None), (4, 1, None)], ids=["GQA", "MHA", "MQA"])
def test_sparsity_0_is_the_full_cache_and_1_is_streaming(shape, length):
    """The card's oracle: no streaming head changes nothing, all of them are StreamingLLM with original positions."""
    model = tiny_model(*shape)
    streaming = StreamingLLM(sinks=SINKS, positions="original").fit(
        Budget("rows", SINKS + RECENT), model.shape(max(length, SINKS + RECENT + 1))
    )

    none, every = (conversation(model, fitted(model, length, x), length) for x in (0.0, 1.0))

    assert none.equal(conversation(model, Full(), length))
    assert torch.allclose(every, conversation(model, streaming, length), atol=2e-5)


def attend_by_hand(step, keys, values, sees):
    """Every KV head over the entries that its queries see. sees: [H_kv, T, N]"""
    grouped = step.query.double().unflatten(1, (keys.shape[1], -1))
    logits = grouped @ keys.double()[:, :, None].mT * step.scale
    weights = logits.masked_fill(~sees[None, :, None], -torch.inf).softmax(-1)
    return (weights @ values.double()[:, :, None]).flatten(1, 2).float()


def test_each_head_sees_its_own_entries_and_no_other(make_step):
    """Of three heads the middle one keeps all, the others sinks and a window that slides, whatever a forward brings."""
    generator = torch.Generator().manual_seed(0)
    sizes, rows = [40, 1, 1, 5, 30, 1, 3], SINKS + RECENT
    total = sum(sizes)
    query, keys, values = (torch.randn(2, x, total, 8, generator=generator) for x in (6, 3, 3))
    kv, before, stored = HeadGroupsKV(retrieval=(1,)), 0, set()
    for i, size in enumerate(sizes):
        part = slice(before, before + size)
        moment = Moment.CONTEXT_END if i == 0 else Moment.TURN_END
        step = make_step(query[:, :, part], keys[:, :, part], values[:, :, part], before=before, moment=moment)
        kv.append(step)
        causal = torch.arange(before + size) <= torch.arange(before, before + size)[:, None]
        streams = causal & torch.tensor([x in stored or x >= before for x in range(before + size)])
        sees = torch.stack([streams, causal, streams])
        wanted = attend_by_hand(step, keys[:, :, : before + size], values[:, :, : before + size], sees)
        assert torch.allclose(kv.attend(step), wanted, atol=1e-5)
        kv.trim(SINKS, rows, compensate=False)
        before += size
        stored = {*range(SINKS), *range(before - RECENT, before)}

    assert kv.entries_kept() == [rows, total, rows] * 2
    assert kv.facts() == {"entries_dropped": Fact(2 * 2 * (total - rows), changed=True)}


@given(
    sinks=st.integers(0, 3), ring=st.integers(1, 9), first=st.integers(1, 40),
    later=st.lists(st.integers(1, 25), max_size=8),
)
@settings(max_examples=60, deadline=None)
def test_the_ring_is_a_slice(sinks, ring, first, later):
    """After every forward of any size, the first entries and the last are stored, each once."""
    kv, seen = StreamingKV(track=True), 0
    for count in (first, *later):
        seen += count
        rows = torch.arange(seen - count, seen, dtype=torch.float32).view(1, 1, -1, 1)
        kv.append(Step(
            layer=0, moment=Moment.TURN_END if seen > count else Moment.CONTEXT_END,
            positions=torch.arange(seen - count, seen)[None], seen=seen, query=rows, key=rows, value=-rows, scale=1.0,
            window=None, softcap=None, sinks=None, causal=True, rope=NO_ROPE,
        ))
        kv.trim(sinks, sinks + ring, compensate=False)
        wanted = [*range(min(seen, sinks)), *range(max(sinks, seen - ring), seen)]
        assert sorted(kv.positions[0, 0].tolist()) == wanted
        assert kv.keys[0, 0, :, 0].tolist() == kv.positions[0, 0].tolist()
        assert kv.values.equal(-kv.keys)
    assert kv.dropped == max(0, seen - sinks - ring)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sparsity", [0.0, 0.1, 0.25, 0.5, 0.75, 0.99, 1.0])
def test_sparsity_is_the_quantile_of_the_gates(seed, sparsity, tmp_path):
    """Retrieval heads are those with gates at the quantile or above, as the authors deploy them."""
    gates = np.random.default_rng(seed).uniform(size=(2, 2))
    np.savetxt(tmp_path / "gates.tsv", gates, delimiter="\t")
    model = tiny_model()
    method = DuoAttention(gates=str(tmp_path / "gates.tsv"), sparsity=sparsity)

    made = method.bind(model).fit(PAPER, model.shape(1000))

    threshold = 2 if sparsity == 1 else np.quantile(gates, sparsity)
    wanted = {(int(layer), int(head)) for layer, head in zip(*np.nonzero(gates >= threshold), strict=True)}
    assert set(made.order[: made.retrieval]) == wanted
    assert made.streaming == 64 + 256


def test_gates_of_a_file_decide_which_heads_keep_all(tmp_path):
    """With one retrieval head, its layer stores unequal numbers of entries, and the bytes are as declared."""
    path = tmp_path / "full_attention_heads.tsv"
    path.write_text("0.1\t0.2\n0.9\t0.3\n")
    model = tiny_model()
    method = DuoAttention(gates=str(path), sinks=SINKS, recent=RECENT, sparsity=0.75).bind(model)
    method = method.fit(PAPER, model.shape(50))

    with Session(model, method, capacity=100) as session:
        session.prefill(ids(50))
        kept = [store.entries_kept() for store in session.layers]
        measured = session.memory().stored_bytes

    rows = SINKS + RECENT
    assert kept == [[rows, rows], [50, rows]]
    assert measured == method.declared_bytes(model.shape(50)) == (50 + 3 * rows) * 2 * 16 * 4
    assert method.settings["gates_sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0.1\t0.2\n", r"has 1 layers of 2 KV heads, and tiny-4q2kv has 2 layers of 2 KV heads: .*another model"),
        ("0.1\t0.2\t0.3\n0.4\t0.5\t0.6\n", r"2 layers of 3 KV heads.*another model"),
        ("0.1\t0.2\n0.3\n", r"of 1 or 2 KV heads.*another model"),
        ("0.1\tnan\n0.2\t0.3\n", "not finite"),
        ("", "has no gates"),
        ("a\tb\n", "is not a table of numbers"),
        (None, "cannot be read"),
    ],
)
def test_files_that_are_no_gates_of_the_model_are_refused(text, message, tmp_path):
    """A file that cannot be read, is no table, or has another model's shape, is refused before anything runs."""
    path = tmp_path / "gates.tsv"
    if text is not None:
        path.write_text(text)

    with pytest.raises(UserError, match=message):
        DuoAttention(gates=str(path)).bind(tiny_model())


def test_another_file_of_the_same_name_is_refused(tmp_path):
    """A run that is done again with other gates in the file says so."""
    path = tmp_path / "gates.tsv"
    path.write_text("0.1\t0.2\n0.3\t0.4\n")
    before = DuoAttention(gates=str(path))
    path.write_text("0.5\t0.2\n0.3\t0.4\n")

    with pytest.raises(UserError, match="not the one asked for"):
        replace(before)
    with pytest.raises(UserError, match="gates names none"):
        DuoAttention(gates_sha256="0" * 64)


@pytest.mark.parametrize("values", [{"sinks": -1}, {"recent": 0}, {"sparsity": 1.5}, {"probe": 1}])
def test_settings_without_a_meaning_are_refused(values):
    """The message names the method and the value."""
    (value,) = values.values()
    with pytest.raises(UserError, match=f"duo-attention: .*got .*{value}"):
        DuoAttention(**values)


def shape_of(length, *, layers=4, heads=8, window=None):
    """Layers of full attention and, with a window, as many sliding ones."""
    full = LayerShape(kv_heads=heads, query_heads=heads, key_dim=64, value_dim=64, window=None)
    sliding = (replace(full, window=window),) * layers if window is not None else ()
    return Shape(length=length, layers=(full,) * layers + sliding, itemsize=2)


@pytest.mark.slow
@given(length=st.integers(8, 40_000), share=st.floats(0.02, 0.98), window=st.sampled_from([None, 16, 1024]))
@settings(max_examples=200, deadline=None)
def test_a_budget_is_spent_to_the_last_row(length, share, window):
    """Bytes are at most the budget's, and an entry more per streaming head would be too many."""
    shape = shape_of(length, window=window)
    try:
        made = DuoAttention().fit(Budget("fraction", share), shape)
    except UserError as error:
        assert "Use --budget" in str(error)  # noqa: PT017  # what it says is what is asked for
        return
    target = shape.full_bytes * made.rows / length
    if made.streaming is None:
        assert made.rows >= length
        return
    assert made.declared_bytes(shape) <= target
    if window is None and made.streaming < length - 1:
        assert replace(made, streaming=made.streaming + 1).declared_bytes(shape) > target
    least = made.least_window(made.rows)
    more = replace(made, retrieval=made.retrieval + 1, streaming=least)
    assert made.streaming >= least
    assert more.declared_bytes(shape) > target


def test_long_contexts_have_the_paper_s_windows():
    """At 32k and half of the bytes, half of the heads keep everything, the others sinks and recent entries or more."""
    made = DuoAttention().fit(Budget.parse("50%"), shape_of(32_768))

    assert made.retrieval == 15  # of 32
    assert made.streaming >= 64 + 256


def test_all_heads_with_every_entry_are_a_declared_identity():
    """Without a streaming head nothing is lost, and no run has to act."""
    model = tiny_model()
    method = fitted(model, 60, 0.0)
    assert method.identity(model.shape(60))
    assert not fitted(model, 60, 0.5).identity(model.shape(60))


@pytest.mark.slow
def test_a_window_longer_than_the_context_keeps_the_sinks():
    """It hides nothing of the context, so streaming heads have their sinks, and the bytes are as declared."""
    model = tiny_model(4, 2, 4096)
    method = fitted(model, 60, 1.0)
    with Session(model, method, capacity=100) as session:
        session.prefill(ids(60))
        (_, store), = session.layers[0].groups
        assert sorted(store.positions[0, 0].tolist()) == [*range(SINKS), *range(60 - RECENT, 60)]
        assert session.memory().stored_bytes == method.declared_bytes(model.shape(60))


def test_sinks_go_out_of_sight_with_the_window(make_step):
    """A conversation that outgrows the window after its context loses the sinks as the model itself does."""
    generator = torch.Generator().manual_seed(0)
    window, context, total = 44, 40, 60
    query, keys, values = (torch.randn(1, x, total, 8, generator=generator) for x in (2, 1, 1))
    method, kv = replace(DuoAttention(), length=context), HeadGroupsKV()
    method = replace(method, streaming=SINKS + RECENT, sinks=SINKS, recent=RECENT)
    stored = set(range(context))
    for before, size in [(0, context), *((x, 1) for x in range(context, total))]:
        part, now = slice(before, before + size), torch.arange(before, before + size)[:, None]
        moment = Moment.DECODE if before else Moment.CONTEXT_END
        step = make_step(
            query[:, :, part], keys[:, :, part], values[:, :, part], before=before, moment=moment, window=window
        )
        kv.append(step)
        stored |= {*range(before, before + size)}
        there = torch.arange(before + size)
        sees = torch.tensor([x in stored for x in there.tolist()]) & (there <= now) & (now - there < window)
        wanted = attend_by_hand(step, keys[:, :, : before + size], values[:, :, : before + size], sees[None])
        assert torch.allclose(method.attend(kv, step), wanted, atol=1e-5)
        method.evict(kv, step)
        stored = {*range(SINKS), *range(before + size - RECENT, before + size)}
        assert kv.entries_kept() == [SINKS + RECENT]
