"""The base of scoring methods, by hand and against plain Python."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvbench.check import check
from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf.tiny import VOCABULARY, tiny_model
from kvbench.method import Budget, Moment
from kvbench.methods.eviction.expected_attention import ExpectedAttention
from kvbench.methods.eviction.h2o import H2O
from kvbench.methods.eviction.keydiff import KeyDiff
from kvbench.methods.eviction.knorm import Knorm
from kvbench.methods.eviction.pyramidkv import PyramidKV
from kvbench.methods.eviction.random import Random
from kvbench.methods.eviction.snapkv import SnapKV
from kvbench.methods.eviction.tova import TOVA
from kvbench.registry import find_method
from kvbench.selection import (
    best_by_head,
    group_mean,
    mark_best,
    pool_before,
    pool_scores,
    protect_first,
    protect_last,
    top_entries,
)


@pytest.mark.parametrize(
    ("kind", "wanted"), [("avg", [1 / 3, 1 / 3, 0, 4 / 3, 4 / 3]), ("max", [1.0, 1, 0, 4, 4])]
)
def test_pooling_by_hand(kind, wanted):
    """The card's case: kernel 3 over 1, 0, 0, 0, 4; the mean counts the padding, the maximum does not."""
    assert torch.allclose(pool_scores(torch.tensor([[[1.0, 0, 0, 0, 4]]]), 3, kind), torch.tensor([[wanted]]))


def test_a_maximum_does_not_see_the_padding():
    """Negative scores stay negative at the ends."""
    assert pool_scores(torch.full((1, 1, 4), -2.0), 5, "max").equal(torch.full((1, 1, 4), -2.0))


def test_nothing_is_pooled_to_nothing():
    """Where all entries are in the window there is none to smooth."""
    assert pool_scores(torch.empty(1, 2, 0), 7, "max").shape == (1, 2, 0)


@pytest.mark.parametrize("entries", [1, 20, 32])
def test_entries_that_are_all_in_the_window_are_all_protected(entries):
    """A context and its questions may be shorter than the window."""
    assert pool_before(torch.zeros(1, 2, entries), 32, 7, "max").isinf().all()


@given(scores=st.lists(st.integers(0, 3), min_size=1, max_size=12), data=st.data())
def test_top_entries_are_the_best_and_of_equal_ones_the_first(scores, data):
    """The entries chosen are those of a stable sort by score, in the order of entries."""
    count = data.draw(st.integers(0, len(scores)))
    wanted = sorted(sorted(range(len(scores)), key=lambda i: -scores[i])[:count])
    assert top_entries(torch.tensor(scores, dtype=torch.float32)[None, None], count)[0, 0].tolist() == wanted


@pytest.mark.parametrize("choose", [
    lambda x: top_entries(x, 2), lambda x: mark_best([torch.zeros_like(x), x], 2),
    lambda x: best_by_head(x, torch.tensor([[2]])),
], ids=["top_entries", "mark_best", "best_by_head"])
def test_no_choice_is_made_by_nan(choose):
    """Nor with infinities near it; infinities alone are allowed."""
    scores = torch.tensor([[[-torch.inf, 1.0, torch.inf, 0.0, 2.0]]])
    choose(scores)
    scores[..., 3] = torch.nan
    with pytest.raises(UserError, match="the scores have NaN, so that no choice follows from it"):
        choose(scores)


def score_nan(self, kv, step, *_):
    """NaN for one entry of the second layer."""
    scores = kv.keys.float().norm(dim=-1)
    scores[..., -1] = torch.nan if step.layer == 1 else 0.0
    return scores


def expect_refusal(base, message):
    """A prompt of 60 tokens, of which 20 are kept, is refused with this message."""
    method, model = base(), tiny_model()
    with (
        Session(model, method.fit(Budget("rows", 20), model.shape(60)), capacity=80) as session,
        pytest.raises(UserError, match=message),
    ):
        session.prefill(list(range(60)))


@pytest.mark.parametrize("base", [Knorm, TOVA])
def test_a_method_with_a_nan_score_is_refused_with_its_layer(base, monkeypatch):
    """In a session, and by `kvbench check`."""
    monkeypatch.setattr(base, "score", score_nan)
    message = f"score of {base.card.name} has NaN in layer 1"
    expect_refusal(base, message)
    assert any(message in x.detail for x in check(base) if not x.passed)


@pytest.mark.parametrize("base", [Knorm, TOVA])
@pytest.mark.parametrize(("score", "found"), [
    (lambda self, kv, *_: kv.keys.float().norm(dim=-1)[:, :1], r"\[1, 1, 60\]"),
    (lambda self, kv, *_: kv.keys.float(), r"\[1, 2, 60, 16\]"),
    (lambda self, kv, *_: None, "NoneType"),
], ids=["of one head", "of channels", "forgotten return"])
def test_a_score_must_have_a_number_for_each_entry_of_each_head(base, score, found, monkeypatch):
    """The scores of one head would decide for all heads unnoticed."""
    monkeypatch.setattr(base, "score", score)
    message = f"score of {base.card.name} gives {found} in layer 0, not a tensor .* of \\[1, 2, 60\\]"
    expect_refusal(base, message)


