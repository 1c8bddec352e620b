"""Methods that reuse entries across prompts: what each computes again, and when it is exact."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from kvbench.check.trial import random_ids
from kvbench.engine.agreement import FullCache
from kvbench.engine.reuse import MixedPrompt, Reuse, run_apart
from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf import Model
from kvbench.hf.tiny import tiny_model
from kvbench.method import Moment, Step
from kvbench.methods.reuse.cache_craft import find_share
from kvbench.methods.reuse.kvshare import align
from kvbench.registry import find_method, list_entries
from kvbench.store.chunks import ChunkStore
from kvbench.techniques.reuse import ReuseMethod
from tests.methods.reuse import ALONE, ANSWER, DOCUMENTS, LEAD, PARTS, TAIL, distance, model, prefilled, run, run_full

REUSE = [x.name for x in list_entries("method") if issubclass(find_method(x.name), ReuseMethod)]
LENGTH = sum(map(len, PARTS)) + len(TAIL)
WHOLE = {"cacheblend": {"ratio": 1.0}, "epic": {"first": 30}, "kvshare": {"ratio": 1.0}, "fusionrag": {"ratio": 1.0}}
"""Settings that compute everything again."""
AT_HAND = LENGTH - len(TAIL)


@pytest.mark.parametrize("name", WHOLE)
def test_everything_computed_again_equals_a_full_prefill(name):
    """Logits after the prompt and of an answer, to 1e-4."""
    assert distance(run(find_method(name)(**WHOLE[name])), run_full()) < 1e-4


@pytest.mark.parametrize("name", [x for x in REUSE if x not in ("no-context", "kvcomm")])
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


@pytest.mark.parametrize("name", [x for x in REUSE if x != "no-context"])
def test_learned_positions_are_refused(name):
    """They are in keys and values, which no rotation takes out: entries would stand at the positions where they ran."""
    module = GPT2LMHeadModel(GPT2Config(
        vocab_size=64, n_embd=32, n_layer=4, n_head=2, n_positions=256, bos_token_id=0, eos_token_id=0
    ))
    with (
        Session(Model.from_module(module), find_method(name)(), reuse=Reuse(PARTS, ALONE)) as session,
        pytest.raises(UserError, match=r"learned its positions.*Use a model with rotary embedding"),
    ):
        session.prefill([x for part in PARTS for x in part], visible=TAIL)


@pytest.mark.parametrize("name", ["relaycaching", "pie", "kvshare", "cache-craft"])
def test_an_earlier_prompt_of_more_tokens_than_the_model_has_positions_is_refused(name):
    """The prompt itself has fewer; notes of an agent are in the earlier one only."""
    short, notes = replace(model(), max_length=100), tuple(random_ids(40, seed=66))
    with (
        Session(short, find_method(name)(), capacity=100, reuse=Reuse(PARTS, ((LEAD, notes, *DOCUMENTS),))) as session,
        pytest.raises(UserError, match=r"has 121 tokens, and .* has 100 positions. Use a smaller --length"),
    ):
        session.prefill([x for part in PARTS for x in part], visible=TAIL)


def test_no_context_runs_instruction_and_tail_alone():
    """Its logits are those of the prompt without documents."""
    assert torch.equal(run(find_method("no-context")()), run_full(parts=(LEAD,)))
    with prefilled(find_method("no-context")()) as session:
        assert session.layers[0].n == len(LEAD) + len(TAIL)
        assert session.effect().acted


def test_no_context_is_compared_with_the_full_cache_of_the_whole_conversation():
    """The documents are a part of it, at its end as after the context."""
    with prefilled(find_method("no-context")()) as session, Session(model(), FullCache(), capacity=400) as full:
        full.prefill([x for part in PARTS for x in part], visible=TAIL)
        for one in (session, full):
            one.force(ANSWER)
        ours, theirs = session.memory(), full.memory()
    for name in ("full_bytes", "end_full_bytes", "full_read_bytes_per_step"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.end_stored_bytes < 0.3 * ours.end_full_bytes


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


NOTES = tuple(random_ids(50, seed=62))
AGENTS = ((NOTES, DOCUMENTS[0]), (NOTES, *DOCUMENTS[:2]), (NOTES, *DOCUMENTS))
"""Prompts of agents, whose notes are longer than the instruction of the prompt that has their reports."""


def test_prompt_cache_has_the_question_behind_all_of_the_schema():
    """Its positions, and those of the answer, are ahead of the count of tokens."""
    ahead = len(NOTES) - len(LEAD)
    with prefilled(find_method("prompt-cache")(), earlier=AGENTS) as session:
        assert session.behind == -ahead
        later = random_ids(3, seed=5)
        session.force(later)
        raw = run_apart(model(), (), [*TAIL, *later[:2]]).keys[0]  # of layer 0, where keys depend on nothing before
        places = torch.arange(AT_HAND, AT_HAND + raw.shape[2])[None]
        assert distance(session.layers[0].keys[:, :, places[0]], model().ropes[0].rotate(raw, places + ahead)) < 1e-4


def test_prompt_cache_has_the_question_behind_documents_that_are_not_in_the_schema():
    """As in the prompt, where nothing of the schema reaches as far."""
    with prefilled(find_method("prompt-cache")(), earlier=((LEAD,), (DOCUMENTS[0],))) as session:
        assert session.behind == 0


def test_prompt_cache_refuses_a_conversation_that_needs_more_positions_than_the_model_has():
    """The schema counts, not the prompt."""
    most = model().max_length
    far = ((tuple(random_ids(most - 100, seed=63)), *DOCUMENTS),)
    with pytest.raises(UserError, match=f"needs .* positions, and .* has {most}. Use a smaller --length"):
        run(find_method("prompt-cache")(), earlier=far)


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


BEFORE = (PARTS,)
"""The prompt ran before as it is."""
EXACT = {
    "pie": {}, "cache-craft": {}, "kvshare": {}, "relaycaching": {}, "kamera": {"rank": 64}, "kvcomm": {"entropy": 1.0},
}
"""Methods that take entries from earlier prompts: exact if the earlier prompt had the same parts before each."""


@pytest.mark.parametrize("name", EXACT)
def test_a_prompt_that_ran_before_is_exact(name):
    """The same parts in the same order: entries, offsets and patches are those of this prompt."""
    earlier = BEFORE * 2 if name == "kvcomm" else BEFORE
    with prefilled(find_method(name)(**EXACT[name]), earlier=earlier) as session:
        assert session.layers[-1].reused > 0.3 * LENGTH
    assert distance(run(find_method(name)(**EXACT[name]), earlier=earlier), run_full()) < 1e-3


OTHER = (tuple(random_ids(6, seed=7)), DOCUMENTS[2], DOCUMENTS[0], tuple(random_ids(9, seed=8)), DOCUMENTS[1])
"""An earlier prompt with the documents in another order and behind another instruction."""


@pytest.mark.parametrize(("name", "settings"), [
    ("kvshare", {"ratio": 1.0}), ("cache-craft", {"alpha": 100.0}), ("fusionrag", {"ratio": 1.0}),
    ("relaycaching", {"start": 0.0, "end": 1.0, "deviation": -1.0, "influence": -1.0}),
])
def test_everything_computed_after_another_order_equals_a_full_prefill(name, settings):
    """Entries of another context are at hand, and none is used."""
    parts = (LEAD, DOCUMENTS[1], DOCUMENTS[0], DOCUMENTS[2])
    full = run_full(parts=parts)
    assert distance(run(find_method(name)(**settings), parts=parts, earlier=(OTHER,)), full) < 1e-4
    assert distance(run(find_method(name)(), parts=parts, earlier=(OTHER,)), full) > 1e-3


def test_pie_keeps_what_an_edit_leaves_and_rotates_it():
    """Keys behind the edit are those of the old prompt, shifted; the inserted tokens are exact."""
    new = tuple(random_ids(11, seed=5))
    parts = (LEAD, DOCUMENTS[0], new, DOCUMENTS[2])
    with prefilled(find_method("pie")(), parts=parts, earlier=BEFORE) as session:
        old = Session(model(), FullCache(), capacity=400)
        with old as full:
            full.prefill([x for part in PARTS for x in part])
            kept, shift = full.layers[3].keys[:, :, 56:81], -9  # 20 tokens were replaced by 11
            moved = model().ropes[3].shift(kept, torch.full((1, 25), shift))
            assert distance(session.layers[3].keys[:, :, 47:72], moved) < 1e-4
        assert session.layers[0].computed == len(new) + len(TAIL)
        with Session(model(), FullCache(), capacity=400) as exact:
            exact.prefill([x for part in parts for x in part])
            assert distance(session.layers[3].values[:, :, :47], exact.layers[3].values[:, :, :47]) < 1e-4


def test_pie_without_a_shift_is_caught(monkeypatch):
    """Keys that stay where they were, as in conflict fast encoding, are farther from a full prefill."""
    parts = (LEAD, DOCUMENTS[0], DOCUMENTS[1], (1, 2, 3), DOCUMENTS[2])
    full = run_full(parts=parts)
    good = distance(run(find_method("pie")(), parts=parts, earlier=BEFORE), full)
    add = MixedPrompt.add
    monkeypatch.setattr(MixedPrompt, "add", lambda self, *args, **options: add(
        self, *args, at=options["first"], **options
    ))
    assert distance(run(find_method("pie")(), parts=parts, earlier=BEFORE), full) > good


@pytest.mark.parametrize(("source", "target", "wanted"), [
    ("abcdefgh", "abcdefgh", [0, 1, 2, 3, 4, 5, 6, 7]),
    ("abcdef", "xabcdefy", [None, 0, 1, 2, 3, 4, 5, None]),
    ("abcxdef", "abcydef", [0, 1, 2, None, 4, 5, 6]),
    ("abcabc", "abc", [0, 1, 2]),
    ("abcd", "abxcd", [None] * 5),
    ("abcxbcd", "abcd", [0, 1, 2, 6]),
])
def test_kvshare_aligns_common_segments(source, target, wanted):
    """Of three tokens or more; the first in the source, and of two the longer."""
    found = align(list(map(ord, source)), list(map(ord, target)), 3)
    assert [None if x is None else x[1] for x in found] == wanted


def test_kvshare_without_a_common_segment_is_a_full_prefill():
    """Bit for bit."""
    with prefilled(find_method("kvshare")(width=30), earlier=(OTHER[:1],)) as session:
        assert session.effect().identity
        assert torch.equal(session.logits, run_full()[:1])


def test_kvshare_as_released_chooses_other_tokens_behind_the_first_new_one():
    """Ranks are places only where nothing new stands before."""
    parts = ((1, 2, 3, 4, 5, 6, 7), *DOCUMENTS)
    found = [run(find_method("kvshare")(as_released=x), parts=parts, earlier=(OTHER,)) for x in (False, True)]
    assert distance(*found) > 1e-3


def test_cache_craft_by_hand():
    """Equations 6 to 12 with two parts before: same prefix, half of it, and its reverse."""
    old = ((1,), (2,))
    masses, sizes = [3.0, 1.0, 4.0], [1, 1, 2]
    influence = 1 / (1 + math.exp(-(1.5 + 0.5) / 1.0))
    assert find_share(masses, sizes, old, old) == 0
    assert find_share(masses, sizes, old, ((2,), (1,))) == pytest.approx(influence)
    assert find_share(masses, sizes, old, ((1,), (9,))) == pytest.approx(influence * 0.25)
    assert find_share([4.0], [2], (), ((9,),)) == 0


def test_fusionrag_computes_the_tokens_that_the_question_attends_to():
    """The question runs twice, and a share of the documents' tokens once; without a question there is no choice."""
    with prefilled(find_method("fusionrag")(ratio=0.2, similar=0)) as session:
        documents = sum(map(len, DOCUMENTS))
        assert {x.computed for x in session.layers} == {2 * len(TAIL) + int(0.2 * documents)}
    with pytest.raises(UserError, match="leave --visibility out"), prefilled(find_method("fusionrag")(), tail=[]):
        pass


