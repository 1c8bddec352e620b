"""Methods that reuse entries across prompts: what each computes again, and when it is exact."""

from __future__ import annotations

import pytest
import torch

from kvbench.engine.agreement import FullCache
from kvbench.engine.reuse import Reuse, run_apart
from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf.tiny import tiny_model
from kvbench.registry import find_method, list_entries
from tests.methods.reuse import ALONE, DOCUMENTS, LEAD, PARTS, TAIL, distance, model, prefilled, run, run_full

REUSE = [x.name for x in list_entries("method") if find_method(x.name).card.family == "reuse"]
LENGTH = sum(map(len, PARTS)) + len(TAIL)
WHOLE = {"cacheblend": {"ratio": 1.0}, "epic": {"first": 30}}
"""Settings that compute everything again."""
AT_HAND = LENGTH - len(TAIL)


@pytest.mark.parametrize("name", WHOLE)
def test_everything_computed_again_equals_a_full_prefill(name):
    """Logits after the prompt and of an answer, to 1e-4."""
    assert distance(run(find_method(name)(**WHOLE[name])), run_full()) < 1e-4


@pytest.mark.parametrize("name", [x for x in REUSE if x != "no-context"])
def test_defaults_reuse_and_differ(name):
    """A method that computed everything by default would be a full prefill."""
    with prefilled(find_method(name)()) as session:
        assert session.layers[-1].reused > 0.3 * LENGTH
        assert session.layers[-1].computed < LENGTH
        assert not session.effect().identity
    assert distance(run(find_method(name)()), run_full()) > 1e-3


@pytest.mark.parametrize("name", REUSE)
def test_without_parts_the_prompt_is_run_whole(name):
    """As a library call without a task, and in the invariants."""
    method = find_method(name)()
    with Session(model(), method, capacity=400) as session:
        session.prefill([x for part in PARTS for x in part], visible=TAIL)
        assert distance(session.logits, run_full()[:1]) < 1e-5
        assert session.effect().identity


@pytest.mark.parametrize("name", [x for x in REUSE if x != "no-context"])
def test_sliding_windows_are_refused(name):
    """Where parts are reused, in one line."""
    with (
        Session(tiny_model(4, 2, 48), find_method(name)(), reuse=Reuse(PARTS, ALONE)) as session,
        pytest.raises(UserError, match="sliding windows"),
    ):
        session.prefill([x for part in PARTS for x in part], visible=TAIL)


def test_no_context_runs_instruction_and_tail_alone():
    """Its logits are those of the prompt without documents."""
    assert torch.equal(run(find_method("no-context")()), run_full(parts=(LEAD,)))
    with prefilled(find_method("no-context")()) as session:
        assert session.seen == len(LEAD) + len(TAIL)
        assert session.effect().acted


def find_keys(session, layer, start, part):
    """A part's keys before rotation, by the positions it has in the session."""
    positions = torch.arange(start, start + len(part))[None]
    return model().ropes[layer].rotate(session.layers[layer].keys[:, :, positions[0]], positions, inverse=True)


def test_aligned_keys_are_those_of_the_chunk_at_its_place():
    """Without their rotation they are the chunk's, and those of plain concatenation are not."""
    start = len(LEAD) + len(DOCUMENTS[0])
    chunk = run_apart(model(), LEAD[:1], DOCUMENTS[1])
    with prefilled(find_method("concat-aligned")()) as session:
        assert distance(find_keys(session, 2, start, DOCUMENTS[1]), chunk.keys[2]) < 1e-5
    with prefilled(find_method("concat")()) as session:
        assert distance(find_keys(session, 2, start, DOCUMENTS[1]), chunk.keys[2]) > 1e-2
        assert distance(find_keys(session, 2, 1, DOCUMENTS[1]), chunk.keys[2]) > 1e-2
        held = session.layers[2].keys[:, :, start : start + 20]
        there = model().ropes[2].rotate(chunk.keys[2], torch.arange(1, 21)[None])
        assert distance(held, there) < 1e-5


def test_one_document_where_it_was_run_needs_no_computation():
    """A document run after the prompt's only token before it: exact for every share recomputed."""
    parts = (LEAD[:1], DOCUMENTS[0])
    full = run_full(parts=parts)
    for name in ("concat", "concat-aligned", "cacheblend"):
        assert distance(run(find_method(name)(), parts=parts, earlier=((parts[0],), (parts[1],))), full) < 1e-4


def test_prompt_cache_keeps_the_positions_of_the_schema():
    """In the order of the schema, with documents as a scaffold would leave them, keys are rotated as in the schema."""
    schema = (LEAD, *DOCUMENTS)
    with prefilled(find_method("prompt-cache")(), parts=(LEAD, *DOCUMENTS[::-1]), earlier=(schema,)) as session:
        held = session.layers[1].keys[:, :, len(LEAD) : len(LEAD) + len(DOCUMENTS[2])]
        chunk = run_apart(model(), (), DOCUMENTS[2])
        there = sum(len(x) for x in schema[:3])
        wanted = model().ropes[1].rotate(chunk.keys[1], torch.arange(there, there + len(DOCUMENTS[2]))[None])
        assert distance(held, wanted) < 1e-5


def test_epic_computes_the_first_tokens_of_each_document():
    """In all layers, and no others: an entry that was not computed is the chunk's."""
    with prefilled(find_method("epic")(first=4)) as session:
        assert {x.computed for x in session.layers} == {3 * 4 + len(TAIL)}
        start = len(LEAD) + len(DOCUMENTS[0])
        chunk = run_apart(model(), (), DOCUMENTS[1])
        same = (session.layers[2].values[0, :, start : start + 20] - chunk.values[2][0]).abs().amax((0, 2)) < 1e-6
        assert same.tolist() == [False] * 4 + [True] * 16


@pytest.mark.parametrize("metric", ["values", "keys"])
def test_cacheblend_computes_the_tokens_that_deviate_most(metric):
    """Worked out apart: entries of layer 1 of a full prefill against those of the chunks."""
    method = find_method("cacheblend")(ratio=0.2, metric=metric)
    with prefilled(method) as session, prefilled(find_method("concat-aligned")()) as old:
        with Session(model(), FullCache(), capacity=400) as full:
            full.prefill([x for part in PARTS for x in part], visible=TAIL)
            new = getattr(full.layers[1], metric)[:, :, :AT_HAND]
        change = (new - getattr(old.layers[1], metric)[:, :, :AT_HAND]).square().sum((0, 1, 3))
        wanted = set(change.topk(int(0.2 * AT_HAND)).indices.tolist())
        kept = (session.layers[2].values == old.layers[2].values)[0, :, :AT_HAND].all(2).all(0)
        assert set((~kept).nonzero()[:, 0].tolist()) == wanted
        assert [x.computed for x in session.layers] == [LENGTH] * 2 + [len(wanted) + len(TAIL)] * 2


def test_cacheblend_comes_closer_the_more_it_computes():
    """KL divergence from the full prefill at 0, 15, 50 and 100 percent."""
    full = run_full().log_softmax(-1)
    found = []
    for ratio in (0.0, 0.15, 0.5, 1.0):
        ours = run(find_method("cacheblend")(ratio=ratio)).log_softmax(-1)
        found.append((full.exp() * (full - ours)).sum(-1).mean().item())
    assert found[0] > found[2] > found[3]
    assert found[3] < 1e-6
