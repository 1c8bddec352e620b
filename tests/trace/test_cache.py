"""The cache and its policies, against a cache that is written to be read and against limits."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.errors import UserError
from kvbench.trace.cache import PrefixCache, simulate
from kvbench.trace.measures import find_bounds, measure
from kvbench.trace.policies import LRU, POLICIES, Optimum, order_by_prefix
from kvbench.trace.requests import PrefixTree, Trace, TraceRequest
from kvbench.trace.synthetic import Workload, make_trace

PROMPTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=25)
SMALL = Workload(sessions=60, block_tokens=256)
EVERY = sorted(POLICIES)


def build(prompts):
    """A trace of prompts, one per second, with the fields that policies ask for."""
    tree = PrefixTree()
    requests = tuple(
        TraceRequest(
            time=float(i), blocks=tree.add(x), input_tokens=10 * len(x), output_tokens=1, session=f"s{i % 3}",
            tool="t", tool_seconds=1.0, agent=f"a{i % 2}", fixed_blocks=1, upcoming=(f"a{(i + 1) % 2}",),
        )
        for i, x in enumerate(prompts)
    )
    return Trace("test", requests, 10, tuple(tree.parents))


def plain_lru(trace, capacity):
    """Hits of LRU over leaves, by looking through everything."""
    last, hits = {}, []
    parents = trace.parents
    for now, request in enumerate(trace.requests):
        found = 0
        for block in request.blocks:
            if block not in last:
                break
            found += 1
        hits.append(found if capacity else 0)
        for block in request.blocks:
            last[block] = now
        while len(last) > capacity:
            leaves = [x for x in last if not any(parents[y] == x for y in last)]
            others = [x for x in leaves if x not in request.blocks]
            victim = min(others, key=lambda x: last[x]) if others else max(leaves)
            del last[victim]
    return hits


@given(PROMPTS, st.integers(0, 12))
def test_lru_finds_what_a_plain_lru_finds(prompts, capacity):
    """Heaps and stamps change nothing."""
    trace = build(prompts)
    assert list(simulate(trace, LRU(), capacity).hits) == plain_lru(trace, capacity)


@given(PROMPTS, st.integers(1, 12), st.sampled_from(EVERY))
def test_no_policy_beats_the_optimum(prompts, capacity, name):
    """The optimum is an upper bound for every policy."""
    trace = build(prompts)
    best = sum(simulate(trace, Optimum(), capacity).hits)
    assert sum(simulate(trace, POLICIES[name](), capacity).hits) <= best


@given(PROMPTS, st.integers(1, 12), st.sampled_from(EVERY))
def test_the_cache_is_a_tree_within_its_capacity(prompts, capacity, name):
    """After every request no block is cached without its parent, and no more than fit."""
    trace = build(prompts)
    policy = POLICIES[name]()
    policy.prepare(trace, capacity)
    cache = PrefixCache(trace, capacity, policy)
    for index, request in enumerate(trace.requests):
        cache.serve(index, request)
        held = [x for x in range(len(trace.parents)) if cache.cached[x]]
        assert len(held) == cache.used <= capacity
        assert all(trace.parents[x] == -1 or cache.cached[trace.parents[x]] for x in held)


@pytest.mark.parametrize("name", EVERY)
def test_limits(name):
    """No room finds nothing; endless room finds every block that was seen, unless blocks expire."""
    trace = make_trace(1, SMALL)
    assert sum(simulate(trace, POLICIES[name](), 0).hits) == 0
    seen, possible = set(), 0
    for request in trace.requests:
        possible += sum(x in seen for x in request.blocks)
        seen.update(request.blocks)
    found = sum(simulate(trace, POLICIES[name](), math.inf).hits)
    assert found < possible if POLICIES[name].expires else found == possible


@pytest.mark.parametrize("name", EVERY)
def test_the_same_simulation_gives_the_same_hits(name):
    """Ties and draws are deterministic."""
    trace = make_trace(2, SMALL)
    first, again = (simulate(trace, POLICIES[name](), 100) for _ in range(2))
    assert first == again and first.evictions > 0


def test_running_requests_are_not_evicted(make_trace):
    """A request that still runs keeps its blocks; the next prompt is cut where there is no room."""
    trace = make_trace([[1, 2], [3, 4], [1, 2]])
    pinned = simulate(trace, LRU(), 2, seconds_per_token=(1.0, 1.0))
    assert pinned.hits == (0, 0, 2) and pinned.rejected == 2
    assert simulate(trace, LRU(), 2).hits == (0, 0, 0)


def test_a_request_runs_as_long_as_its_missing_tokens_take(make_trace):
    """The first block has expired: the second request computes all of its 24 tokens and still runs at 40 s."""
    trace = make_trace([[1], [1, 2], [3]])
    first, second, third = trace.requests
    requests = (first, replace(second, time=20.0, input_tokens=24, output_tokens=0), replace(third, time=40.0))
    ran = simulate(replace(trace, requests=requests), POLICIES["ttl"](seconds=15), 2, seconds_per_token=(1.0, 0.0))
    assert (ran.evictions, ran.rejected) == (0, 1)


def test_a_policy_without_its_fields_is_refused(make_trace):
    """A policy that needs workflows means nothing on a trace without them."""
    with pytest.raises(UserError, match="policy 'kvflow' needs the field agent"):
        simulate(make_trace([[1]]), POLICIES["kvflow"](), 1)


@given(PROMPTS)
def test_prefix_order_needs_room_for_the_longest_prompt_only(prompts):
    """BatchLLM: depth first, the hit rate of an infinite cache."""
    trace = build(prompts)
    ordered = trace.reordered(order_by_prefix(trace), "ordered")
    endless = sum(simulate(trace, LRU(), math.inf).hits)
    assert sum(simulate(ordered, LRU(), trace.longest).hits) == endless


def test_predictions_help_less_the_more_of_them_are_wrong():
    """Right predictions find more than LRU; every share of wrong ones costs hits."""
    trace = make_trace(3, SMALL)
    kind = POLICIES["succinct"]
    found = [sum(simulate(trace, kind(error=x), 150).hits) for x in (0.0, 0.2, 0.5, 1.0)]
    assert found == sorted(found, reverse=True) and len(set(found)) == len(found)
    assert found[0] > 1.4 * sum(simulate(trace, LRU(), 150).hits)


def test_arc_and_s3_fifo_keep_what_is_used_again_through_a_scan(make_trace):
    """One pass over blocks that are used once evicts the working set from LRU, and not from these."""
    working = [[100 + i] for i in range(4)]
    scan = [[i] for i in range(12)]
    prompts = [*working, *working, *working, *scan, *working]
    trace = make_trace(prompts)
    late = {name: sum(simulate(trace, POLICIES[name](), 8).hits[-4:]) for name in ("lru", "arc", "s3-fifo")}
    assert late["lru"] == 0 and late["arc"] > 0 and late["s3-fifo"] > 0


def plain_arc(blocks, capacity):
    """Hits of ARC over single blocks, as in figure 4 of its paper; lists have the least recent block first."""
    once, often, was_once, was_often, target, hits = [], [], [], [], 0.0, []

    def replace_one(block):
        if once and (len(once) > target or (block in was_often and len(once) == target)):
            was_once.append(once.pop(0))
        else:
            was_often.append(often.pop(0))

    for block in blocks:
        hits.append(int(block in once or block in often))
        if hits[-1]:
            (once if block in once else often).remove(block)
            often.append(block)
        elif block in was_once:
            target = min(capacity, target + max(1, len(was_often) / len(was_once)))
            replace_one(block)
            was_once.remove(block)
            often.append(block)
        elif block in was_often:
            target = max(0, target - max(1, len(was_once) / len(was_often)))
            replace_one(block)
            was_often.remove(block)
            often.append(block)
        else:
            if len(once) + len(was_once) == capacity:
                if len(once) < capacity:
                    was_once.pop(0)
                    replace_one(block)
                else:
                    once.pop(0)
            elif (total := len(once) + len(was_once) + len(often) + len(was_often)) >= capacity:
                if total == 2 * capacity:
                    was_often.pop(0)
                replace_one(block)
            once.append(block)
    return hits


def plain_s3_fifo(blocks, capacity):
    """Hits of S3-FIFO over single blocks; queues have the oldest block first.

    As in the authors' simulator (1a1a11a/libCacheSim, aa0fc40, S3FIFO.c), ghosts are looked up before eviction, and a
    promotion into a full main queue evicts nothing.
    """
    small, main, ghosts, uses, hits = [], [], [], {}, []

    def evict_main():
        while main:
            block = main.pop(0)
            if not uses[block]:
                return
            uses[block] -= 1
            main.append(block)

    def evict_small():
        while small:
            block = small.pop(0)
            if uses[block] <= 1:
                ghosts.append(block)
                del ghosts[: max(0, len(ghosts) - int(0.9 * capacity))]
                return
            uses[block] = 0
            main.append(block)

    for block in blocks:
        hits.append(int(block in small or block in main))
        if hits[-1]:
            uses[block] = min(3, uses[block] + 1)
            continue
        again = block in ghosts
        while len(small) + len(main) >= capacity:
            evict_small() if len(small) >= 0.1 * capacity else evict_main()
        (main if again else small).append(block)
        if again and block in ghosts:
            ghosts.remove(block)
        uses[block] = 0
    return hits


@pytest.mark.parametrize(("name", "plain"), [("arc", plain_arc), ("s3-fifo", plain_s3_fifo)])
@given(blocks=st.lists(st.integers(0, 30), min_size=1, max_size=300), capacity=st.integers(1, 20))
def test_policies_of_two_queues_find_what_plain_lists_find(name, plain, blocks, capacity):
    """Over single blocks, where every block is a leaf."""
    assert list(simulate(build([[x] for x in blocks]), POLICIES[name](), capacity).hits) == plain(blocks, capacity)


def test_a_random_leaf_is_as_likely_whatever_its_age(make_trace):
    """Of four leaves each leaves with a quarter: the newest, those that stayed twice, and those that stayed once."""
    fill = [[0], [1], [2], [3], [4], [5], [6]]  # the last three evict one block each
    wanted = {6: 1.0, 5: 3 / 4, 4: (3 / 4) ** 2, 0: (3 / 4) ** 3}
    for block, share in wanted.items():
        trace = make_trace([*fill, [block]])
        found = [simulate(trace, POLICIES["random"](seed=x), 4).hits[-1] for x in range(3000)]
        assert sum(found) / len(found) == pytest.approx(share, abs=0.03)


def test_continuum_learns_how_long_a_call_took_when_it_has_ended(make_trace):
    """A call of three seconds is known from its end on; until then a prompt is kept for the two seconds of `cold`."""
    prompts = [[x] for x in range(4)]
    trace = make_trace(prompts, tool=["search"] * 4, tool_seconds=[3.0, 9.0, 9.0, 9.0])
    policy = POLICIES["continuum"](least=1, cold=2.0, seconds_per_token=1.0)
    simulate(trace, policy, 10)
    assert [policy.until[x.blocks[-1]] for x in trace.requests] == [2.0, 3.0, 4.0, 6.0]


def test_a_fixed_time_drops_blocks_although_there_is_room(make_trace):
    """Two seconds after its last use a block is gone."""
    trace = make_trace([[1], [1], [2], [3], [1]])
    assert simulate(trace, POLICIES["ttl"](seconds=2.5), 10).hits == (0, 1, 0, 0, 0)
    assert simulate(trace, POLICIES["ttl"](seconds=5.0), 10).hits == (0, 1, 0, 0, 1)


@pytest.mark.parametrize(("agent", "block"), [("a", 1), ("c", 5)])
def test_kvflow_evicts_by_the_steps_of_now(agent, block):
    """The last prefix evicts that of b, which no agent waits for any more: not the rest of a's, whose end is gone."""
    tree = PrefixTree()
    rows = [
        ("a", [1, 2], 2, ()), ("b", [3], 1, ()), (None, [4], 0, None), ("c", [5], 1, ("a", "b")), ("d", [6], 1, ("a",)),
        (agent, [block], 1, ()),
    ]
    requests = tuple(
        TraceRequest(float(i), tree.add(ids), 10, 1, session="s", agent=name, fixed_blocks=fixed, upcoming=upcoming)
        for i, (name, ids, fixed, upcoming) in enumerate(rows)
    )
    trace = Trace("test", requests, 10, tuple(tree.parents))
    assert simulate(trace, POLICIES["kvflow"](), 3).hits == (0, 0, 0, 0, 0, 1)


def test_hit_rates_by_hand(make_trace):
    """Two of four blocks, 20 of 40 tokens, and the mean over requests of 0 and 2/2."""
    trace = make_trace([[1, 2], [1, 2]])
    rates = measure(trace, simulate(trace, LRU(), 2))
    assert (rates.block, rates.token, rates.request, rates.reused_tokens) == (0.5, 0.5, 0.5, 20)


def test_bounds_of_sequential_storage(make_trace):
    """Three distinct blocks of 10 tokens: 120 bytes of ids are 0.12 blocks of 1 kB."""
    bounds = find_bounds(make_trace([[1, 2], [1, 3], [1, 2]]), 1000)
    assert [x["blocks"] for x in bounds] == [3, 0.12]
