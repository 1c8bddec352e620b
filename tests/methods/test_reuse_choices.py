"""The tokens that methods of reuse choose to compute again, worked out apart from the attention of full prefills."""

from __future__ import annotations

import math

import pytest
import torch

from kvbench.check.trial import random_ids
from kvbench.engine.reuse import run_prompt
from kvbench.methods.reuse.cache_craft import find_share
from kvbench.registry import find_method
from kvbench.store.reused import ReusedKV
from tests.methods.reuse import DOCUMENTS, LEAD, TAIL, distance, model, prefilled, run, run_full
from tests.methods.test_reuse import AT_HAND, LENGTH, OTHER

MOVED = (LEAD, DOCUMENTS[1], DOCUMENTS[0], DOCUMENTS[2])
LAST = 3
"""The last of four layers."""


@pytest.fixture
def passes(monkeypatch):
    """Steps, keys and places of every pass of a prompt, by layer."""
    found = {}
    original = ReusedKV.attend_at

    def spy(kv, step, places):
        found.setdefault(step.layer, []).append((step, kv.keys.clone(), places))
        return original(kv, step, places)

    monkeypatch.setattr(ReusedKV, "attend_at", spy)
    return found


def join(parts):
    """The tokens of a prompt."""
    return [x for part in parts for x in part]


def observe_full(ids):
    """The steps of a full prefill, by layer; each has the queries, keys and values of all tokens."""
    steps = []
    run_prompt(model(), ids, lambda step, kv: steps.append(step))
    return steps


