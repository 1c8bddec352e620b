"""Budgets over heads (AdaKV) and over layers (PyramidKV)."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf.tiny import tiny_model
from kvbench.method import Budget
from kvbench.methods.allocation.adakv import AdaKV, allocate
from kvbench.methods.eviction.h2o import H2O
from kvbench.methods.eviction.pyramidkv import PyramidKV, schedule
from kvbench.methods.eviction.snapkv import SnapKV
from kvbench.registry import find_method, list_entries
from kvbench.selection import ScoredMethod, best_by_head, decides_itself
from kvbench.store import LayerKV


def scores_owned(counts: list[int], size: int) -> torch.Tensor:
    """Scores of which each head owns this many of the top ones. [1, H, size]"""
    scores = torch.rand(1, len(counts), size) * 0.1
    for head, count in enumerate(counts):
        scores[0, head, :count] += 1.0
    return scores


def test_equal_heads_get_equal_entries() -> None:
    """Where every head owns as many top scores, the allocation is uniform."""
    counts = allocate(scores_owned([10, 10, 10, 10], 50), entries=10, floor=0.2)

    assert counts.tolist() == [[10, 10, 10, 10]]


def test_entries_follow_top_scores_above_the_floor() -> None:
    """AdaKV's rounding oracle: 15 and 5 of 20 top scores, floor 0.2, give 14 and 6 entries."""
    counts = allocate(scores_owned([15, 5], 50), entries=10, floor=0.2)

    assert counts.tolist() == [[14, 6]]


def test_the_total_is_the_budget_where_rounding_would_miss_it() -> None:
    """3 and 1 of 4 top scores round to 2 and 1 entries in the authors' code; here the total of 4 is kept."""
    counts = allocate(scores_owned([3, 1], 20), entries=2, floor=0.2)

    assert counts.sum().item() == 4
    assert counts[0, 0] > counts[0, 1]


def test_one_head_with_all_top_scores_leaves_the_others_their_floor() -> None:
    """A head with every top score gets base * (H * (1 - floor) + floor) entries and the others base * floor."""
    counts = allocate(scores_owned([40, 0, 0, 0], 60), entries=10, floor=0.2)

    assert counts.tolist() == [[34, 2, 2, 2]]


@given(
    heads=st.integers(1, 6), size=st.integers(2, 40), share=st.floats(0, 1), floor=st.floats(0, 1),
    seed=st.integers(0, 9),
)
def test_allocations_spend_the_budget_and_keep_what_is_protected(
    heads: int, size: int, share: float, floor: float, seed: int
) -> None:
    """For all scores, the layer keeps exactly its entries, no head more than it has, and every protected entry."""
    rows = max(1, round(share * size))
    protected = min(rows, 2)
    scores = torch.rand(2, heads, size, generator=torch.Generator().manual_seed(seed))
    scores[..., size - protected :] = torch.inf

    mask = best_by_head(scores, allocate(scores, rows, floor))

    assert [rows * heads] * 2 == mask.sum((1, 2)).tolist()
    assert mask[..., size - protected :].all()


def test_ragged_entries_are_stored_and_nothing_else() -> None:
    """AdaKV's heads store unequal numbers of entries whose sum is the budget, and the bytes agree."""
    model = tiny_model()
    fitted = AdaKV().fit(Budget("rows", 50), model.shape(200))
    ids = torch.randint(64, (200,), generator=torch.Generator().manual_seed(0)).tolist()

    with Session(model, fitted, capacity=300) as session:
        session.prefill(ids)
        counts = [store.entries_kept() for store in session.layers]
        measured = session.memory().stored_bytes

    assert [sum(rows) for rows in counts] == [100, 100]
    assert any(len(set(rows)) > 1 for rows in counts)
    assert fitted.declared_bytes(model.shape(200)) == measured


def test_any_scorer_can_be_allocated_by_name() -> None:
    """`knorm+adakv` is knorm's score under AdaKV's allocation, with the settings of both."""
    method = find_method("knorm+adakv")()

    assert method.card.name == "knorm+adakv"
    assert method.settings == {"floor": 0.2}