def test_a_score_that_becomes_nan_in_a_decode_step_is_refused(monkeypatch):
    """By a rolling method, which scores at every step."""
    model = tiny_model()
    with Session(model, TOVA().fit(Budget("rows", 20), model.shape(60)), capacity=80) as session:
        session.prefill(list(range(60)))
        monkeypatch.setattr(TOVA, "score", score_nan)
        with pytest.raises(UserError, match="score of tova has NaN in layer 1"):
            session.forward(torch.tensor([[1]]), Moment.DECODE)


@given(rows=st.integers(0, 9), length=st.integers(1, 6))
def test_protection_covers_the_last_entries(rows, length):
    """The last entries become infinite, the others and the scores given stay as they were."""
    scores = torch.arange(length, dtype=torch.float32)[None, None]
    found = protect_last(scores, rows)[0, 0].tolist()
    assert found == [i if i < length - rows else torch.inf for i in range(length)]
    assert scores.isfinite().all()


def test_protection_covers_the_first_tokens_that_are_still_stored():
    """Tokens 0 and 2 of the first three; token 1 was dropped, and its place is no other's."""
    kv = SimpleNamespace(logical_positions=lambda: torch.tensor([0, 2, 3, 5]).expand(1, 1, -1))
    assert protect_first(torch.zeros(1, 1, 4), kv, 3).isinf().tolist() == [[[True, True, False, False]]]


@pytest.mark.parametrize("method", [H2O(), TOVA()], ids=["h2o", "tova"])
def test_a_rolling_method_drops_what_has_left_the_window_first(method):
    """The next token sees each entry of a sliding layer, for more of those were there than it may hold."""
    model = tiny_model(window=24)
    fitted = method.fit(Budget("rows", 20), model.shape(60))
    with Session(model, fitted, capacity=200, track=True) as session:
        session.prefill(list(range(60)))
        for token in range(40):
            session.forward(torch.tensor([[token]]), Moment.DECODE)
            for store in session.layers:
                assert store.n == 20 * 24 / 60
                assert store.positions.min() > session.seen - 24


@pytest.mark.parametrize("method", [Knorm(), KeyDiff(), Random(window=32), SnapKV(), ExpectedAttention()],
                         ids=lambda x: x.card.name)
def test_a_later_compression_keeps_no_entry_out_of_the_window(method):
    """Entries of the context that no token after the question sees go before any that one does."""
    model = tiny_model(window=48)
    fitted = method.fit(Budget("rows", 90), model.shape(120))
    with Session(model, fitted, capacity=200, recompress=True, track=True) as session:
        session.prefill([x % VOCABULARY for x in range(120)])
        session.question(list(range(20)), 1)
        for store in session.layers:
            assert store.n == 36
            assert store.positions.min() > session.seen - 48


def test_groups_are_neighbors():
    """Query heads 0 and 1 share KV head 0, as in `repeat_kv`."""
    scores = torch.tensor([1.0, 3, 10, 20]).view(1, 4, 1)
    assert group_mean(scores, 2)[0, :, 0].tolist() == [2, 15]


@pytest.mark.parametrize(("method", "length", "questions", "kept"), [
    (SnapKV(window=32), 3, (5, 40), range(16, 48)),
    (PyramidKV(window=32), 3, (5, 40), range(16, 48)),
    (Random(window=32), 3, (5, 40), range(16, 48)),
    (ExpectedAttention(sinks=4), 1, (1, 40), range(4)),
], ids=lambda x: x.card.name if hasattr(x, "card") else "")
def test_what_must_stay_does_in_a_later_turn(method, length, questions, kept):
    """Compressed to the entries of a context shorter than its window or sinks, a later turn loses none of those."""
    model = tiny_model()
    fitted = method.fit(Budget("rows", length), model.shape(length))
    with Session(model, fitted, capacity=100, recompress=True, track=True) as session:
        session.prefill(list(range(length)))
        session.question(list(range(questions[0])), 1)
        assert all(store.entries_kept() == [length + questions[0]] * 2 for store in session.layers)
        session.question(list(range(questions[1])), 1)
        assert [x.tolist() for store in session.layers for x in store.positions[0]] == [list(kept)] * 4


@pytest.mark.parametrize(("name", "settings"), [
    ("snapkv", {"window": 4}), ("windowkv", {"window": 4, "review": 3}), ("dapq", {}), ("locret", {"steps": 2}),
])
def test_no_entry_is_kept_that_no_later_token_sees(name, settings):
    """A window of 20 tokens after 80: the budget is 19 of its entries, and the first one lies outside from now on."""
    model = tiny_model(window=20)
    method = find_method(name)(**settings).bind(model).fit(Budget("rows", 76), model.shape(80))
    with Session(model, method, capacity=100, track=True) as session:
        session.prefill(torch.randint(64, (80,), generator=torch.Generator().manual_seed(0)).tolist())
        assert all(x.positions[0].tolist() == [list(range(61, 80))] * 2 for x in session.layers)
