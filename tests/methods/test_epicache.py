"""EpiCache: scores against a loop, memory while the context is run in blocks, clusters, and routed questions."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import pytest
import torch

from kvbench.engine.agreement import FullCache
from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf import load_model
from kvbench.hf.tiny import VOCABULARY, tiny_model
from kvbench.method import Budget, Method
from kvbench.methods.eviction import epicache
from kvbench.methods.eviction.epicache import EpiCache, cluster, cut_template
from kvbench.text.template import Frame
from kvbench.text.tokens import tokenize

SEGMENT = 10
PROMPT = 1 + 2 * SEGMENT
"""Tokens of the prompt with two segments: the tiny models' tokenizer reads the instruction as one."""


def ids(count, seed=1, low=0, high=VOCABULARY):
    """Random tokens. [T]"""
    return torch.randint(low, high, (count,), generator=torch.Generator().manual_seed(seed))


def topics(segments=6):
    """Segments of tokens below 32 and from 32 on, in turns. [T]"""
    return torch.cat([ids(SEGMENT, seed=i, low=32 * (i % 2), high=32 * (i % 2) + 32) for i in range(segments)])


def open_with(model, context, rows=20, **settings):
    """A session at a budget."""
    method = EpiCache(**{"segment": SEGMENT, "medoids": 2, "episodes": 2, **settings}).bind(model)
    return Session(model, method.fit(Budget("rows", rows), model.shape(len(context))), capacity=len(context) + 60,
                   track=True)


def positions(session, episode):
    """Positions that an episode keeps, by layer and head."""
    return [store.episodes[episode]["position"][0].tolist() for store in session.layers]


@dataclass(frozen=True)
class Recorder(Method):
    """The full cache, which keeps every layer's queries and keys."""

    seen: dict[int, tuple] = field(default_factory=dict)
    card: ClassVar = FullCache.card

    def attend(self, kv, step):
        """Attend, and remember."""
        self.seen[step.layer] = step.query, kv.keys, step
        return kv.attend(step)


