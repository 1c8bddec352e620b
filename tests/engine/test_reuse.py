"""Prompts of which some entries are at hand."""

from __future__ import annotations

import pytest
import torch

from kvbench.engine.reuse import Edit, MixedPrompt, apply_edits, find_edits, run_apart, run_prompt
from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.kernels.dense_attention import dense_attention
from kvbench.methods.reuse.concat_aligned import ConcatAligned
from kvbench.store.chunks import ChunkStore
from kvbench.store.reused import ReusedKV
from tests.methods.reuse import ALONE, DOCUMENTS, LEAD, PARTS, TAIL, distance, model, prefilled, run, run_full

WHOLE = [*LEAD, *DOCUMENTS[0], *DOCUMENTS[1], *DOCUMENTS[2], *TAIL]


def test_every_token_computed_equals_a_full_prefill():
    """None of the entries at hand is read."""

    class All(ConcatAligned):
        def run(self, mixed):
            return mixed.run(mixed.places)

    assert distance(run(All()), run_full()) < 1e-4


def test_an_equal_prefix_is_exact():
    """Entries of the same tokens at the same places, behind the same tokens: only the tail runs."""
    earlier = (PARTS,)

    class Prefix(ConcatAligned):
        def place(self, mixed):
            mixed.add(run_prompt(mixed.model, WHOLE[: mixed.tail]), 0)

    assert distance(run(Prefix(), earlier=earlier), run_full()) < 1e-4


def test_layer_0_is_exact_at_any_place():
    """Its keys depend on the token and its position alone, and its values on the token."""
    with prefilled(ConcatAligned()) as session, Session(model(), ConcatAligned(), capacity=400) as full:
        full.prefill(WHOLE)
        assert distance(session.layers[0].keys, full.layers[0].keys) < 1e-4
        assert distance(session.layers[0].values, full.layers[0].values) < 1e-5
        assert distance(session.layers[1].values, full.layers[1].values) > 1e-2


def test_a_rotated_suffix_of_an_equal_prefix_is_exact():
    """A chunk that was run behind a text, moved by 37 places with that text: rotation alone, in every layer."""
    chunk = run_apart(model(), DOCUMENTS[0], DOCUMENTS[1])
    with Session(model(), ConcatAligned(), capacity=400) as far:
        far.behind = -37
        far.prefill([*DOCUMENTS[0], *DOCUMENTS[1]])
        places = torch.arange(30, 50)
        for rope, key, value, kv in zip(model().ropes, chunk.keys, chunk.values, far.layers, strict=True):
            assert distance(rope.rotate(key, places[None] + 37), kv.keys[:, :, places]) < 1e-4
            assert distance(value, kv.values[:, :, places]) < 1e-4


@pytest.mark.parametrize("places", [[3, 9, 40, 41], [0, 87], [50]])
def test_computed_tokens_do_not_see_later_ones(places):
    """Another token at place 60 changes no entry before it, and every computed one after it."""
    rows = torch.tensor([*places, 87])

    class Some(ConcatAligned):
        def run(self, mixed):
            return mixed.run(mixed.with_fresh(rows))

    other = list(DOCUMENTS[2])
    other[60 - 56] = (other[60 - 56] + 1) % 64
    changed = (LEAD, *DOCUMENTS[:2], tuple(other))
    with prefilled(Some()) as a, prefilled(Some(), parts=changed, earlier=tuple((x,) for x in changed)) as b:
        for x, y in zip(a.layers, b.layers, strict=True):
            assert torch.equal(x.values[:, :, :60], y.values[:, :, :60])
        assert distance(a.logits, b.logits) > 1e-3


def test_a_mask_aligned_to_the_last_entry_is_caught(monkeypatch):
    """The fault of released codes: chosen tokens see later ones."""
    def fault(kv, step, places):
        return dense_attention(step.query, kv.keys, kv.values, scale=step.scale, seen=step.seen)

    monkeypatch.setattr(ReusedKV, "attend_at", fault)
    with pytest.raises(AssertionError):
        test_computed_tokens_do_not_see_later_ones([3, 9, 40, 41])


def test_tokens_may_leave_after_any_layer():
    """Those that go on have the outputs of a pass over all of them, and only they are counted."""
    chosen = torch.tensor([10, 33, 60])

    def narrowed(layer):
        class Narrowed(ConcatAligned):
            def run(self, mixed):
                return mixed.run(
                    mixed.places,
                    narrow=lambda step, kv: mixed.with_fresh(chosen) if step.layer == layer else None,
                )

        return Narrowed()

    count = len(chosen) + len(TAIL)
    for layer in range(4):
        with prefilled(narrowed(layer)) as session:
            assert [x.computed for x in session.layers] == [len(WHOLE)] * (layer + 1) + [count] * (3 - layer)
            assert [x.reused for x in session.layers] == [0] * (layer + 1) + [len(WHOLE) - count] * (3 - layer)
    assert distance(run(narrowed(3)), run_full()) < 1e-4


