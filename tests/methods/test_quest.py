"""Quest: what it reads, that nothing else matters, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kvbench.engine.autoregressive import step_logits
from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf.tiny import VOCABULARY, tiny_model
from kvbench.method import Budget, Moment
from kvbench.methods.baseline.full import Full
from kvbench.methods.retrieval.quest import Quest


def ids(count, seed=1):
    """Random tokens."""
    return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def fitted(model, rows, length, **settings):
    """Quest with pages of 4 entries and a budget in entries."""
    return Quest(page=4, **settings).bind(model).fit(Budget("rows", rows), model.shape(length))


def indexed(method, step):
    """A store of one layer with a context in it, ready to select."""
    kv = method.layer(0)
    kv.append(step)
    method.evict(kv, step)
    assert kv.selective
    return kv


def test_a_planted_page_is_found(make_step):
    """The one key that answers the query is read at the smallest budget, wherever it stands; another page is not."""
    method = Quest(page=4, rows=12, length=64)
    torch.manual_seed(0)
    for at in (0, 21, 50):
        keys = 0.1 * torch.randn(1, 1, 64, 8)
        keys[0, 0, at] = 10.0
        kv = indexed(method, make_step(keys, keys))
        later = make_step(torch.ones(1, 2, 1, 8), torch.zeros(1, 1, 1, 8), before=64, moment=Moment.DECODE)
        kv.append(later)
        pages = kv.select(later, 3)
        assert (pages == at // 4).any(-1).all()
        output = method.attend(kv, later)
        assert torch.allclose(output, torch.full_like(output, 10.0), atol=1e-3)


def test_each_query_head_chooses_for_itself(make_step):
    """Two query heads of one KV head read different pages: selections are never pooled over a group."""
    method = Quest(page=4, rows=8, length=64)
    keys = torch.zeros(1, 1, 64, 2)
    keys[0, 0, 10, 0] = keys[0, 0, 30, 1] = 5.0
    kv = indexed(method, make_step(keys, keys))
    query = torch.tensor([[1.0, 0.0], [0.0, 1.0]])[None, :, None]
    later = make_step(query, torch.zeros(1, 1, 1, 2), before=64, moment=Moment.DECODE)
    kv.append(later)
    first, second = kv.select(later, 2)[0, :, 0].tolist()
    assert set(first) == {16, 2}
    assert set(second) == {16, 7}


def test_bounds_follow_the_entries():
    """Bounds of entries that were decoded one by one are those of a prefill of the same entries, page by page."""
    model, tokens = tiny_model(), ids(50)
    whole, parts = (Session(model, fitted(model, 12, 30), capacity=60) for _ in range(2))
    with whole, parts:
        whole.prefill(tokens)
        parts.prefill(tokens[:17])
        for layer in parts.layers:
            paged = layer.keys[:, :, :16].unflatten(2, (4, 4))
            assert layer._bounds.held()["bounds"].equal(torch.cat([paged.amin(3), paged.amax(3)], -1))
        for token in tokens[17:]:
            parts.forward(torch.tensor([[token]]), Moment.DECODE)
        for layer in parts.layers:
            assert layer._bounds.n == 12
            paged = layer.keys[:, :, :48].unflatten(2, (12, 4))
            assert layer._bounds.held()["bounds"].equal(torch.cat([paged.amin(3), paged.amax(3)], -1))
        assert [x._bounds.n for x in whole.layers] == [12, 12]


def test_a_question_reads_as_its_tokens_would_one_by_one():
    """Twenty tokens at once give the logits of twenty steps: every token selects its own pages."""
    model = tiny_model()
    method = fitted(model, 16, 70)
    with Session(model, method, capacity=100) as once, Session(model, method, capacity=100) as singly:
        once.prefill(ids(70)), singly.prefill(ids(70))
        together = once.forward(torch.tensor([ids(20, 2)]), Moment.TURN_END, keep=20)
        apart = torch.cat([singly.forward(torch.tensor([[x]]), Moment.TURN_END) for x in ids(20, 2)], dim=1)
        assert once.effect().facts == singly.effect().facts
    assert (together - apart).abs().max() < 1e-5


def test_enough_pages_are_the_full_cache():
    """A budget that covers later turns as well reads everything, through pages, and gives the full cache's logits."""
    model = tiny_model()
    method = replace(fitted(model, 40, 90), rows=120)
    with Session(model, method, capacity=120) as ours, Session(model, Full(), capacity=120) as dense:
        for session in (ours, dense):
            session.prefill(ids(90))
        found, wanted = (x.forward(torch.tensor([ids(9, 2)]), Moment.TURN_END, keep=9) for x in (ours, dense))
        proof = ours.effect()
    assert (found - wanted).abs().max() < 1e-5
    assert proof.facts["pages_skipped"] == 0
    assert proof.facts["pages_read"] > 0
    assert not proof.acted