def test_fusionrag_without_similar_documents_and_computation_is_concatenation_behind_the_instruction():
    """The method without its two ideas."""
    plain = run(find_method("concat-aligned")(behind="instruction"))
    assert distance(run(find_method("fusionrag")(ratio=0.0, similar=0)), plain) < 1e-5
    assert distance(run(find_method("fusionrag")(ratio=0.0, similar=1)), plain) > 1e-3


def test_fusionrag_takes_a_document_that_is_the_instruction_again():
    """It is one of the documents then, and can be similar to others."""
    logits = run(find_method("fusionrag")(), parts=(LEAD, LEAD, DOCUMENTS[0]), earlier=((LEAD, DOCUMENTS[0]),))
    assert logits.isfinite().all()


def test_fusionrag_takes_all_other_documents_where_there_are_fewer_similar_ones():
    """Two of three."""
    few, many = (run(find_method("fusionrag")(ratio=0.0, similar=x)) for x in (2, 9))
    assert torch.equal(few, many)
    assert distance(few, run(find_method("fusionrag")(ratio=0.0, similar=1))) > 1e-3


NEUTRAL = {"temperature": 1.0, "scale": 1.0}


def test_ape_with_one_document_and_no_correction_is_exact():
    """Instruction, document and question in sequence."""
    parts = (LEAD, DOCUMENTS[0])
    earlier = tuple((x,) for x in parts)
    assert distance(run(find_method("ape")(**NEUTRAL), parts=parts, earlier=earlier), run_full(parts=parts)) < 1e-4


