"""Requests over several instances with a cache each: hit rate against imbalance."""

from __future__ import annotations

import hashlib
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvbench.errors import MOST_INSTANCES, check_number, unknown
from kvbench.trace.cache import PrefixCache
from kvbench.trace.policies import LRU
from kvbench.trace.requests import Trace, TraceRequest

RATE = 10_000.0
"""Prompt tokens that an instance computes per second, a declared model; only backlogs depend on it."""


@dataclass
class Cluster:
    """Instances and the load that a router sees."""

    caches: list[PrefixCache]
    tokens: list[int]
    """Prompt tokens that each instance had to compute."""
    requests: list[int]
    backlog: list[float]
    """Tokens that wait to be computed, drained at RATE tokens per second."""
    random: random.Random
    turn: int = 0
    recent: deque[tuple[int, ...]] = field(default_factory=lambda: deque(maxlen=1000))
    hot: Counter[tuple[int, ...]] = field(default_factory=Counter)


@dataclass(frozen=True)
class Routed:
    """The outcome of one router."""

    router: str
    instances: int
    hit_rate: float
    """Blocks found over blocks asked for."""
    request_imbalance: float
    """Requests of the busiest instance over the mean."""
    token_imbalance: float
    """The same of computed prompt tokens."""


def route(trace: Trace, router: str, instances: int, blocks: float, *, seed: int = 0) -> Routed:
    """Serve a trace on several instances with an LRU cache each.

    Args:
        trace: with blocks.
        router: a name of ROUTERS.
        instances: how many.
        blocks: capacity of each.
        seed: of the routers that draw.

    Raises:
        UserError: an unknown router, or fewer than one instance.
    """
    if router not in ROUTERS:
        raise unknown("router", router, ROUTERS)
    check_number("instances", instances, most=MOST_INSTANCES)
    caches = [PrefixCache(trace, blocks, LRU()) for _ in range(instances)]
    cluster = Cluster(caches, [0] * instances, [0] * instances, [0.0] * instances, random.Random(seed))
    found, before, size = 0, 0.0, trace.block_tokens or 1
    for index, request in enumerate(trace.requests):
        drained = (request.time - before) * RATE
        cluster.backlog = [max(0.0, x - drained) for x in cluster.backlog]
        before = request.time
        place = ROUTERS[router](cluster, request)
        hits = cluster.caches[place].serve(index, request)
        missed = max(0, request.input_tokens - hits * size)
        cluster.requests[place] += 1
        cluster.tokens[place] += missed
        cluster.backlog[place] += missed
        found += hits
    return Routed(
        router, instances, found / max(1, trace.references), _imbalance(cluster.requests), _imbalance(cluster.tokens)
    )


def _imbalance(loads: list[int]) -> float:
    return max(loads) * len(loads) / max(1, sum(loads))


def _round_robin(cluster: Cluster, request: TraceRequest) -> int:
    del request
    cluster.turn += 1
    return (cluster.turn - 1) % len(cluster.caches)


def _two_choices(cluster: Cluster, request: TraceRequest) -> int:
    """The less loaded of two drawn instances (Mitzenmacher 2001)."""
    del request
    pair = [cluster.random.randrange(len(cluster.caches)) for _ in range(2)]
    return min(pair, key=lambda i: (cluster.backlog[i], i))


def _prefix_affinity(cluster: Cluster, request: TraceRequest) -> int:
    """The instance that holds most of the prompt; of equals the one with the least backlog."""
    return max(
        range(len(cluster.caches)),
        key=lambda i: (cluster.caches[i].look_up(request.blocks), -cluster.backlog[i], -i),
    )


def _consistent_hash(cluster: Cluster, request: TraceRequest) -> int:
    """By the hash of the conversation, or of the first block where the trace has none."""
    return _rendezvous(request.session or request.blocks[:1], len(cluster.caches), 0)


def _dual_map(cluster: Cluster, request: TraceRequest) -> int:
    """Two instances by hashes of a prefix that is long enough not to be hot; the warmer one unless it is behind.

    DualMap: prefix depths 4 * 2^k blocks, hot above 2 / instances of the last 1,000 requests, backlog 65,536 tokens.
    """
    count = len(cluster.caches)
    most = 2 / count * len(cluster.recent)
    prefix = next((x for x in _prefixes(request.blocks) if cluster.hot[x] <= most), request.blocks)
    _note_prefixes(cluster, request)
    pair = [_rendezvous(prefix, count, salt) for salt in (1, 2)]
    warm = [cluster.caches[i].look_up(request.blocks) for i in pair]
    first = 0 if warm[0] >= warm[1] else 1
    if cluster.backlog[pair[first]] > 65_536:
        return min(pair, key=lambda i: (cluster.backlog[i], i))
    return pair[first]


def _note_prefixes(cluster: Cluster, request: TraceRequest) -> None:
    """Count the prefixes of the last 1,000 requests."""
    if len(cluster.recent) == cluster.recent.maxlen:
        for prefix in _prefixes(cluster.recent[0]):
            cluster.hot[prefix] -= 1
    cluster.recent.append(request.blocks)
    for prefix in _prefixes(request.blocks):
        cluster.hot[prefix] += 1


def _prefixes(blocks: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    depth = 4
    while depth < len(blocks):
        yield blocks[:depth]
        depth *= 2


def _rendezvous(key: object, count: int, salt: int) -> int:
    """Highest random weight: the same key goes to the same instance, whatever others there are."""
    return max(range(count), key=lambda i: hashlib.sha256(f"{salt}:{i}:{key}".encode()).digest())


Router = Callable[[Cluster, TraceRequest], int]
ROUTERS: dict[str, Router] = {
    "round-robin": _round_robin, "two-choices": _two_choices, "prefix-affinity": _prefix_affinity,
    "consistent-hash": _consistent_hash, "dualmap": _dual_map,
}