def test_bytes_and_effect():
    """Bounds are an eighth of the keys at pages of 4; a step reads them, and its pages for every query head."""
    model = tiny_model()
    with Session(model, fitted(model, 12, 64), capacity=100) as session:
        session.prefill(ids(64))
        assert session.memory().read_bytes_per_step == 0
        session.method.generate(session, 5, frozenset())
        memory, facts = session.memory(), session.effect().facts
    row = 2 * 16 * 4  # keys and values of one head
    assert memory.stored_bytes == 2 * (64 * 2 * row + 16 * 2 * row + 8)
    steps, layers, query_heads, kv_heads = 4, 2, 4, 2
    assert facts["queries"] == steps * layers
    assert facts["pages_read"] == steps * layers * query_heads * 3
    assert facts["pages_skipped"] == steps * layers * query_heads * (17 - 3)
    assert steps * layers * kv_heads * 3 <= facts["pages_distinct"] <= facts["pages_read"]
    bounds = kv_heads * 16 * row
    last = kv_heads * 17 * row  # the fourth new entry fills the seventeenth page
    assert memory.read_bytes_per_step == 2 * ((3 * bounds + last) // 4 + query_heads * 3 * 4 * row)
    distinct = facts["pages_distinct"] * 4 * row
    assert abs(memory.distinct_read_bytes_per_step - (distinct + 2 * (3 * bounds + last)) / steps) <= layers
    assert memory.full_read_bytes_per_step == layers * kv_heads * row * (65 + 66 + 67 + 68) / steps
    assert memory.end_full_bytes == layers * kv_heads * row * 68


def test_answers_on_a_fork_count():
    """Bytes that an answer read on a fork are in the conversation's effect; a fork that goes on counts from zero."""
    model = tiny_model()
    with Session(model, fitted(model, 12, 64), capacity=100) as session:
        session.prefill(ids(64))
        session.ask([], 6, history=ids(3, 2), stop=frozenset())
        assert session.effect().facts["queries"] == 5 * 2
        assert session.effect().acted
        with session.fork() as branch:
            assert "queries" not in branch.effect().facts


def test_first_layers_may_read_everything():
    """`skip_layers` layers hold plain entries; by default none of a small model's and two of the paper's."""
    model = tiny_model()
    assert [Quest().fit(None, replace(model.shape(400), layers=model.layers[:1] * n)).dense_layers
            for n in (2, 5, 16, 28, 32, 80)] == [0, 0, 1, 1, 2, 2]
    with Session(model, fitted(model, 12, 64, skip_layers=1), capacity=100) as session:
        session.prefill(ids(64))
        session.method.generate(session, 3, frozenset())
        assert session.effect().facts["queries"] == 2
        assert session.memory().stored_bytes == session.method.declared_bytes(model.shape(64))


@pytest.mark.few
@pytest.mark.parametrize("window", [None, 48])
def test_a_static_step_waits_for_nothing(window):
    """With static shapes a step selects and reads under FakeTensorMode: it asks the device for no number."""
    model = tiny_model(window=window)
    with Session(model, fitted(model, 12, 64), capacity=100) as session:
        session.prefill(ids(64))
        session.make_static()
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert step_logits(session, torch.zeros(1, 1, dtype=torch.long)).shape == (1, VOCABULARY)


@pytest.mark.parametrize(("settings", "message"), [
    ({"page": 0}, "page must be 1 or more, got 0"),
    ({"page": -4}, "got -4"),
    ({"skip_layers": -1}, "skip_layers must be 0 or more"),
])
def test_settings_without_a_meaning_are_refused(settings, message):
    """Before anything runs, with the value and what is allowed."""
    with pytest.raises(UserError, match=message):
        Quest(**settings)


def test_budgets_and_layers_that_cannot_be_are_refused():
    """Fewer entries than three pages, and more layers that read everything than there are."""
    shape = tiny_model().shape(200)
    with pytest.raises(UserError, match="needs at least 48"):
        Quest().fit(Budget("rows", 40), shape)
    with pytest.raises(UserError, match=r"skip_layers=2 leaves none of the model's 2 layers.*Use 0 to 1"):
        Quest(skip_layers=2).fit(None, shape)


@pytest.mark.parametrize(("length", "rows"), [(2, 2), (30, 40), (64, 32)])
def test_no_step_reads_less_than_is_declared(length, rows):
    """Also where the budget has more pages than the context: the leaderboard refuses a run whose steps read less."""
    model = tiny_model()
    method = fitted(model, rows, length)
    with Session(model, method, capacity=length + 10) as session:
        session.prefill(ids(length))
        session.ask(ids(1), 2, stop=frozenset())
        read = session.memory().read_bytes_per_step
    assert method.least_read_bytes(model.shape(length)) <= read
    if rows < length:
        assert method.least_read_bytes(model.shape(length)) == method.declared_read_bytes(model.shape(length))