def test_effect_counts_what_was_taken_over():
    """Of all four layers, and the bytes moved are those of the chunks."""
    with prefilled(ConcatAligned()) as session:
        effect = session.effect()
        assert effect.acted and not effect.identity
        assert effect.facts["entries_reused"] == 4 * (len(WHOLE) - len(TAIL))
        assert effect.facts["tokens_computed"] == 4 * len(TAIL)
        assert session.reuse.moved_bytes == session.reuse.store.nbytes
        assert session.reuse.build_seconds > 0


def test_one_layer_that_takes_entries_over_makes_a_prompt_inexact():
    """The three layers before it compute every token."""

    class Late(ConcatAligned):
        def run(self, mixed):
            return mixed.run(mixed.places, narrow=lambda step, kv: mixed.fresh if step.layer == 2 else None)

    with prefilled(Late()) as session:
        assert [x.reused > 0 for x in session.layers] == [False, False, False, True]
        assert not session.effect().identity


def test_chunks_are_built_once():
    """A second prompt in another order takes them from the store, and no time to build."""
    store = ChunkStore()
    with prefilled(ConcatAligned(), store=store):
        pass
    with prefilled(ConcatAligned(), store=store, parts=(LEAD, *DOCUMENTS[::-1])) as session:
        assert (store.hits, store.misses) == (4, 4)
        assert session.reuse.build_seconds == 0


def test_a_part_that_never_ran_is_computed():
    """And all of a prompt of which nothing ran, exactly."""
    with prefilled(ConcatAligned(), earlier=(ALONE[0], ALONE[2])) as session:
        assert session.layers[1].reused == len(LEAD) + len(DOCUMENTS[1])
    assert distance(run(ConcatAligned(), earlier=()), run_full()) < 1e-4
    with prefilled(ConcatAligned(), earlier=()) as session:
        assert session.effect().identity


OLD = ((1, 2), (3, 4, 5), (6,))


@pytest.mark.parametrize(("new", "edits"), [
    (OLD, []),
    (((1, 2), (9,), (3, 4, 5), (6,)), [Edit(2, 2, (9,))]),
    (((1, 2), (6,)), [Edit(2, 5, ())]),
    (((1, 2), (7, 8), (6,)), [Edit(2, 5, (7, 8))]),
    ((*OLD, (4,)), [Edit(6, 6, (4,))]),
])
def test_edits_turn_one_prompt_into_the_other(new, edits):
    """Insertion, deletion, replacement and an end that grows; kept spans hold the same tokens."""
    assert find_edits(OLD, new) == edits
    before, wanted = [x for part in OLD for x in part], [x for part in new for x in part]
    found, spans = apply_edits(before, edits)
    assert found == wanted
    assert all(before[a : a + n] == wanted[b : b + n] for a, b, n in spans)
    assert sum(n for _, _, n in spans) == len(before) - sum(x.stop - x.start for x in edits)


def test_edits_may_meet_each_other_and_both_ends():
    """The first two of six tokens are replaced, the next one goes, and one comes behind the last."""
    found, spans = apply_edits(range(6), [Edit(2, 3, ()), Edit(6, 6, (9,)), Edit(0, 2, (7, 8))])
    assert found == [7, 8, 3, 4, 5, 9]
    assert spans == [(3, 2, 3)]


@pytest.mark.parametrize(("edits", "words"), [
    ([Edit(4, 9, ())], "tokens 4 to 9 is not within the prompt of 6"),
    ([Edit(-1, 2, ())], "not within"), ([Edit(3, 2, ())], "not within"),
    ([Edit(0, 3, ()), Edit(2, 4, ())], "overlaps"),
])
def test_an_edit_outside_the_prompt_is_refused(edits, words):
    """In one line that names it."""
    with pytest.raises(UserError, match=words):
        apply_edits(range(6), edits)


def test_the_last_token_always_runs():
    """Its logits are wanted, although a chunk holds it."""
    with prefilled(ConcatAligned(), tail=[]) as session:
        assert session.layers[0].computed == 1
        assert session.logits.isfinite().all()
    with pytest.raises(AssertionError, match="last token"):
        MixedPrompt.run(MixedPrompt(session, torch.tensor([WHOLE]), session.reuse, None), torch.tensor([1]))
