"""Formulas of methods of reuse on hand-made numbers, and their choices among earlier texts worked out apart."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from kvbench.check.trial import random_ids
from kvbench.engine.agreement import FullCache
from kvbench.engine.reuse import Reuse, run_apart
from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf import load_model
from kvbench.methods.reuse.ape import Ape, ParallelKV
from kvbench.methods.reuse.kamera import factor, patch
from kvbench.methods.reuse.kvcomm import mix
from kvbench.methods.reuse.kvshare import KVShare
from kvbench.registry import find_method
from kvbench.store.reused import ReusedKV
from tests.methods.reuse import ALONE, DOCUMENTS, LEAD, PARTS, TAIL, distance, model, prefilled, run

FIRST = LEAD[:1]
"""The tokens behind which documents are run."""


def test_two_prompts_at_once_are_refused():
    """Parts are those of one prompt."""
    ids = torch.tensor([[x for part in PARTS for x in part]] * 2)
    with (
        Session(model(), find_method("epic")(), capacity=100, reuse=Reuse(PARTS, ALONE)) as session,
        pytest.raises(UserError, match="epic runs one prompt at a time, not 2"),
    ):
        session.prefill(ids)


def column(*numbers):
    """One layer of entries with one channel. [1, T, 1]"""
    return torch.tensor(numbers, dtype=torch.float32)[None, :, None]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_kvcomm_mixes_offsets_token_by_token(temperature):
    """Weights are a softmax of distances, mean over layers, to the first tokens of each anchor; layer 0 stays."""
    own = torch.stack([column(0, 0), column(0, 0)])
    anchors = [torch.stack([column(1, 0, 9), column(3, 2, 9)]), torch.stack([column(2, 4, 9), column(0, 2, 9)])]
    offsets = [torch.stack([column(7, 7, 7), column(1, 10, 50)]), torch.stack([column(7, 7, 7), column(2, 20, 60)])]
    found = mix(own, anchors, offsets, temperature)
    first = 1 / (1 + math.exp((2 - 1) / temperature))  # mean distances 2 and 1 of the first token
    second = 1 / (1 + math.exp((1 - 3) / temperature))
    assert found[0].flatten().tolist() == [0, 0]
    assert found[1].flatten().tolist() == pytest.approx([first + 2 * (1 - first), 10 * second + 20 * (1 - second)])


def replace_last(ids, *tokens):
    """The same tokens with other ones at the end."""
    return (*ids[: -len(tokens)], *tokens)


DOCUMENT = tuple(random_ids(24, seed=40))
NEAR = replace_last(DOCUMENT, 20), replace_last(DOCUMENT, 42), replace_last(DOCUMENT, 2, 3)
"""Texts in whose place the document stands now."""
EARLIER = ((DOCUMENT,), *((LEAD, x) for x in NEAR[:2]))
"""The document ran alone, and is no anchor itself."""


def measure_entropy(size, logarithm=math.log2, entries="values"):
    """Entropy of the anchors' weights over its maximum."""
    own, *others = (torch.cat(getattr(run_apart(model(), FIRST, x), entries)) for x in (DOCUMENT, *NEAR[:2]))
    weights = torch.stack([-size(own - x) for x in others]).softmax(0).tolist()
    return -sum(x * logarithm(x) for x in weights) / math.log2(2)


def test_kvcomm_computes_a_document_whose_anchors_are_equally_far():
    """By the entropy in bits of a softmax of norms over all values, against a share of its maximum."""
    bound = measure_entropy(torch.norm)
    in_nats, of_keys = measure_entropy(torch.norm, math.log), measure_entropy(torch.norm, entries="keys")
    assert all(abs(x - bound) > 0.1 for x in (0, 1, in_nats, of_keys, measure_entropy(lambda x: x.abs().mean())))
    for entropy, reused in ((bound - 0.02, len(LEAD)), (bound + 0.02, len(LEAD) + len(DOCUMENT))):
        method = find_method("kvcomm")(entropy=entropy)
        with prefilled(method, parts=(LEAD, DOCUMENT), earlier=EARLIER) as session:
            assert session.layers[1].reused == reused


def test_kvcomm_keeps_the_latest_anchors_of_a_place():
    """With two of three, the oldest changes nothing."""
    older, kept = (LEAD, NEAR[2]), {"parts": (LEAD, DOCUMENT), "earlier": EARLIER}
    more = {**kept, "earlier": (EARLIER[0], older, *EARLIER[1:])}
    latest = run(find_method("kvcomm")(entropy=1.0, anchors=2), **more)
    assert torch.equal(latest, run(find_method("kvcomm")(entropy=1.0), **kept))
    assert distance(latest, run(find_method("kvcomm")(entropy=1.0), **more)) > 1e-4


