"""Routing, tiers, memory and isolation."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.errors import UserError
from kvbench.trace.cache import simulate
from kvbench.trace.isolation import isolate
from kvbench.trace.memory import PAGE, count_copies, count_rejections, measure_waste
from kvbench.trace.policies import LRU
from kvbench.trace.requests import Trace, TraceRequest
from kvbench.trace.routing import ROUTERS, route
from kvbench.trace.synthetic import Workload, make_trace
from kvbench.trace.tiers import serve_tiers

SMALL = make_trace(1, Workload(sessions=80, block_tokens=256))


@pytest.mark.parametrize("router", ROUTERS)
def test_one_instance_is_one_cache(router):
    """With a single instance every router gives the hit rate of the cache alone."""
    found = route(SMALL, router, 1, 200)
    alone = sum(simulate(SMALL, LRU(), 200).hits) / SMALL.references
    assert found.hit_rate == alone and found.request_imbalance == 1


def test_affinity_finds_more_than_turns_and_is_less_even():
    """Round robin is even; affinity by conversation finds more."""
    turns, affine = route(SMALL, "round-robin", 4, 200), route(SMALL, "consistent-hash", 4, 200)
    assert affine.hit_rate > turns.hit_rate
    assert turns.request_imbalance < 1.02 < affine.request_imbalance


def test_wrong_routes_are_refused():
    """An unknown router and no instance."""
    with pytest.raises(UserError, match="unknown router 'x'"):
        route(SMALL, "x", 2, 10)
    with pytest.raises(UserError, match="instances 0 must be 1 or more"):
        route(SMALL, "dualmap", 0, 10)


def test_tiers_together_find_what_the_largest_finds():
    """Written through, the lowest tier holds everything above it; each block is found in one tier."""
    tiers = serve_tiers(SMALL, [50, 200, 800])
    assert sum(tiers.hits) == sum(simulate(SMALL, LRU(), 800).hits)
    assert tiers.hits[0] == sum(simulate(SMALL, LRU(), 50).hits) and tiers.moved == sum(tiers.hits[1:])
    with pytest.raises(UserError, match="tier host has 10 blocks, fewer than the 50 above it"):
        serve_tiers(SMALL, [50, 10])


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=30))
def test_pages_waste_less_than_a_page_each(lengths):
    """The bound that makes paging what it is."""
    trace = Trace("t", tuple(TraceRequest(float(i), (), n, 0) for i, n in enumerate(lengths)), None)
    paged = next(x for x in measure_waste(trace) if x.scheme == f"paged, {PAGE} tokens").share
    unused = sum(-n % PAGE for n in lengths)
    assert unused < PAGE * len(lengths)
    assert paged == pytest.approx(unused / (unused + sum(lengths)))


def test_contiguous_groups_take_one_copy_in_an_empty_pool():
    """A request alone lies in one piece; a queue that was churned does not."""
    lengths = [100, 300, 50, 700, 20, 900] * 20
    trace = Trace("t", tuple(TraceRequest(float(i), (), n, 100) for i, n in enumerate(lengths)), None)
    queue, groups = count_copies(trace, 400, seconds=(0.0, 0.04))
    assert groups.copies < queue.copies and groups.pages > queue.pages


def test_borrowing_rejects_no_more_than_own_memory():
    """Room of several instances together holds what no single one does."""
    trace = Trace("t", tuple(TraceRequest(float(i), (), 1600, 0) for i in range(10)), None)
    own, borrow = (count_rejections(trace, 4, 60, x, seconds=(1.0, 1.0)) for x in ("own", "borrow"))
    assert own.share == 1.0 and 0 < borrow.share < 1


def test_salts_cost_hits_and_stop_probes():
    """Without a salt a prompt that was sent is seen; with one never."""
    plain, apart = isolate(SMALL, "none", 300), isolate(SMALL, "session", 300)
    assert plain.lost == 0 and apart.lost > 0
    assert all(true == 1.0 for threshold, true, _ in plain.probes) and plain.probes[-1][2] < plain.probes[0][2]
    assert all((true, false) == (0, 0) for _, true, false in apart.probes)


def test_a_prompt_that_was_sent_before_is_no_false_positive(make_trace):
    """A repeat is not probed; the start of a longer prompt that was sent is: nobody has sent it."""
    trace = make_trace([[1, 2], [1, 2], [1], [3]])
    assert isolate(trace, "none", 10, every=1).probes[-1] == (1.0, 1.0, pytest.approx(1 / 3))
    assert isolate(make_trace([[]]), "none", 10, every=1).probes == ()  # nothing was probed: there are no rates


def test_a_salt_without_its_field_is_refused(make_trace):
    """A trace without users cannot be salted by user."""
    with pytest.raises(UserError, match="salt 'user' needs the field user"):
        isolate(make_trace([[1]]), "user", math.inf)