def test_ape_does_not_depend_on_the_order_of_documents():
    """All stand at the same positions."""
    turned = (LEAD, *DOCUMENTS[::-1])
    assert distance(run(find_method("ape")()), run(find_method("ape")(), parts=turned)) < 1e-4


def test_ape_computes_parts_that_no_earlier_prompt_has():
    """They run apart as the others did, so the answer is the same; tokens and time are those of this prompt."""
    method, apart = find_method("ape")(), sum(map(len, DOCUMENTS[1:]))
    with prefilled(method, earlier=ALONE[:2]) as session, prefilled(method) as known:
        assert torch.equal(session.logits, known.logits)
        assert session.layers[0].reused == known.layers[0].reused - apart
        assert session.layers[0].computed == known.layers[0].computed + apart
        assert (session.reuse.store.misses, known.reuse.store.misses) == (2, 4)
    with prefilled(method, earlier=()) as session:
        assert (session.layers[0].reused, session.reuse.build_seconds) == (0, 0.0)
        assert not session.exact


def test_ape_has_no_static_step_over_documents():
    """A captured step would read as many entries after the documents as the first one did."""
    with (
        prefilled(find_method("ape")()) as session,
        pytest.raises(UserError, match="no static decode step after a prompt with documents"),
    ):
        session.make_static()