@pytest.mark.parametrize("name", ["snapkv", "expected-attention", "random"])
def test_the_card_of_a_composition_is_both_methods(name: str) -> None:
    """It names both papers, keeps what the scorer's card admits, and adds what the allocation's does of any scorer."""
    inner, outer, card = find_method(name).card, AdaKV.card, find_method(f"{name}+adakv").card

    assert (inner.arxiv, inner.limits) == (card.arxiv, card.limits)
    assert card.title == f"{inner.title} + {outer.title}"
    assert card.deviations[:-2] == inner.deviations
    assert f"arXiv {outer.arxiv}" in card.deviations[-2]
    assert card.deviations[-1] == outer.deviations[0]


@pytest.mark.parametrize("name", [
    "h2o+adakv", "adakv+adakv", "full+adakv", "snapkv+knorm",
    "finch+adakv", "elastic-cache-text+chunkkv", "elastic-cache-text+criticalkv",  # they move or merge what they choose
    "adakv+chunkkv", "chunkkv+adakv", "defensivekv+chunkkv", "cake+adakv", "cake+criticalkv", "kvzap+adakv",
    "criticalkv+chunkkv", "snapkv+criticalkv+chunkkv",  # heads protect other entries, together more than the budget
])
def test_nonsense_is_refused_by_name(name: str) -> None:
    """Combinations that make no sense are refused with all their names."""
    with pytest.raises(UserError, match=rf"^{re.escape(name)} makes no sense"):
        find_method(name)


@pytest.mark.parametrize(("name", "reason"), [
    ("criticalkv+criticalkv", "criticalkv is in this composition already. Name it once."),
    ("knorm+adakv+adakv", "adakv is in this composition already. Name it once."),
    ("defensivekv+adakv", "Use one that does, such as snapkv."),
    ("adakv+criticalkv", "Put +adakv last: snapkv+criticalkv+adakv."),
    ("random+adakv+criticalkv", "Put +adakv last: random+criticalkv+adakv."),
])
def test_a_refusal_says_what_to_write_instead(name: str, reason: str) -> None:
    """And a composition that it proposes exists."""
    with pytest.raises(UserError, match=f"{re.escape(reason)}$"):
        find_method(name)
    if ": " in reason:
        find_method(reason.split(": ")[1].rstrip("."))


def kept_by(name: str) -> list[list[int]]:
    """Positions that a method keeps of 100 tokens at 60 %, by layer."""
    model = tiny_model()
    method = find_method(name)().bind(model).fit(Budget("rows", 60), model.shape(100))
    with Session(model, method, track=True) as session:
        session.prefill(torch.randint(64, (100,), generator=torch.Generator().manual_seed(0)).tolist())
        stores = [x if x.frozen is None else x.frozen for x in session.layers]
        return [(x.positions if isinstance(x, LayerKV) else x.position).flatten().tolist() for x in stores]


@pytest.mark.slow
@pytest.mark.parametrize("inner", [
    entry.name for entry in list_entries("method")
    if issubclass(method := find_method(entry.name), ScoredMethod) and not decides_itself(method)
])
def test_a_composition_keeps_other_entries_than_its_scorer(inner: str) -> None:
    """AdaKV finds the same scores, or the same ranks, in all heads of two methods; chunks always differ."""
    alone = kept_by(inner)

    assert (kept_by(f"{inner}+adakv") == alone) == (inner in ("compresskv", "lagkv"))
    if inner != "criticalkv":  # refused
        assert kept_by(f"{inner}+chunkkv") != alone


def test_h2o_is_no_scorer() -> None:
    """H2O evicts at every step, so it can't be allocated once."""
    with pytest.raises(UserError, match="does not"):
        AdaKV.over(H2O)


@pytest.mark.parametrize(
    ("capacity", "window", "first", "second", "last", "total"),
    [(64, 8, 110, 107, 17, 2032), (128, 8, 234, None, 17, 4016), (2048, 8, 3978, None, 103, 65296)],
)
def test_the_schedule_is_the_authors_with_its_overshoot(
    capacity: int, window: int, first: int, second: int | None, last: int, total: int
) -> None:
    """PyramidKV's card: budgets of 32 layers without the window, whose sum exceeds the mean's."""
    rows = [x - window for x in schedule(capacity, window, beta=20, layers=32, length=100_000)]

    assert (first, last, total) == (rows[0], rows[-1], sum(rows))
    assert second in (None, rows[1])
    assert sum(rows) > (capacity - window) * 32
    assert rows == sorted(rows, reverse=True)


