"""Invariants of methods that reuse entries across prompts, on a prompt of parts that ran before in other orders."""

from __future__ import annotations

from itertools import pairwise

from kvbench.check.trial import CONTEXT, FORCED, LENGTH, NotApplicableError, require_close
from kvbench.engine.reuse import Reuse, count_reuse
from kvbench.engine.session import Session
from kvbench.hf import Model
from kvbench.hf.tiny import tiny_model
from kvbench.method import Method
from kvbench.store.chunks import ChunkStore

ENDS = (0, 8, 48, 88, 112)
"""The parts of the context: an instruction, three documents, and tokens after them."""
LAYERS = 4
"""Some methods compute two layers whole."""


def split_context(context: list[int] | None = None, store: ChunkStore | None = None) -> Reuse:
    """The context in parts, its documents in other orders in two earlier prompts."""
    ids = CONTEXT if context is None else context
    lead, *documents = (tuple(ids[a:b]) for a, b in pairwise(ENDS))
    earlier = tuple((lead, *documents[i:], *documents[:i]) for i in (1, 2))
    return Reuse((lead, *documents), earlier, ChunkStore() if store is None else store)


def parts_are_reused(method: Method) -> str:
    """A prompt of known parts is not run whole, chunks do not change, and no other model is given them."""
    if not method.reads_parts:
        raise NotApplicableError("it does not reuse parts of a prompt")
    store = ChunkStore()
    with _open(method, tiny_model(layers=LAYERS), store) as session:
        first = session.prefill(CONTEXT).clone()
        effect, counted = session.effect(), count_reuse(session)
        assert counted is not None
        assert effect.acted, f"nothing was taken over or left out: {effect.facts}"
        assert not effect.identity, "it counts as a prefill of the whole prompt"
        scores = session.score(FORCED)
    with _open(method, tiny_model(layers=LAYERS), store) as again:
        require_close(again.prefill(CONTEXT), first, "the same prompt from the same chunks")
        require_close(again.score(FORCED), scores, "an answer after it")
        assert again.reuse is not None and not again.reuse.build_seconds, "chunks in the store were built again"
    hits = store.hits
    with _open(method, tiny_model(seed=1, layers=LAYERS), store) as other:
        other.prefill(CONTEXT)
    with _open(method, tiny_model(seed=1, layers=LAYERS), ChunkStore()) as alone:
        alone.prefill(CONTEXT)
        assert alone.reuse is not None
        assert store.hits - hits == alone.reuse.store.hits, "another model was given chunks of this one"
    computed, reused = counted.computed / counted.tokens, counted.reused / counted.tokens
    return f"{computed:.0%} of a full prefill computed, {reused:.0%} taken over"


def _open(method: Method, model: Model, store: ChunkStore) -> Session:
    fitted = method.bind(model).fit(None, model.shape(LENGTH))
    return Session(model, fitted, capacity=LENGTH + 80, reuse=split_context(store=store))