def test_ape_attends_to_documents_with_a_temperature_of_their_own(monkeypatch):
    """The question's tokens in the prompt: documents by their formula, apart from all else."""
    seen, original = {}, ParallelKV.attend_at

    def spy(kv, step, places):
        output = original(kv, step, places)
        seen[step.layer] = step, kv.keys.clone(), kv.values.clone(), places.tolist(), output
        return output

    monkeypatch.setattr(ParallelKV, "attend_at", spy)
    with prefilled(Ape(temperature=0.5, scale=0.7)):
        pass
    step, keys, values, places, output = seen[2]
    first, end = len(LEAD), sum(map(len, PARTS))
    assert places == list(range(end, end + len(TAIL)))
    for head in range(4):
        for row, place in enumerate(places):
            logits = keys[0, head // 2, : place + 1] @ step.query[0, head, row] * step.scale
            inside = torch.zeros(place + 1, dtype=torch.bool)
            inside[first:end] = True
            documents, rest = logits[inside] / 0.5, logits[~inside]
            mass, other = documents.exp().sum() ** (0.7 * 0.5), rest.exp().sum()
            held = values[0, head // 2, : place + 1]
            wanted = mass * (documents.softmax(0) @ held[inside]) + other * (rest.softmax(0) @ held[~inside])
            assert distance(output[0, head, row], wanted / (mass + other)) < 1e-4


@pytest.mark.parametrize("change", [{"softcap": 5.0}, {"sinks": torch.zeros(4)}])
def test_ape_refuses_soft_caps_and_sinks(change):
    """Its two attentions have neither."""
    step = SimpleNamespace(**{"softcap": None, "sinks": None, **change})
    with pytest.raises(UserError, match="ape does not support models with soft caps or learned sinks"):
        ParallelKV().attend_at(step, torch.tensor([3]))


def test_pie_edits_the_latest_of_equally_similar_prompts():
    """The entries behind the edit are those that it left."""
    older, later, now = ((LEAD, DOCUMENTS[0], x, DOCUMENTS[2]) for x in (NEAR[0], DOCUMENTS[1], DOCUMENT))
    method = find_method("pie")()
    found = run(method, parts=now, earlier=(older, later))
    assert torch.equal(found, run(method, parts=now, earlier=(later,)))
    assert distance(found, run(method, parts=now, earlier=(older,))) > 1e-3


def test_a_patch_is_the_best_matrix_of_its_rank():
    """Of singular values 5, 3 and 1, those that are left out are the error; the heads of a layer share the matrix."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(n, 3, generator=generator)).Q for n in (7, 8))
    change = (left * torch.tensor([5.0, 3.0, 1.0])) @ right.T
    entries = change.unflatten(1, (2, 4)).transpose(0, 1)[None]  # [1, H, T, D]
    for rank, error in ((1, math.sqrt(10)), (2, 1.0), (3, 0.0)):
        a, b = factor(entries, rank)
        assert (a.shape, b.shape) == ((7, rank), (rank, 8))
        base = torch.randn(entries.shape, generator=generator)
        assert (patch(base, a, b) - base - entries).norm().item() == pytest.approx(error, abs=1e-5)


def test_prompt_cache_has_the_positions_of_the_first_prompt():
    """A document that stood elsewhere later stays where the schema put it."""
    schema, later = (LEAD, DOCUMENTS[0]), (LEAD, DOCUMENTS[1], DOCUMENTS[0])
    ours = {"parts": (LEAD, DOCUMENTS[2], DOCUMENTS[0])}
    method = find_method("prompt-cache")()
    first = run(method, earlier=(schema, later), **ours)
    assert torch.equal(first, run(method, earlier=(schema, (DOCUMENTS[1],)), **ours))
    assert distance(first, run(method, earlier=(later, schema), **ours)) > 1e-3


LIBRARY = tuple(tuple(random_ids(n, seed=50 + n)) for n in (8, 11, 14, 17, 20))


def find_nearest(similarity, *, mean=True):
    """The most similar other document of each."""
    embed = model().module.get_input_embeddings()
    vectors = [embed(torch.tensor(x)).mean(0) if mean else embed(torch.tensor(x))[0] for x in LIBRARY]
    found = []
    for i, x in enumerate(vectors):
        found.append(max((j for j in range(len(LIBRARY)) if j != i), key=lambda j: similarity(x, vectors[j]).item()))
    return found


def test_fusionrag_runs_each_document_behind_the_most_similar_other():
    """By the cosine of mean embeddings, and behind the instruction."""
    nearest = find_nearest(lambda a, b: torch.cosine_similarity(a, b, dim=0))
    assert nearest != find_nearest(torch.dot)
    assert nearest != find_nearest(lambda a, b: torch.cosine_similarity(a, b, dim=0), mean=False)
    parts = (LEAD, *LIBRARY)
    with prefilled(find_method("fusionrag")(ratio=0.0), parts=parts, earlier=tuple((x,) for x in parts)) as session:
        start = len(LEAD)
        for part, other in zip(LIBRARY, nearest, strict=True):
            there = run_apart(model(), [*LEAD, *LIBRARY[other]], part)
            assert distance(session.layers[2].values[:, :, start : start + len(part)], there.values[2]) < 1e-5
            start += len(part)


def test_kvshare_computes_punctuation_and_the_last_token_of_a_prompt_that_ran_before(monkeypatch):
    """Nothing deviates, so nothing else is chosen."""
    text = "One, two. Three; four: five!\nThe blue lamp is 1234. Is it? Yes, it is so. What then."
    bundled = load_model("mini", dtype="float32")
    ids = tuple(bundled.tokenizer(text, add_special_tokens=False).input_ids)
    ran, original = {}, ReusedKV.attend_at

    def spy(kv, step, places):
        ran[step.layer] = places.tolist()
        return original(kv, step, places)

    monkeypatch.setattr(ReusedKV, "attend_at", spy)
    with Session(bundled, KVShare(), capacity=len(ids), reuse=Reuse((ids,), ((ids,),))) as session:
        session.prefill(ids[:-1])  # the prompt ends with a word
    marks = [i for i, x in enumerate(ids[:-1]) if bundled.tokenizer.decode([x]) in (*",.;:!?", "\n")]
    assert len(marks) == 10
    assert ran[4] == [*marks, len(ids) - 2]


def test_kvshare_computes_one_token_of_high_deviation_at_least(monkeypatch):
    """And it takes over all but the last token of a prompt that ran before."""
    taken, original = [], KVShare.run

    def spy(method, mixed):
        taken.append(mixed.reused.tolist())
        return original(method, mixed)

    monkeypatch.setattr(KVShare, "run", spy)
    moved = (LEAD, DOCUMENTS[1], DOCUMENTS[0])
    for parts, computed in ((moved, 2), (PARTS, 1)):
        with prefilled(KVShare(ratio=0.001), parts=parts, earlier=(PARTS,), tail=[]) as session:
            assert session.layers[3].computed == computed
    assert taken[1] == [True] * (sum(map(len, PARTS)) - 1) + [False]


def test_kvshare_takes_a_token_from_the_longest_common_segment():
    """Of several earlier prompts, in any order."""
    long, short = (FIRST, DOCUMENTS[2]), (DOCUMENTS[1], DOCUMENTS[2][5:15])
    ours = {"parts": (LEAD, DOCUMENT, DOCUMENTS[2])}
    found = run(KVShare(), earlier=(long,), **ours)
    assert torch.equal(found, run(KVShare(), earlier=(short, long), **ours))
    assert torch.equal(found, run(KVShare(), earlier=(long, short), **ours))
    assert distance(found, run(KVShare(), earlier=(short,), **ours)) > 1e-3


def test_cacheblend_chooses_among_tokens_behind_a_new_document():
    """Places in the prompt are not ranks among the tokens at hand; the check layer is a setting."""
    earlier = ((LEAD,), *((x,) for x in DOCUMENTS[1:]))
    at_hand = [*range(len(LEAD)), *range(len(LEAD) + len(DOCUMENTS[0]), sum(map(len, PARTS)))]
    with prefilled(find_method("concat-aligned")(), earlier=earlier) as session:
        old = [kv.values[:, :, at_hand] for kv in session.layers]
    with Session(model(), FullCache(), capacity=400) as full:
        full.prefill([x for part in PARTS for x in part], visible=TAIL)
        change = (full.layers[2].values[:, :, at_hand] - old[2]).square().sum((0, 1, 3))
    wanted = {at_hand[i] for i in change.topk(int(0.2 * len(at_hand))).indices.tolist()}
    with prefilled(find_method("cacheblend")(ratio=0.2, check_layer=2), earlier=earlier) as session:
        same = (session.layers[3].values[:, :, at_hand] == old[3]).all(3)[0].all(0)
        length = sum(map(len, PARTS)) + len(TAIL)
        fewer = length - len(at_hand) + len(wanted)
        assert [x.computed for x in session.layers] == [length] * 3 + [fewer]
    assert {x for x, kept in zip(at_hand, same.tolist(), strict=True) if not kept} == wanted


def test_cache_craft_takes_the_variant_with_the_least_to_compute():
    """Entries from the prompt with the same parts before, of which nothing is computed, before or after another one."""
    other = tuple(x for pair in zip(NEAR, DOCUMENTS, strict=True) for x in pair)
    method = find_method("cache-craft")()
    found = run(method, earlier=(PARTS,))
    assert torch.equal(found, run(method, earlier=(other, PARTS)))
    assert torch.equal(found, run(method, earlier=(PARTS, other)))
    assert distance(found, run(method, earlier=(other,))) > 1e-3