def test_the_overshoot_is_what_the_card_of_pyramidkv_says() -> None:
    """With the default window and 32 layers: 0 % at 64 entries; at 47 every layer gets the largest budget."""
    method = PyramidKV()
    for entries, share in ((256, "4 % at 256"), (128, "11 % at 128"), (47, "32 % at 47"), (64, "0 % at 64")):
        rows = schedule(entries, method.window, method.beta, layers=32, length=100_000)
        assert f"{sum(rows) / (32 * entries) - 1:.0%}".replace("%", f" % at {entries}") == share
        assert entries == 64 or share in method.card.deviations[0]
    assert len(set(schedule(47, method.window, method.beta, layers=32, length=100_000))) == 1


def test_no_layer_is_given_more_entries_than_there_are() -> None:
    """The lowest layer would get 114 of 112 entries before the window: it gets 112, and the top 2 * 58 - 112 = 4."""
    assert schedule(66, 8, beta=20, layers=2, length=120) == (120, 12)


def test_short_contexts_are_uniform() -> None:
    """Below twice the mean budget every layer gets the same, as SnapKV would."""
    assert schedule(100, 32, beta=20, layers=3, length=130) == (100, 100, 100)


def test_the_ledger_shows_the_schedule() -> None:
    """24 entries and the window: 24 // 20 = 1 in the top layer, 2 * 24 - 1 = 47 below; the mean is SnapKV's 32."""
    model = tiny_model()
    ids = torch.randint(64, (400,), generator=torch.Generator().manual_seed(0)).tolist()
    kept, stored = {}, {}
    for method in (SnapKV(window=8), PyramidKV(window=8)):
        fitted = method.fit(Budget("rows", 32), model.shape(400))
        with Session(model, fitted) as session:
            session.prefill(ids)
            kept[method.card.name] = [store.entries_kept() for store in session.layers]
            stored[method.card.name] = session.memory().stored_bytes
            assert fitted.declared_bytes(model.shape(400)) == session.memory().stored_bytes

    assert kept == {"snapkv": [[32, 32], [32, 32]], "pyramidkv": [[55, 55], [9, 9]]}
    assert stored["pyramidkv"] == stored["snapkv"]


def test_the_declared_bytes_show_the_overshoot() -> None:
    """In four layers 24 entries and the window are 47, 32, 17 and 2, as 46 // 3 is 15: 130 entries; SnapKV has 128.

    An entry is 2 KV heads, a key and a value of 16 numbers each, in float32.
    """
    shape = tiny_model().shape(400)
    deeper = replace(shape, layers=shape.layers * 2)
    fitted = PyramidKV(window=8).fit(Budget("rows", 32), deeper)

    assert fitted.layer_rows == (55, 40, 25, 10)
    assert fitted.declared_bytes(deeper) == 130 * 2 * 2 * 16 * 4


@pytest.mark.parametrize("length", [1, 7, 31, 32, 33, 64])
def test_a_budget_for_every_entry_has_no_schedule(length: int) -> None:
    """A context as long as its budget keeps every entry of every layer, also where it is shorter than the window."""
    fitted = PyramidKV(window=32).fit(Budget("rows", length), tiny_model().shape(length))

    assert [fitted.entries_in(layer, None) for layer in range(2)] == [length, length]


def test_frozen_entries_are_not_compressed_again_in_silence() -> None:
    """Ragged entries cannot be recompressed at a later turn, and the session refuses instead of doing nothing."""
    model = tiny_model()
    fitted = AdaKV().fit(Budget("rows", 50), model.shape(100))

    with Session(model, fitted, recompress=True) as session:
        session.prefill(list(range(60)) + list(range(40)))

        with pytest.raises(UserError, match="Leave --recompress out"):
            session.ask([1, 2, 3], 2, history=[4])