def weigh(step, row, columns):
    """Attention weights of a token over these, per query head, with a softmax over them alone. [H_q, n]"""
    keys = step.key[0].repeat_interleave(step.query.shape[1] // step.key.shape[1], 0)[:, columns]
    return ((keys @ step.query[0, :, row, :, None])[..., 0] * step.scale).softmax(-1)


def find_rows(passes, number=-1):
    """The places that ran in the last layer."""
    return set(passes[LAST][number][2].tolist())


def test_cacheblend_without_a_share_is_concatenation_but_for_its_first_layers():
    """Those were computed whole, and later ones run the question alone."""
    with prefilled(find_method("cacheblend")(ratio=0.0)) as ours, prefilled(find_method("concat-aligned")()) as plain:
        assert [x.computed for x in ours.layers] == [LENGTH, LENGTH, len(TAIL), len(TAIL)]
        for layer in (2, 3):
            assert torch.equal(ours.layers[layer].keys[:, :, :AT_HAND], plain.layers[layer].keys[:, :, :AT_HAND])


def test_epic_without_first_tokens_is_concatenation():
    """Of documents that were run alone."""
    assert torch.equal(run(find_method("epic")(first=0)), run(find_method("concat-aligned")(behind="nothing")))


def test_kvshare_computes_the_attended_tokens_whose_values_changed(passes):
    """Importance is the attention of the token before the last times the change of values in layer 1, over reused."""
    with prefilled(find_method("kvshare")(ratio=0.2, width=5), parts=MOVED, earlier=(OTHER,)):
        taken = sorted(set(range(LENGTH)) - set(range(len(LEAD))) - set(range(AT_HAND, LENGTH)))
    step, old = observe_full([*join(MOVED), *TAIL])[1], run_prompt(model(), join(OTHER)).values[1]
    places = {part: sum(map(len, OTHER[: OTHER.index(part)])) for part in DOCUMENTS}
    source = [places[part] + i for part in MOVED[1:] for i in range(len(part))]
    change = (step.value[0, :, taken] - old[0, :, source]).abs().sum((0, 2))
    importance = weigh(step, LENGTH - 2, taken).mean(0) * change
    chosen = importance.topk(int(0.2 * len(taken))).indices.tolist()
    assert find_rows(passes) == set(range(LENGTH)) - set(taken) | {taken[i] for i in chosen}


def test_kvshare_weighs_the_tokens_taken_over_among_themselves(passes):
    """By a softmax over them alone; weights of a softmax over the whole prompt would choose others."""
    parts, earlier = (LEAD, tuple(random_ids(60, seed=31)), DOCUMENTS[2]), (OTHER[0], DOCUMENTS[2])
    with prefilled(find_method("kvshare")(ratio=0.3), parts=parts, earlier=(earlier,)):
        pass
    ids = [*join(parts), *TAIL]
    taken, row = list(range(len(LEAD) + 60, len(ids) - len(TAIL))), len(ids) - 2
    step, old = observe_full(ids)[1], run_prompt(model(), join(earlier)).values[1]
    change = (step.value[0, :, taken] - old[0, :, len(OTHER[0]) :]).abs().sum((0, 2))
    among, over_all = weigh(step, row, taken), weigh(step, row, list(range(row + 1)))[:, taken]
    wanted, others = ({taken[i] for i in (x.mean(0) * change).topk(7).indices.tolist()} for x in (among, over_all))
    assert wanted != others
    assert find_rows(passes) & set(taken) == wanted


def test_relaycaching_weighs_entries_that_the_last_tokens_see(passes):
    """A bound between a token's weight and the one that it has where those tokens also see later ones."""
    step, taken = observe_full([*join(MOVED), *TAIL])[1], list(range(len(LEAD), AT_HAND))
    seen, all_seen = torch.zeros(len(taken)), torch.zeros(len(taken))
    for row in range(LENGTH - 3, LENGTH):
        seen += weigh(step, row, list(range(row + 1))).sum(0)[taken]
        all_seen += weigh(step, row, list(range(LENGTH))).sum(0)[taken]
    seen, all_seen = seen / seen.mean(), all_seen / all_seen.mean()
    place = (seen - all_seen).abs().argmax()
    assert (seen - all_seen)[place].abs() > 1e-3
    bound = (seen[place] + all_seen[place]).item() / 2
    settings = {"start": 0.0, "detect": 0.34, "end": 1.0, "suffix": 3, "deviation": 1e9, "influence": bound}
    with prefilled(find_method("relaycaching")(**settings), parts=MOVED, earlier=(OTHER,)):
        pass
    wanted = {taken[i] for i in (seen > bound).nonzero()[:, 0].tolist()}
    assert set(passes[2][-1][2].tolist()) & set(taken) == wanted


def test_relaycaching_keeps_entries_outside_its_layers():
    """Below the first layer and above the last, those of the earlier prompt; new tokens are computed in every layer."""
    settings = {"start": 0.67, "detect": 0.67, "end": 0.67}
    with prefilled(find_method("relaycaching")(**settings), parts=MOVED, earlier=(OTHER,)) as session:
        held = [x.values for x in session.layers]
        assert [x.reused for x in session.layers] == [AT_HAND - len(LEAD)] * 2 + [0, AT_HAND - len(LEAD)]
    taken = list(range(len(LEAD), AT_HAND))
    new = [x for x in range(LENGTH) if x not in taken]
    places = {part: sum(map(len, OTHER[: OTHER.index(part)])) for part in DOCUMENTS}
    source = [places[part] + i for part in MOVED[1:] for i in range(len(part))]
    earlier, full = run_prompt(model(), join(OTHER)).values, observe_full([*join(MOVED), *TAIL])
    for layer in (0, 1, 3):
        assert distance(held[layer][:, :, taken], earlier[layer][:, :, source]) < 1e-5
    assert distance(held[1][:, :, new], full[1].value[:, :, new]) < 1e-5
    assert held[3][0, :, new].abs().amax(2).min() > 1e-3


def test_relaycaching_computes_tokens_that_deviate_or_are_attended_to(passes):
    """More than 1.5 and 1.45 times the mean in the detection layer, here layer 1."""
    settings = {"start": 0.0, "detect": 0.34, "end": 1.0, "suffix": 3}
    with prefilled(find_method("relaycaching")(**settings), parts=MOVED, earlier=(OTHER,)):
        pass
    taken = torch.arange(len(LEAD), AT_HAND)
    step, old = observe_full([*join(MOVED), *TAIL])[1], run_prompt(model(), join(OTHER)).values[1]
    places = {part: sum(map(len, OTHER[: OTHER.index(part)])) for part in DOCUMENTS}
    source = [places[part] + i for part in MOVED[1:] for i in range(len(part))]
    new, old = (x.transpose(0, 1).flatten(1) for x in (step.value[0][:, taken], old[0][:, source]))
    change = 1 - (new * old).sum(1) / (new.norm(dim=1) * old.norm(dim=1))
    weights = torch.zeros(LENGTH)
    for row in range(LENGTH - 3, LENGTH):
        weights[: row + 1] += weigh(step, row, list(range(row + 1))).sum(0)
    attended = weights[taken] > 1.45 * weights[taken].mean()
    deviates = change > 1.5 * change.mean()
    assert attended.any() and deviates.any() and not torch.equal(attended, deviates)
    wanted = set(taken[attended | deviates].tolist())
    assert set(passes[2][-1][2].tolist()) == wanted | set(range(len(LEAD))) | set(range(AT_HAND, LENGTH))


def test_relaycaching_takes_both_means_over_the_documents(passes):
    """An instruction of 120 tokens that an earlier prompt begins with, too, has deviations of 0 and is left out."""
    lead = tuple(random_ids(120, seed=61))
    parts, other = (lead, *MOVED[1:]), (lead, *DOCUMENTS)
    settings = {"start": 0.0, "detect": 0.34, "end": 1.0, "suffix": 3}
    with prefilled(find_method("relaycaching")(**settings), parts=parts, earlier=(other,)):
        pass
    ids = [*join(parts), *TAIL]
    taken = list(range(len(lead), len(ids) - len(TAIL)))
    step, old = observe_full(ids)[1], run_prompt(model(), join(other)).values[1]
    places = {part: sum(map(len, other[: other.index(part)])) for part in DOCUMENTS}
    source = [places[part] + i for part in parts[1:] for i in range(len(part))]
    new, old = (x.transpose(0, 1).flatten(1) for x in (step.value[0], old[0]))
    change = torch.zeros(taken[-1] + 1)
    change[taken] = 1 - torch.cosine_similarity(new[taken], old[source])
    weights = torch.zeros(len(ids))
    for row in range(len(ids) - 3, len(ids)):
        weights[: row + 1] += weigh(step, row, list(range(row + 1))).sum(0)
    for first in (0, len(lead)):
        means = change[first:].mean(), weights[first : taken[-1] + 1].mean()
        chosen = {x for x in taken if change[x] > 1.5 * means[0] or weights[x] > 1.45 * means[1]}
        assert (set(passes[2][-1][2].tolist()) == chosen | set(range(taken[-1] + 1, len(ids)))) == bool(first)


def test_relaycaching_computes_an_instruction_that_stood_elsewhere():
    """Its entries deviate, and only documents are corrected."""
    method = find_method("relaycaching")(start=0.67, detect=0.67, end=0.67)
    with prefilled(method, earlier=((DOCUMENTS[0], LEAD, *DOCUMENTS[1:]),)) as session:
        assert session.layers[0].reused == sum(map(len, DOCUMENTS))


@pytest.mark.parametrize("name", ["kvshare", "relaycaching"])
def test_a_hidden_question_does_not_choose_the_tokens(name, passes):
    """The prompt ends in a document then, and its last tokens decide; the card says so."""
    settings = {"start": 0.0, "detect": 0.34, "end": 1.0} if name == "relaycaching" else {}
    with prefilled(find_method(name)(**settings), parts=MOVED, earlier=(OTHER,), tail=[]) as session:
        chosen = len(passes[LAST][-1][2])
        session.ask(TAIL, 2)
    assert len(LEAD) < chosen < AT_HAND
    assert len(passes[LAST]) == 1
    assert any("hidden question" in x for x in find_method(name).card.limits)


def test_fusionrag_computes_the_tokens_that_the_question_attends_to_most(passes):
    """In the last layer, over the keys of one document alone, as they stood behind the instruction."""
    with prefilled(find_method("fusionrag")(ratio=0.2, similar=0)):
        pass
    step, keys, places = passes[LAST][0]
    assert places.tolist() == list(range(AT_HAND, LENGTH))
    rope, scores, start = model().ropes[LAST], [], len(LEAD)
    for part in DOCUMENTS:
        here = torch.arange(start, start + len(part))
        raw = rope.rotate(keys[:, :, here], here[None], inverse=True)
        stored = rope.rotate(raw, torch.arange(len(LEAD), len(LEAD) + len(part))[None])
        total = torch.zeros(len(part))
        for head in range(step.query.shape[1]):
            for row in range(len(TAIL)):
                total += (stored[0, head // 2] @ step.query[0, head, row] * step.scale).softmax(0)
        scores += total.tolist()
        start += len(part)
    chosen = sorted(range(len(scores)), key=scores.__getitem__)[-int(0.2 * len(scores)) :]
    assert find_rows(passes) == {len(LEAD) + x for x in chosen} | set(range(AT_HAND, LENGTH))


def test_cache_craft_computes_the_tokens_that_attend_to_what_stood_before(passes):
    """As many of a document as its equations say, by attention to earlier parts, mean over layers and heads."""
    with prefilled(find_method("cache-craft")(), parts=MOVED, earlier=(OTHER,)):
        pass
    steps, wanted, start = observe_full(join(OTHER)), set(), len(LEAD)
    for i, part in enumerate(MOVED[1:], 1):
        place = OTHER.index(part)
        ends = [sum(map(len, OTHER[: k + 1])) for k in range(place + 1)]
        first, sizes = ends[-1] - len(part), [len(x) for x in OTHER[: place + 1]]
        mass = torch.zeros(len(part), place + 1)
        for row in range(len(part)):
            weights = torch.stack([weigh(x, first + row, list(range(first + row + 1))).mean(0) for x in steps]).mean(0)
            begin = 0
            for k, end in enumerate(ends):
                mass[row, k] = weights[begin:end].sum()
                begin = end
        share = find_share(mass.sum(0).tolist(), sizes, OTHER[:place], MOVED[:i])
        count = math.ceil(min(1.0, share) * len(part))
        wanted |= {start + x for x in mass[:, :-1].sum(1).topk(count).indices.tolist()}
        start += len(part)
    assert 0 < len(wanted) < AT_HAND - len(LEAD)
    assert find_rows(passes) == wanted | set(range(len(LEAD))) | set(range(AT_HAND, LENGTH))


def test_prompt_cache_of_a_schema_with_one_module_is_exact():
    """It stands where it was encoded, before the question."""
    parts = (DOCUMENTS[0],)
    assert distance(run(find_method("prompt-cache")(), parts=parts, earlier=(parts,)), run_full(parts=parts)) < 1e-4


def test_ape_holds_documents_that_do_not_see_each_other():
    """Each as behind the instruction alone, all from the same position on; the question follows the longest."""
    with prefilled(find_method("ape")()) as session:
        held, start, end = session.layers[2], len(LEAD), 0
        for part in DOCUMENTS:
            alone, own = run_prompt(model(), [*LEAD, *part]), slice(len(LEAD), None)
            here = slice(start, start + len(part))
            start, end = here.stop, max(end, len(LEAD) + len(part))
            positions = torch.arange(len(LEAD), len(LEAD) + len(part))[None]
            assert distance(held.values[:, :, here], alone.values[2][:, :, own]) < 1e-5
            assert distance(held.keys[:, :, here], model().ropes[2].rotate(alone.keys[2][:, :, own], positions)) < 1e-4
        assert session.seen - session.behind == end + len(TAIL)
        asked = run_prompt(model(), TAIL).keys[0]  # keys of layer 0 before rotation depend on nothing else
        positions = torch.arange(end, end + len(TAIL))[None]
        assert distance(session.layers[0].keys[:, :, AT_HAND:], model().ropes[0].rotate(asked, positions)) < 1e-4