def written_out(model, context, prompt, *, with_prompt=False, aggregate="amax"):
    """The best 20 positions by layer and head: each query's softmax over the context's keys alone."""
    recorder, length = Recorder(), len(context)
    with Session(model, recorder) as session:
        session.prefill(torch.cat([context, prompt]))
    found = []
    for layer in range(len(model.layers)):
        query, keys, step = recorder.seen[layer]
        group = query.shape[1] // keys.shape[1]
        scores = torch.zeros(keys.shape[1], length, dtype=torch.float64)
        for head in range(query.shape[1]):
            for t in range(length, length + len(prompt)):
                stop = t + 1 if with_prompt else length
                logits = query[0, head, t].double() @ keys[0, head // group, :stop].double().T * step.scale
                weights = logits.softmax(0)
                row = scores[head // group]
                row.copy_(torch.maximum(row, weights[:length]) if aggregate == "amax" else row + weights[:length])
        found.append([sorted(x.topk(20).indices.tolist()) for x in scores])
    return found


def test_each_episode_keeps_what_its_own_segments_attend_to():
    """A context in one block: the entries of both episodes follow from one sequence each; planted faults do not."""
    model, context = tiny_model(), topics()
    segments = context.split(SEGMENT)
    with open_with(model, context) as session:
        session.prefill(context)
        method = session.method
        vectors = method.embed(model, list(segments))
        centers, labels = cluster(vectors, 2)
        assert labels[0] == labels[2] == labels[4] != labels[1] == labels[3] == labels[5]
        for episode in range(2):
            mine = [i for i in range(6) if labels[i] == episode]
            typical = sorted(sorted(mine, key=lambda i: -(vectors[i] @ centers[episode]))[:2])
            prompt = torch.cat([torch.tensor([0]), *(segments[i] for i in typical)])
            assert len(prompt) == PROMPT
            assert positions(session, episode) == written_out(model, context, prompt)
            assert positions(session, episode) != written_out(model, context, prompt, with_prompt=True)
            assert positions(session, episode) != written_out(model, context, prompt, aggregate="sum")
        assert positions(session, 0) != positions(session, 1)


def test_an_episode_s_prompt_has_no_segment_of_another():
    """A segment nearer to the center but of another episode stays out; those of its own keep their order."""
    model, segments = tiny_model(), list(topics().split(SEGMENT))
    similarity, mine = torch.tensor([0.5, 0.9, 0.2, 0.8, 0.6, 0.7]), torch.tensor([1, 0, 1, 0, 1, 0]).bool()
    prompt = EpiCache(medoids=2).make_prompt(model, segments, similarity, mine)
    assert prompt[0, 1:].tolist() == torch.cat([segments[0], segments[4]]).tolist()


@pytest.mark.parametrize("block", [16, 30, 64])
def test_memory_never_exceeds_budget_block_and_prompt(block, monkeypatch):
    """Over 240 tokens the peak is the entries of budget, block and prompt, and a score for each that is scored."""
    model, context = tiny_model(), topics(24)
    counts = []
    keep = epicache.EpiCache.evict_block
    monkeypatch.setattr(EpiCache, "evict_block", lambda self, branch, *x: (
        keep(self, branch, *x), counts.extend(store.n for store in branch.layers))[0])
    method = EpiCache(segment=SEGMENT, medoids=2, episodes=2, block=block).bind(model)
    method = method.fit(Budget("rows", 20), model.shape(240))
    with Session(model, method, capacity=240) as session:
        session.prefill(context)
        layer = model.layers[0]
        entry, score = layer.kv_heads * (layer.key_dim + layer.value_dim) * 4, layer.kv_heads * 4
        assert session.memory().peak_bytes == len(model.layers) * (
            (20 + block + PROMPT) * entry + (20 + block) * score)
        assert session.memory().host_bytes == session.method.declared_host_bytes(model.shape(240)) == (
            2 * len(model.layers) * 20 * entry)
    assert set(counts) == {min(20, block), 20}


def test_a_whole_prefill_would_exceed_that_memory():
    """The measure can tell: with a block of the whole context the peak is that of all entries."""
    model, context = tiny_model(), topics(24)
    peaks = []
    for block in (16, 240):
        with open_with(model, context, block=block) as session:
            session.prefill(context)
            peaks.append(session.memory().peak_bytes)
    assert peaks[1] > 3 * peaks[0]


def test_blocks_see_the_entries_that_earlier_ones_left():
    """With a budget that holds every entry of the first blocks, these blocks are exact; later ones are not."""
    model, context = tiny_model(), topics(8)
    with open_with(model, context[:60], rows=59, block=20) as short, Session(model, FullCache()) as full:
        assert torch.allclose(short.prefill(context[:60]), full.prefill(context[:60]), atol=1e-5)
    with open_with(model, context, rows=15, block=20) as long, Session(model, FullCache()) as full:
        assert not torch.allclose(long.prefill(context), full.prefill(context), atol=1e-3)


def test_a_question_takes_the_nearest_episode_and_another_brings_the_first_back():
    """A question in a topic's tokens loads its episode; the entries of the context return unchanged."""
    model, context = tiny_model(), topics()
    with open_with(model, context) as session:
        session.prefill(context)
        frozen = []
        for low in (0, 32, 0):
            session.ask(ids(6, seed=50, low=low, high=low + 32), 2, history=[1], stop=frozenset())
            frozen.append([x.frozen.position.tolist() for x in session.layers])
        assert frozen[0] == frozen[2] != frozen[1]
        held = [[torch.tensor(x).flatten().tolist() for x in positions(session, e)] for e in range(2)]
        labels = cluster(session.method.embed(model, list(context.split(SEGMENT))), 2)[1].tolist()
        assert frozen[:2] == [held[labels[0]], held[labels[1]]]  # the first two segments are of the two topics
        assert {x.loads for x in session.layers} == {4}  # the last segment's first


def test_the_chat_template_around_a_question_does_not_route_it(chat_mini):
    """The text before a later question, the assistant's header and the start of the answer are left out."""
    model = load_model(str(chat_mini), "cpu", "float32")
    frame = Frame.of(model.tokenizer)
    assert frame.middle and frame.tail

    def read(text):
        return torch.tensor(tokenize(model.tokenizer, text, special=False))

    question = read("Which number?")
    for before, after in ((0, 0), (0, 1), (1, 1)):
        asked = torch.cat([read(frame.middle * before), question, read(frame.tail * after), read("Answer:" * after)])
        assert cut_template(model, asked).tolist() == question.tolist()
    plain = tiny_model()
    assert cut_template(plain, ids(9)).tolist() == ids(9).tolist()


def test_the_question_s_words_choose_the_episode(monkeypatch):
    """With a tail of many tokens of the other topic the same episode is loaded as without."""
    model, context, question = tiny_model(), topics(), ids(6, seed=50, low=32)
    other = context[:SEGMENT].repeat(3)
    monkeypatch.setattr(Frame, "of", lambda _: Frame("", "tail", "", None, special=False))
    monkeypatch.setattr(epicache, "tokenize", lambda _, text, special: tuple(other.tolist()) if text == "tail" else ())
    chosen = []
    for asked in (question, torch.cat([question, other]), torch.cat([other[1:], question])):
        with open_with(model, context) as session:
            session.prefill(context)
            session.question(asked, 2)
            chosen.append([x.frozen.position.tolist() for x in session.layers])
    assert chosen[0] == chosen[1] != chosen[2]  # the last has no tail, so that its many tokens of the other topic count


def test_sequences_of_a_batch_have_clusters_and_routes_of_their_own():
    """Two contexts together keep what each keeps alone, and their questions take different episodes."""
    model = tiny_model()
    contexts = [topics(), torch.cat([topics().split(SEGMENT)[i] for i in (1, 1, 3, 0, 2, 4)])]
    questions = [ids(6, seed=5, low=0, high=32), ids(6, seed=6, low=32)]
    with open_with(model, contexts[0]) as both:
        both.prefill(torch.stack(contexts))
        both.question(torch.stack(questions), 5)
        together = both.logits
    for row, (context, question) in enumerate(zip(contexts, questions, strict=True)):
        with open_with(model, context) as alone:
            alone.prefill(context)
            alone.question(question, 5)
            assert torch.allclose(alone.logits[0], together[row], atol=1e-5)


def test_clusters_are_those_that_one_sees():
    """Two groups of points; every cluster has a member, also where points coincide."""
    points = torch.tensor([[0.0, 0], [0.1, 0], [5, 5], [0, 0.1], [5.1, 5]])
    centers, labels = cluster(points, 2)
    assert labels.tolist() in ([0, 0, 1, 0, 1], [1, 1, 0, 1, 0])
    assert torch.allclose(centers[labels[2]], torch.tensor([5.05, 5]))
    for count in (1, 3, 4):
        assert sorted(set(cluster(torch.ones(4, 2), count)[1].tolist())) == list(range(count))


def test_a_context_that_leaves_no_room_for_the_segments_is_refused():
    """The message names both numbers, before the first pass."""
    model = replace(tiny_model(), max_length=70)
    with open_with(model, topics()) as session, pytest.raises(UserError, match="21 tokens of segments after a context"):
        session.prefill(topics())


@pytest.mark.parametrize("setting", ["episodes", "segment", "medoids", "block"])
def test_settings_without_a_meaning_are_refused(setting):
    """Each is a number of things of which there is at least one."""
    with pytest.raises(UserError, match=f"{setting} must be 1 or more, got 0"):
        EpiCache(**{setting: 0})


@pytest.mark.parametrize("rows", [59, 58, 30])
def test_a_sliding_layer_counts_tokens_from_its_episode_s_entries(rows):
    """Also where the layer keeps all that its window sees; bytes are declared, and later tokens can be run."""
    model, context = tiny_model(4, 2, 20), topics()
    with open_with(model, context, rows) as session:
        session.prefill(context)
        shape = model.shape(len(context))
        assert session.memory().stored_bytes == session.method.declared_bytes(shape)
        assert session.memory().host_bytes == session.method.declared_host_bytes(shape)
        assert session.force(ids(30, seed=2)).isfinite().all()