def test_ape_weighs_the_documents_as_its_formula_says():
    """Against one softmax over explicit logits, for the question's first layer and a later token."""
    method = find_method("ape")(temperature=0.7, scale=0.8)
    with prefilled(method) as session:
        kv = session.layers[1]
        start, end = kv.documents
        torch.manual_seed(0)
        query = torch.randn(1, 4, 1, 16)
        step = make_step(query, kv)
        logits = (query[0].unflatten(0, (2, 2)) @ kv.keys[0, :, None].transpose(-1, -2))[:, :, 0] * 0.25  # [2, 2, N]
        inside, rest = logits[..., start:end] / 0.7, torch.cat([logits[..., :start], logits[..., end:]], dim=-1)
        mass, other = inside.exp().sum(-1) ** (0.8 * 0.7), rest.exp().sum(-1)
        values = kv.values[0, :, None]
        outside = torch.cat([values[:, :, :start], values[:, :, end:]], dim=2)
        a = (inside.softmax(-1)[:, :, None] @ values[:, :, start:end])[:, :, 0]
        b = (rest.softmax(-1)[:, :, None] @ outside)[:, :, 0]
        wanted = (mass[..., None] * a + other[..., None] * b) / (mass + other)[..., None]
        assert distance(kv.attend(step)[0, :, 0], wanted.flatten(0, 1)) < 1e-4


def make_step(query, kv):
    """A decode step of this query over a store."""
    return Step(
        layer=1, moment=Moment.DECODE, positions=torch.tensor([[kv.n - 1]]), seen=kv.n, query=query,
        key=query[:, :2], value=query[:, :2], scale=0.25, window=None, softcap=None, sinks=None, causal=True,
        rope=model().ropes[1],
    )


