"""SentenceKV: sentences of the text, their mean keys, and which are read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvbench.errors import UserError
from kvbench.hf.load import load_model
from kvbench.method import Moment
from kvbench.methods.retrieval import sentencekv
from kvbench.methods.retrieval.sentencekv import SentenceKV, split_sentences
from kvbench.registry import MODELS
from kvbench.techniques.reading import unit_of_entries

STOP = 1
"""The token that ends a sentence here."""


@pytest.fixture(autouse=True)
def stop_token(monkeypatch):
    """Token 1 of two ends a sentence."""
    monkeypatch.setitem(sentencekv._SENTENCE_ENDS, "by hand", torch.tensor([False, True]))


def draw(*shape, seed=0):
    """Normal random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def started(make_step, tokens, keys, **settings):
    """A layer of one KV head with a context of these tokens and keys, indexed."""
    given = {"sinks": 1, "recent": 1, "shortest": 2, "longest": 6, "factor": 4, "window": 2, "kernel": 1, **settings}
    method = replace(SentenceKV(**given), sentence_ends="by hand", rows=6, length=len(tokens))
    kv = method.layer(0)
    step = make_step(draw(1, 2, len(tokens), 4), keys, ids=torch.tensor([tokens]))
    kv.append(step)
    method.evict(kv, step)
    return method, kv


def ask(method, kv, make_step, query, token=0):
    """One token with this query; returns which entries of the context were read."""
    marked = []
    kind = type(kv)
    read = kind.read

    class Spy(kind):
        def read(self, step, mask, bias=None):
            marked.append(mask)
            return read(self, step, mask, bias)

    step = make_step(
        query.view(1, 2, 1, 4), torch.zeros(1, 1, 1, 4), before=kv.seen, moment=Moment.DECODE,
        ids=torch.tensor([[token]]),
    )
    kv.append(step)
    kv.__class__ = Spy
    method.attend(kv, step)
    kv.__class__ = kind
    return marked[0][0, 0]


def test_sentences_end_at_full_stops_within_bounds():
    """Short ones go on, long ones are divided, and the rest of the text is one more."""
    ends = [x == "." for x in "ab.c.defghijk.."]
    assert split_sentences(ends, 2, 5) == [0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3, 3, 4]
    assert split_sentences([False] * 3, 1, 9) == [0, 0, 0]
    assert split_sentences([x == "." for x in "a.b.c."], 3, 9) == [0, 0, 0, 0, 1, 1]


def test_a_mean_key_is_that_of_the_stored_entries_of_its_sentence(make_step):
    """Half of the entries are evicted; each mean is over those that stay, and the table divides them."""
    tokens = [0, 0, 0, STOP] * 8
    keys = draw(1, 1, 32, 4, seed=1)
    _, kv = started(make_step, tokens, keys, factor=3)
    assert kv.n == 18
    places = [int((keys[0, 0] == x).all(-1).nonzero()) for x in kv.keys[0, 0]]
    assert places == sorted(places)
    numbers = unit_of_entries(kv.index["offsets"], kv.n - 2)[0, 0].tolist()
    assert numbers == [x // 4 for x in places[1:-1]]
    for number in set(numbers):
        members = keys[0, 0, [x for x in places[1:-1] if x // 4 == number]]
        assert torch.allclose(kv.index["sentences"][0, 0, number], members.mean(0), atol=1e-6)
    assert kv.facts()["entries_dropped"].value == 14


def test_the_best_sentence_is_read_whole_and_the_budget_is_met(make_step):
    """Of sentences of four the one whose keys point along the query is read, between the sink and the recent entry."""
    keys = 0.1 * draw(1, 1, 20, 4, seed=1)
    keys[0, 0, 8:12] = 1.0
    method, kv = started(make_step, [0, 0, 0, STOP] * 5, keys)
    marked = ask(method, kv, make_step, torch.ones(2, 4))
    assert marked.nonzero().flatten().tolist() == [0, 8, 9, 10, 11, 19, 20]


def test_queries_add_up_until_a_sentence_ends(make_step):
    """A second query alone would choose another sentence; the full stop starts the sum again."""
    keys = torch.zeros(1, 1, 20, 4)
    keys[0, 0, 4:8, 0] = keys[0, 0, 12:16, 1] = 1.0
    first, second = torch.tensor([3.0, 0, 0, 0]).repeat(2), torch.tensor([0, 2.0, 0, 0]).repeat(2)
    for token, wanted in ((0, 4), (STOP, 12)):
        method, kv = started(make_step, [0, 0, 0, STOP] * 5, keys)
        assert ask(method, kv, make_step, first, token)[4]
        assert ask(method, kv, make_step, second)[wanted]


def test_words_of_the_mini_model_end_sentences():
    """Tokens with a full stop at their end count, those within words do not."""
    model = load_model(str(MODELS / "mini"))
    method = SentenceKV().bind(model)
    ends = sentencekv._SENTENCE_ENDS[method.sentence_ends]
    texts = model.tokenizer.batch_decode([[x] for x in range(len(model.tokenizer))])
    assert ends.any()
    assert not ends.all()
    for text, end in zip(texts, ends.tolist(), strict=False):
        last = text.rstrip()[-1:]
        assert end == ((last != "" and last in ".!?") or "\n\n" in text), text


def test_sentences_without_a_length_are_refused():
    """The longest is not shorter than the shortest."""
    with pytest.raises(UserError, match="longest is 4 tokens and shortest is 8"):
        SentenceKV(longest=4)
