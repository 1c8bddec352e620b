"""Room for an answer where no capacity is given: decode steps make no block, whatever they prune or encode."""

from __future__ import annotations

import pytest
import torch

from kvbench.engine.session import Session
from kvbench.hf.rope import NO_ROPE
from kvbench.hf.tiny import tiny_model
from kvbench.method import Moment, Step
from kvbench.methods.baseline.full import Full
from kvbench.store import LayerKV
from kvbench.store.entries import Buffer
from kvbench.store.hierarchical import HierarchicalKV
from kvbench.store.sparse import SparseKV
from kvbench.store.stream import Stream, StreamKV

CONTEXT, QUESTION, ANSWER = 60, 5, 40


class Held(Stream):
    """A stream that keeps the entries as they are."""

    def __init__(self, kv):
        self.entries = {"key": kv.keys.clone(), "value": kv.values.clone()}

    def decode(self):
        return dict(self.entries)

    def tensors(self):
        return list(self.entries.values())


STORES = {
    "plain": (LayerKV, lambda _: None, lambda _: None),
    "stream": (StreamKV, lambda x: x.store(Held(x)), lambda _: None),
    "sparse": (lambda: SparseKV(key_sparsity=0.5, value_sparsity=0.5, recent=8), SparseKV.prune, SparseKV.prune),
    "sparse, none whole": (lambda: SparseKV(key_sparsity=0.5, value_sparsity=0.5), SparseKV.prune, SparseKV.prune),
    "hierarchical": (lambda: HierarchicalKV(group=8), HierarchicalKV.flush, HierarchicalKV.flush),
}
"""Stores, what ends their context, and what follows every later pass."""


@pytest.fixture
def made(monkeypatch):
    """The capacity of every block that is made, which may be emptied."""
    make, found = Buffer.__init__, []

    def watched(self, like, capacity):
        found.append(capacity)
        make(self, like, capacity)

    monkeypatch.setattr(Buffer, "__init__", watched)
    return found


def make_step(count, seen, moment):
    """A step of random entries."""
    generator = torch.Generator().manual_seed(seen)
    query, key, value = (torch.randn(2, h, count, 16, generator=generator) for h in (4, 2, 2))
    return Step(
        layer=0, moment=moment, positions=torch.arange(seen - count, seen).expand(2, -1), seen=seen, query=query,
        key=key, value=value, scale=0.25, window=None, softcap=None, sinks=None, causal=True, rope=NO_ROPE,
    )


@pytest.mark.parametrize("name", STORES)
def test_a_reserved_store_makes_no_block_while_decoding(name, made):
    """After a question, for as many tokens as were asked for."""
    make, end, follow = STORES[name]
    kv = make()
    kv.append(make_step(CONTEXT, CONTEXT, Moment.CONTEXT_END))
    end(kv)
    kv.settle()
    kv.reserve(QUESTION + ANSWER, QUESTION)
    seen = CONTEXT + QUESTION
    kv.append(make_step(QUESTION, seen, Moment.TURN_END))
    follow(kv)
    made.clear()
    for _ in range(ANSWER):
        seen += 1
        kv.append(make_step(1, seen, Moment.DECODE))
        follow(kv)
    assert made == []
    assert kv.entries_kept() == [seen] * 4


def test_forks_of_a_sparse_store_keep_their_whole_entries():
    """They are moved in place, so each fork has its own."""
    make, end, follow = STORES["sparse"]
    kv = make()
    kv.append(make_step(CONTEXT, CONTEXT, Moment.CONTEXT_END))
    end(kv)
    branch = kv.fork()
    before = kv.keys.clone()
    for seen in range(CONTEXT + 1, CONTEXT + 20):
        branch.append(make_step(1, seen, Moment.DECODE))
        follow(branch)
    assert branch.sparse.n > kv.sparse.n
    assert kv.keys.equal(before)


def test_an_answer_to_the_context_is_reserved(made):
    """As after a question of its own, where the question stood in the context."""
    with Session(tiny_model(), Full()) as session:
        session.prefill(list(range(30)))
        session.question([], 12)
        made.clear()
        session.answer(12, stop=frozenset())
    assert made == []
