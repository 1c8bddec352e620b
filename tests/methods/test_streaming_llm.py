"""StreamingLLM against its card: positions in the cache by re-rotating every key, and the original ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf.tiny import VOCABULARY, tiny_model
from kvbench.method import Budget, Method, Moment
from kvbench.methods.baseline.full import Full
from kvbench.methods.eviction.streaming_llm import StreamingLLM
from kvbench.store import LayerKV

SINKS, ROWS = 4, 16


@dataclass(frozen=True)
class ByTheBook(Method):
    """The card's algorithm: sinks and last entries in order, each key rotated to its position in the cache."""

    relative: bool = True
    card: ClassVar = StreamingLLM.card

    def layer(self, index):
        """Entries in order, with positions."""
        return LayerKV(track=True)

    def attend(self, kv, step):
        """All keys to arange(n), queries to the end of it, in float64 by hand."""
        keys, query = kv.keys, step.query
        if self.relative:
            here = torch.arange(kv.n)[None]
            keys = step.rope.rotate(step.rope.rotate(keys, kv.positions[:, 0], inverse=True), here)
            query = step.rope.rotate(
                step.rope.rotate(query, step.positions, inverse=True), here[:, kv.n - query.shape[2] :]
            )
        grouped = query.double().unflatten(1, (keys.shape[1], -1))
        logits = grouped @ keys.double()[:, :, None].mT * step.scale
        mask = torch.ones(query.shape[2], kv.n, dtype=torch.bool).tril(kv.n - query.shape[2])
        weights = logits.masked_fill(~mask, -torch.inf).softmax(-1)
        return (weights @ kv.values.double()[:, :, None]).flatten(1, 2).float()

    def evict(self, kv, step):
        """After every forward, the middle."""
        if step.moment.is_last and kv.n > ROWS:
            index = torch.arange(kv.n)
            kv.keep(torch.cat([index[:SINKS], index[SINKS - ROWS :]]).expand(*kv.keys.shape[:2], -1))


def ids(count, seed=1):
    """Random tokens. [1, T]"""
    return torch.randint(VOCABULARY, (1, count), generator=torch.Generator().manual_seed(seed))


def conversation(model, method, length):
    """Logits of a context, a question of 5 tokens and 24 decode steps."""
    with Session(model, method, capacity=length + 60) as session:
        found = [session.prefill(ids(length)), session.forward(ids(5, 2), Moment.TURN_END, keep=5)[0]]
        found += [session.forward(ids(1, 10 + i), Moment.DECODE)[0] for i in range(24)]
    return torch.cat(found)


def fitted(model, length, **settings):
    """The method at a budget of ROWS."""
    return StreamingLLM(sinks=SINKS, **settings).fit(Budget("rows", ROWS), model.shape(length))


@pytest.mark.few(3)
@pytest.mark.parametrize("length", [40, 17, 16, 12, 8])
@pytest.mark.parametrize("positions", ["cache", "original"])
def test_equals_the_card_s_algorithm(positions, length):
    """Turning the sinks alone equals turning every key to its place in the cache, for contexts above and below C."""
    model = tiny_model()
    found = conversation(model, fitted(model, length, positions=positions), length)
    wanted = conversation(model, ByTheBook(relative=positions == "cache"), length)
    assert (found - wanted).abs().max() <= 2e-5 * wanted.abs().max()


def test_the_two_conventions_differ():
    """Distances as in the cache and as in the text are not the same method."""
    model = tiny_model()
    cache, original = (conversation(model, fitted(model, 40, positions=x), 40) for x in ("cache", "original"))
    assert cache[:6].equal(original[:6]) is False
    assert cache[0].equal(original[0])


class Shifted:
    """The model at other absolute positions."""

    def __init__(self, model, by):
        self.model, self.by = model, by

    def __getattr__(self, name):
        """As the model has it."""
        return getattr(self.model, name)

    def run(self, tokens, forward, keep=1):
        """Every position later by the same number."""
        return self.model.run(tokens, replace(forward, positions=forward.positions + self.by), keep)


@pytest.mark.parametrize("positions", ["cache", "original"])
def test_absolute_positions_do_not_matter(positions):
    """Shifting all positions by a constant leaves the logits as they are."""
    model = tiny_model()
    found = conversation(Shifted(model, 50), fitted(model, 40, positions=positions), 40)
    wanted = conversation(model, fitted(model, 40, positions=positions), 40)
    assert (found - wanted).abs().max() <= 5e-5 * wanted.abs().max()


@pytest.mark.parametrize("positions", ["cache", "original"])
def test_nothing_happens_within_the_budget(positions):
    """As long as all entries fit, both conventions are the full cache, however late in the conversation."""
    model = tiny_model()
    method = StreamingLLM(positions=positions).fit(Budget("rows", 69), model.shape(40))
    assert torch.allclose(conversation(model, method, 40), conversation(model, Full(), 40), atol=1e-5)


@pytest.mark.parametrize("sinks", [0, 1, 4])
def test_what_is_stored(sinks):
    """After every step, exactly the first `sinks` entries and the last of the budget."""
    model = tiny_model()
    method = StreamingLLM(sinks=sinks).fit(Budget("rows", ROWS), model.shape(40))
    with Session(model, method, capacity=80) as session:
        session.prefill(ids(40))
        for token in range(20):
            wanted = [*range(sinks), *range(session.seen - ROWS + sinks, session.seen)]
            for store in session.layers:
                assert [sorted(x.tolist()) for x in store.positions[0]] == [wanted] * 2
            session.forward(torch.tensor([[token]]), Moment.DECODE)


@pytest.mark.slow
@pytest.mark.parametrize("positions", ["cache", "original"])
def test_a_window_longer_than_the_context_keeps_the_sinks(positions):
    """The window hides nothing of the context: entries, bytes and logits are those of a full layer."""
    found = {}
    for window in (None, 4096):
        model = tiny_model(4, 2, window)
        method = fitted(model, 40, positions=positions)
        with Session(model, method, capacity=60) as session:
            session.prefill(ids(40))
            assert sorted(session.layers[0].positions[0, 0].tolist()) == [*range(SINKS), *range(40 - ROWS + SINKS, 40)]
            assert session.memory().stored_bytes == method.declared_bytes(model.shape(40))
            found[window] = torch.cat([session.forward(ids(1, 10 + i), Moment.DECODE)[0] for i in range(9)])
    assert torch.allclose(found[None], found[4096], atol=1e-5)


def test_settings_without_a_meaning_are_refused():
    """The message names the method, the setting and the value."""
    with pytest.raises(UserError, match="streaming-llm: sinks must be 0 or more, got -1"):
        StreamingLLM(sinks=-1)
