"""CacheGen: the quantizer's error, bytes of the stream, and the decoded cache is the one that is attended to."""

from __future__ import annotations

from time import perf_counter
from types import SimpleNamespace

import pytest
import torch

from kvbench.engine.passes import finish
from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf.tiny import tiny_model
from kvbench.method import Budget, Moment
from kvbench.methods.quantization.cachegen import CacheGen, CacheGenStream, CodedChunk
from kvbench.runs.reply import choose_passes
from kvbench.store.entries import storage_bytes
from kvbench.store.stream import StreamKV
from kvbench.task import EncodedTurn, Turn

CONTEXT = [x * 7 % 64 for x in range(80)]


def draw(*shape, seed=0):
    """Normal random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("count", [1, 256, 300])
@pytest.mark.parametrize("bins", [12, 16, 32])
def test_entries_are_the_nearest_of_the_levels(count, bins):
    """The error is at most half a step of the token's largest element, over all heads; that element comes back."""
    x = draw(2, 3, count, 8)
    x[:, :, 0] = 0
    found = CodedChunk.encode(x, bins).decode()
    largest = x.abs().amax((1, 3), keepdim=True)
    assert ((found - x).abs() <= largest / (2 * (bins // 2 - 1)) + largest * 2**-10).all()
    assert torch.allclose(found.abs().amax((1, 3)), largest[:, 0, :, 0], rtol=1e-3)


@pytest.mark.parametrize(("level", "wanted"), [
    (1, [(16, 16), (16, 12), (16, 12), (16, 12), (12, 12)]), (2, [(32, 32), (32, 16), (16, 16), (16, 16), (16, 16)]),
    (3, [(32, 32)] * 5),
])
def test_bins_of_the_layers_of_a_model_of_32(level, wanted):
    """Layers 0, 9, 10, 19 and 20 of 32, as in the authors' code; a model of 64 layers changes at twice the layer."""
    for layers, factor in ((32, 1), (64, 2)):
        method = CacheGen(level=level, layers=layers)
        assert [method.bins(x * factor) for x in (0, 9, 10, 19, 20)] == wanted


@pytest.mark.parametrize("history", [None, [5, 6]])
def test_the_stream_is_decoded_before_the_answer_is_timed(history, monkeypatch):
    """A visible question leaves the stream as it is; its decoding belongs to the time to the first token."""
    model = tiny_model()
    with Session(model, CacheGen().fit(None, model.shape(80)), capacity=100) as session:
        session.prefill(CONTEXT)
        assert all(x.stream is not None for x in session.layers)
        decoded, decode = [], CacheGenStream.decode
        monkeypatch.setattr(CacheGenStream, "decode", lambda self: decoded.append(perf_counter()) or decode(self))
        session.ask([], 4, history=history, stop=frozenset())
        assert len(decoded) == len(model.layers)
        assert max(decoded) <= session.answer_started
        require_decoded(session)
        session.ask([7], 4, history=history, stop=frozenset())
        assert len(decoded) == len(model.layers)


def test_the_stream_is_decoded_before_choices_are_timed(monkeypatch):
    """Once, not by every fork that weighs a choice; the choices read the decoded entries."""
    model = tiny_model()
    ids = EncodedTurn((), (), (5, 6), choices=((5, 6), (7,)))
    turn = Turn("which?", "=", "a", ("a",), 0, ("a", "b"))
    with Session(model, CacheGen().fit(None, model.shape(80)), capacity=100) as session:
        session.prefill(CONTEXT)
        decoded, decode = [], CacheGenStream.decode
        monkeypatch.setattr(CacheGenStream, "decode", lambda self: decoded.append(perf_counter()) or decode(self))
        finish(choose_passes(SimpleNamespace(model=model), session, turn, ids, {}))
        assert len(decoded) == len(model.layers)
        assert max(decoded) <= session.answer_started
        require_decoded(session)


def require_decoded(session):
    """The bytes at the end, and those that a step reads, are the decoded entries'."""
    found = session.memory()
    assert found.stored_bytes < found.end_full_bytes
    assert found.read_bytes_per_step == found.distinct_read_bytes_per_step == found.end_stored_bytes
    assert found.end_stored_bytes == found.end_full_bytes
    assert found.peak_bytes >= found.end_bytes >= found.end_full_bytes


def test_the_context_is_a_stream_until_the_next_token(make_step):
    """Stored bytes are those of its tensors and no others; the next token finds the decoded entries."""
    method = CacheGen(level=3, chunk=30, layers=32)
    key, value = draw(1, 2, 50, 8, seed=1), draw(1, 2, 50, 8, seed=2)
    kv = method.layer(0)
    assert isinstance(kv, StreamKV)
    first = make_step(draw(1, 4, 50, 8), key, value)
    kv.append(first)
    method.evict(kv, first)
    wanted = [
        torch.cat([CodedChunk.encode(part, 32).decode() for part in x.split(30, dim=2)], dim=2) for x in (key, value)
    ]
    assert isinstance(kv.stream, CacheGenStream)
    parts = [x for chunks in kv.stream.chunks for x in chunks]
    norms, tables = 2 * 50 * 2, 4 * 16 * 31 * 2  # of keys and values, and of their two chunks
    assert kv.nbytes() == norms + tables + storage_bytes([y for x in parts for y in x.streams.tensors()])
    assert kv.entries_kept() == [50, 50]
    branch = kv.fork()
    step = make_step(draw(1, 4, 1, 8), draw(1, 2, 1, 8), before=50, moment=Moment.DECODE)
    branch.append(step)
    assert branch.keys[:, :, :50].equal(wanted[0])
    assert branch.values[:, :, :50].equal(wanted[1])
    assert branch.keys[:, :, 50:].equal(step.key)
    assert kv.stream is not None


def test_stored_bytes_are_measured_from_the_stream():
    """Fewer than of packed symbols where channels are predictable; a session's count is that of its tensors."""
    model = tiny_model()
    with Session(model, CacheGen().fit(None, model.shape(80)), capacity=90) as session:
        session.prefill(CONTEXT)
        tensors = [x for store in session.layers for x in store.stream.tensors()]
        assert session.memory().stored_bytes == sum(x.nbytes for x in tensors)
        session.force([1, 2])
        assert session.effect().facts["entries_quantized"] == 2 * 2 * 80
        assert session.memory().end_bytes >= model.shape(80).full_bytes


def test_constant_channels_take_nothing():
    """Ten of sixteen channels are: the words are those of the other six, 3.95 bits per element for steps of 4 / 15."""
    x = draw(1, 1, 2000, 16)
    x[..., :10] = 4.0
    words = CodedChunk.encode(x.clamp(-4, 4), 32).streams.words.nbytes
    assert words * 8 / (2000 * 6) == pytest.approx(3.95, abs=0.1)


def test_a_budget_is_refused():
    """The text decides."""
    with pytest.raises(UserError, match="no budget"):
        CacheGen().fit(Budget("fraction", 0.25), tiny_model().shape(80))
