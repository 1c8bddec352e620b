"""Conversations that run together answer as one at a time, on every method."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from kvbench.check.trial import choose_budget, random_ids
from kvbench.engine.agreement import force_answer_passes
from kvbench.engine.passes import finish, merge
from kvbench.engine.session import Session
from kvbench.hf.tiny import tiny_model
from kvbench.registry import find_method, list_entries
from kvbench.store import storage_bytes

METHODS = [
    *(x.name for x in list_entries("method") if find_method(x.name).card.models == "autoregressive"),
    "snapkv+adakv", "snapkv+kivi", "razor-attention+kivi",
]
LENGTH, ANSWER = 160, 24
QUESTIONS = [random_ids(count, seed) for seed, count in enumerate((3, 11, 1, 7, 30))]
FORCED = [random_ids(count, seed + 50) for seed, count in enumerate((5, 2, 9, 1, 4))]
STOP = frozenset(range(6))
"""A tenth of the vocabulary, so that answers end at different lengths."""


def talk(session, question, forced):
    """Ask on a fork; the answer, the logits of a forced one, and what the fork says of itself."""
    with session.fork() as branch:
        yield from branch.question_passes(question, ANSWER)
        logits = yield from force_answer_passes(branch, forced)
        tokens = yield from branch.answer_passes(ANSWER, stop=STOP)
        return tokens, logits, branch.memory(), branch.effect()


def talks(session):
    """Five conversations on forks of one context."""
    return (talk(session, question, forced) for question, forced in zip(QUESTIONS, FORCED, strict=True))


@contextmanager
def opened(name, model, **options):
    """A session of a method that holds a context."""
    method = find_method(name)()
    fitted = method.bind(model).fit(choose_budget(method), model.shape(LENGTH))
    with Session(model, fitted, capacity=LENGTH + 100, **options) as session:
        session.prefill(random_ids(LENGTH, 9))
        yield session


@pytest.mark.few
@pytest.mark.parametrize("name", METHODS)
def test_questions_of_a_context_run_together(name):
    """Tokens, stop reasons, bytes and counters equal those of one at a time, and logits up to rounding."""
    model = tiny_model()
    with opened(name, model, chunk=16) as session:
        alone = finish(merge(talks(session), 1))
        together = finish(merge(talks(session), 5))
        some = finish(merge(talks(session), 2))
    assert len({len(tokens.ids[0]) for tokens, *_ in alone}) > 1, "all answers end together: the test shows nothing"
    for found in (together, some):
        for (tokens, logits, memory, effect), (wanted, reference, *facts) in zip(found, alone, strict=True):
            assert tokens == wanted
            assert torch.allclose(logits, reference, atol=1e-4)
            assert [memory, effect] == facts


def find_aside(store):
    """Entries of forks that are set aside, in a store and the blocks within."""
    blocks = [store._block, *(x._block for x in (getattr(store, "_bounds", None),) if x is not None)]
    if getattr(store, "packed", None) is not None:
        blocks += [x._block for x in store.packed._blocks()]
    return [x for block in blocks if block is not None for _, rows in block._aside.values() for x in rows.values()]


@pytest.mark.few(3)
@pytest.mark.parametrize(("name", "exact"), [("snapkv+kivi", 64), ("snapkv", 0), ("quest", 0), ("full-int8", 0)])
def test_a_batch_holds_the_context_once(name, exact):
    """Eight forks that answer side by side take the bytes of one, and those of their own later entries.

    exact: entries that a fork copies because its store moves them.
    """
    model = tiny_model()
    with opened(name, model) as session:
        alone = storage_bytes(x for store in session.layers for x in store.tensors())
        each = session.shape.full_bytes // LENGTH
        branches = [session.fork() for _ in range(8)]
        for branch in branches:
            branch.question([3, 4, 5], ANSWER)
        finish(merge((branch.answer_passes(ANSWER, stop=frozenset()) for branch in branches), 8))
        stores = [store for branch in branches for store in branch.layers]
        held = [x for store in stores for x in store.tensors()]
        held += [x for store in stores for x in find_aside(store)]
        assert storage_bytes(held) <= alone + 8 * (3 + ANSWER + exact) * each
        counters = 8 * len(stores)
        assert exact or storage_bytes(x for store in stores for x in store.tensors()) <= alone + counters


def test_parts_start_as_others_end():
    """Of five conversations two run at a time, and results come in order."""
    running, most = [], []

    def part(number, passes):
        running.append(number)
        for _ in range(passes):
            most.append(len(running))
            yield [number]
        running.remove(number)
        return number

    merged, wanted = merge((part(i, passes) for i, passes in enumerate((3, 0, 1, 4, 2))), 2), None
    sizes = []
    for _ in range(5):
        wanted = merged.send(wanted)
        sizes.append(len(wanted))
    with pytest.raises(StopIteration) as end:
        merged.send(wanted)
    assert end.value.value == [0, 1, 2, 3, 4]
    assert max(most) == 2
    assert sizes == [2, 2, 2, 2, 2]


def test_conversations_are_closed_when_a_pass_raises(monkeypatch):
    """Their forks give the context back, whichever raised."""
    model = tiny_model()
    with opened("snapkv", model) as session:
        block = session.layers[0]._buffer
        monkeypatch.setattr(type(session.method), "attend", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            finish(merge(talks(session), 5))
        assert len(block._readers) == 1
        assert block._aside == {}


@pytest.mark.parametrize("faulty", [0, 1, 2])
def test_the_other_conversations_are_closed_when_one_raises(faulty):
    """Those before and after it, while the error and its frames are still there."""
    closed = []

    def part(number):
        try:
            yield [number]
            if number == faulty:
                raise ValueError("not this one")
            yield [number]
        finally:
            closed.append(number)

    merged = merge(map(part, range(3)), 3)
    wanted = next(merged)
    with pytest.raises(ValueError, match="not this one") as error:
        merged.send(wanted)
    assert sorted(closed) == [0, 1, 2], error
