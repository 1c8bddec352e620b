"""Budgets: parsing, and the entries and bytes that they allow."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvbench.budget import solve
from kvbench.errors import MOST, UserError
from kvbench.method import Budget, LayerShape, Shape
from kvbench.methods.allocation.prefixkv import PrefixKV
from kvbench.methods.baseline.full import Full
from kvbench.methods.channels.mustafar import Mustafar
from kvbench.methods.eviction.h2o import H2O
from kvbench.methods.eviction.pyramidkv import PyramidKV
from kvbench.methods.eviction.random import Random
from kvbench.methods.eviction.snapkv import SnapKV
from kvbench.methods.eviction.streaming_llm import StreamingLLM
from kvbench.methods.merging.kvmerger import KVMerger
from kvbench.methods.retrieval.retroinfer import RetroInfer


def shape_of(length, window=None):
    """A layer of full attention and, with a window, a sliding one."""
    layers = [LayerShape(kv_heads=2, query_heads=4, key_dim=16, value_dim=16, window=None)]
    layers += [LayerShape(kv_heads=2, query_heads=4, key_dim=16, value_dim=16, window=window)] * (window is not None)
    return Shape(length=length, layers=tuple(layers), itemsize=2)


def attempt(call, *arguments):
    """The value of a call and None, or None and the message of its refusal."""
    try:
        return call(*arguments), None
    except UserError as error:
        return None, str(error)


@given(rows=st.integers(1, 10**9))
@example(1234567)
def test_a_budget_in_entries_survives_a_round_trip(rows):
    """A number of entries is parsed exactly, and parsing what `str` writes gives the same budget."""
    budget = Budget.parse(f" {rows} ")
    assert (budget.kind, budget.value) == ("rows", rows)
    assert Budget.parse(str(budget)) == budget


@given(percent=st.floats(1e-6, 100))
@example(100 / 3)
def test_shares_survive_being_written_down(percent):
    """Shares are read as fractions, and `str` writes what reads the same again to 12 digits."""
    budget = Budget.parse(f"{percent!r}%")
    assert (budget.kind, budget.value) == ("fraction", percent / 100)
    assert math.isclose(Budget.parse(str(budget)).value, budget.value, rel_tol=1e-11)


def test_spaces_around_a_budget_do_not_matter():
    """Of every kind."""
    assert [str(Budget.parse(f" {x} ")) for x in ("25%", "1024", "paper")] == ["25%", "1024", "paper"]


@pytest.mark.slow
@given(text=st.one_of(st.text(max_size=8), st.from_regex(r"-?[0-9.]{1,6}(e[0-9]{1,3})?%?", fullmatch=True)))
@example("1E10")  # above what is allowed
def test_any_text_is_a_budget_or_an_error_that_says_what_is_allowed(text):
    """Every text ends in a sane budget, or in a message with the text and the allowed values."""
    budget, message = attempt(Budget.parse, text)
    if budget is None:
        assert all(x in message for x in (f"'{text}'", "25%", "1024", "paper"))
    else:
        assert budget.kind == "paper" or 0 < budget.value < math.inf
        assert budget.kind != "fraction" or budget.value <= 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [("0", "above 0"), ("0%", "above 0"), ("-5", "above 0"), ("-1%", "above 0"), ("nan", "above 0"),
     ("inf%", "above 0"), ("101%", "above 100%"), ("0.5", "whole number"), ("", "not a number"), ("%", "not a number"),
     ("a lot", "not a number"), ("25%%", "not a number"), (str(MOST + 1), f"{MOST:,} or less")],
)
def test_the_message_says_what_is_wrong(text, reason):
    """Each kind of wrong budget has its own reason."""
    with pytest.raises(UserError, match=reason):
        Budget.parse(text)


@given(length=st.integers(1, 5000), percent=st.floats(0.01, 100),
       method=st.sampled_from([Random(), SnapKV(), StreamingLLM(), H2O()]))
def test_a_share_gives_its_entries_or_is_refused(length, percent, method):
    """A share gives that share of the length; below the minimum of the settings it is refused, naming the minimum."""
    rows, least = round(percent / 100 * length), min(method.minimum_entries(), length)
    fitted, message = attempt(method.fit, Budget("fraction", percent / 100), shape_of(length))
    if fitted is None:
        assert rows < least
        assert all(x in message for x in (method.card.name, f"is {rows} tokens", f"--budget {least} or more"))
        method.fit(Budget.parse(str(least)), shape_of(length))  # what it says does do
    else:
        assert (fitted.rows, fitted.length) == (rows if percent < 100 else None, length)
        assert fitted.settings == method.settings
        assert fitted.identity(shape_of(length)) == (percent == 100 or rows >= length)


@pytest.mark.parametrize(("method", "least"), [
    (PrefixKV(first=2, last=5), 8), (RetroInfer(sinks=4, recent=64), 69),
], ids=lambda x: x.card.name if hasattr(x, "card") else "")
def test_what_always_stays_leaves_room_for_a_choice(method, least):
    """The first and last entries alone would be the same for every context."""
    assert method.fit(Budget("rows", least), shape_of(100)).rows == least
    with pytest.raises(UserError, match=f"needs at least {least} with its settings"):
        method.fit(Budget("rows", least - 1), shape_of(100))


def test_one_token_is_not_the_whole_cache():
    """Settings that decide the bits accept the share that they reach, and no number of tokens that looks like it."""
    method, short = Mustafar(), shape_of(31)
    assert method.fit(Budget("fraction", 1.0), short) == method
    with pytest.raises(UserError, match=r"cannot reach a budget of 1: its settings amount to 100\.0%"):
        method.fit(Budget("rows", 1), short)


@given(length=st.integers(1, 3000), window=st.integers(1, 400), rows=st.integers(1, 4000))
def test_sliding_layers_keep_their_share(length, window, rows):
    """A sliding layer keeps no more than its window, no more than full layers and, rounded up, the same share."""
    method = Random(window=0).fit(Budget("rows", rows), shape_of(length, window))
    sliding, full = method.entries_in(1, window), method.entries_in(0, None)
    assert full == rows
    if window < length:
        assert sliding == min(window, math.ceil(rows * window / length))
    assert 1 <= min(sliding, window) <= full


@given(length=st.integers(40, 3000), window=st.integers(1, 400), rows=st.integers(33, 4000),
       method=st.sampled_from([Random(), SnapKV()]))
def test_declared_bytes_grow_with_the_budget(length, window, rows, method):
    """More entries never take fewer bytes, and a budget of the whole length takes exactly those of the full cache."""
    shape = shape_of(length, window)
    small, large = (method.fit(Budget("rows", x), shape).declared_bytes(shape) for x in (rows, rows + 1))
    holes = 4 * 2 * window  # positions of a sliding layer that lost entries
    assert small <= large + holes
    assert method.fit(Budget("rows", length), shape).declared_bytes(shape) == shape.full_bytes
    assert method.fit(Budget("fraction", 1.0), shape).declared_bytes(shape) == shape.full_bytes


def test_paper_budgets_are_the_card_s():
    """`paper` is what the card says, and without one on the card it is refused."""
    assert SnapKV().fit(Budget.parse("paper"), shape_of(5000)).rows == 1024
    assert H2O().fit(Budget.parse("paper"), shape_of(5000)).rows == 1000
    with pytest.raises(UserError, match="random has no paper budget"):
        Random().fit(Budget.parse("paper"), shape_of(5000))


def test_a_budget_for_everything_is_refused():
    """The full cache takes no budget but 100 %."""
    assert Full().fit(Budget.parse("100%"), shape_of(10)) == Full()
    with pytest.raises(UserError, match="full takes no budget, got 50%"):
        Full().fit(Budget.parse("50%"), shape_of(10))


def test_the_default_is_a_quarter():
    """Without a budget a method keeps 25 %."""
    assert H2O().fit(None, shape_of(1000)).rows == 250


def test_a_search_takes_the_last_setting_within_the_budget():
    """One that needs exactly the budget is within it; where all need more, there is none."""
    assert [solve(lambda x: 10 * x, most, [1, 2, 3, 4]) for most in (9, 10, 29, 30, 99)] == [None, 1, 2, 3, 4]


@pytest.mark.parametrize("method", [PyramidKV(), KVMerger()], ids=lambda x: x.card.name)
def test_a_second_fit_forgets_the_first(method):
    """Budgets of layers, from a method that was fitted before, do not hold where every entry is kept."""
    fitted = method.fit(Budget("rows", 100), shape_of(400))
    assert fitted.entries_in(0, None) == 100
    for budget, length in ((Budget("fraction", 1.0), 400), (Budget("rows", 100), 100)):
        again = fitted.fit(budget, shape_of(length))
        assert again.identity(shape_of(length))
        assert again == method.fit(budget, shape_of(length))