def test_relaycaching_corrects_chosen_tokens_between_two_layers():
    """Whole up to the detection layer, chosen tokens up to the last, and only new tokens after it."""
    parts = (LEAD, DOCUMENTS[1], DOCUMENTS[0], DOCUMENTS[2])
    settings = {"start": 0.0, "detect": 0.34, "end": 0.67}
    with prefilled(find_method("relaycaching")(**settings), parts=parts, earlier=(OTHER,)) as session:
        first, second, third, last = (x.computed for x in session.layers)
        fresh = len(LEAD) + len(TAIL)
        assert first == second == LENGTH
        assert fresh < third < LENGTH
        assert last == fresh
        assert [x.reused for x in session.layers] == [0, 0, LENGTH - third, LENGTH - fresh]


def test_kamera_comes_closer_to_the_context_with_every_rank():
    """Rank 0 is concatenation; the rank of a document is its entries in the earlier prompt."""
    found = [distance(run(find_method("kamera")(rank=x), earlier=BEFORE), run_full()) for x in (0, 8, 32)]
    assert found[0] > found[1] > found[2]
    assert found[2] < 1e-3
    assert distance(run(find_method("kamera")(rank=0)), run(find_method("concat-aligned")())) == 0


def test_a_patch_is_of_one_document_after_one_token():
    """The same earlier prompt, and a prompt that begins otherwise: its documents are run after another token."""
    store, other = ChunkStore(), ((9, *LEAD[1:]), *DOCUMENTS)
    assert LEAD[0] != 9
    method = find_method("kamera")(rank=8)
    run(method, earlier=BEFORE, store=store)
    assert torch.equal(run(method, parts=other, earlier=BEFORE, store=store), run(method, parts=other, earlier=BEFORE))


def test_attention_between_parts_is_of_one_division_into_parts():
    """The same tokens in other parts have other sums."""
    joined, store = (LEAD, (*DOCUMENTS[0], *DOCUMENTS[1]), DOCUMENTS[2]), ChunkStore()
    method, parts = find_method("cache-craft")(), (LEAD, DOCUMENTS[2])
    run(method, parts=parts, earlier=BEFORE, store=store)
    again = run(method, parts=parts, earlier=(joined,), store=store)
    assert torch.equal(again, run(method, parts=parts, earlier=(joined,)))


def test_kvcomm_adds_the_offset_of_the_text_itself():
    """Of a pool with the same text twice, the offset is its own; weights that do not sum to one would show."""
    method = find_method("kvcomm")(entropy=1.0)
    with prefilled(method, earlier=BEFORE * 2) as session, Session(model(), FullCache(), capacity=400) as full:
        full.prefill([x for part in PARTS for x in part])
        for ours, theirs in zip(session.layers, full.layers, strict=True):
            assert distance(ours.keys[:, :, :AT_HAND], theirs.keys[:, :, :AT_HAND]) < 1e-4


def test_kvcomm_as_released_is_exact_only_at_the_same_place():
    """Offsets of rotated keys do not fit another place; those before rotation do."""
    moved = (LEAD, tuple(random_ids(35, seed=4)), *DOCUMENTS[1:])
    place = len(LEAD) + 35
    held = {}
    for released in (False, True):
        method = find_method("kvcomm")(as_released=released, entropy=1.0)
        with prefilled(method, parts=moved, earlier=BEFORE * 2) as session:
            held[released] = find_keys(session, 2, place, DOCUMENTS[1])
        same = run(method, earlier=BEFORE * 2)
        assert distance(same, run_full()) < 1e-3
    chunk = run_apart(model(), [*LEAD, *DOCUMENTS[0]], DOCUMENTS[1])
    assert distance(held[False], chunk.keys[2]) < 1e-4
    assert distance(held[True], chunk.keys[2]) > 1e-2


def test_kvcomm_computes_a_document_without_anchors():
    """One earlier prompt is too few, and so are two alike, of which neither stands out."""
    with prefilled(find_method("kvcomm")(), earlier=BEFORE * 2) as session:
        assert session.layers[1].reused == len(LEAD)
    with prefilled(find_method("kvcomm")(), earlier=BEFORE) as session:
        assert session.layers[1].reused == len(LEAD)
