"""A cache of prompt blocks with a capacity: contiguous hits, running requests pinned, eviction from the leaves."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvbench.trace.requests import ROOT, Trace, TraceRequest

if TYPE_CHECKING:
    from kvbench.trace.policies.base import BlockPolicy


@dataclass(frozen=True)
class Simulation:
    """The outcome of one policy at one capacity."""

    hits: tuple[int, ...]
    """Blocks found by each request, contiguous from the start of its prompt."""
    evictions: int
    rejected: int
    """Blocks at the ends of prompts that were not stored: running requests, or the same prompt, held the room."""


class PrefixCache:
    """The cached part of a prefix tree. A block is evicted only when no cached block follows it.

    Args:
        trace: gives the tree.
        capacity: blocks; `math.inf` for no limit.
        policy: a fresh one, which keeps state; it chooses the next block to evict among the leaves.

    Raises:
        UserError: the policy needs a field that the trace lacks.
    """

    def __init__(self, trace: Trace, capacity: float, policy: BlockPolicy) -> None:
        policy.prepare(trace, capacity)
        self.capacity, self.policy = capacity, policy
        self.parents = trace.parents
        count = len(trace.parents)
        self.cached = bytearray(count)
        self.children = [0] * count
        self.pins = [0] * count
        self.used = self.evictions = self.rejected = 0
        self._stamps = [0] * count
        self._order = 0
        self._leaves: dict[int, list[tuple[Any, int, int, int]]] = {}  # queue: heap of (key, order, block, stamp)
        self._running: list[tuple[float, int]] = []

    def look_up(self, blocks: tuple[int, ...]) -> int:
        """Cached blocks, contiguous from the start of a prompt."""
        cached = self.cached
        for count, block in enumerate(blocks):
            if not cached[block]:
                return count
        return len(blocks)

    def serve(self, index: int, request: TraceRequest, until: float | None = None) -> int:
        """Look a request up, store its prompt, and evict down to the capacity. Blocks found.

        until: the time at which the request ends; its blocks are pinned until then.
        """
        policy, blocks = self.policy, request.blocks
        self.release(request.time)
        found = self.look_up(blocks)
        if self.capacity <= 0:
            self.rejected += len(blocks)
            return 0
        cached, children, parents = self.cached, self.children, self.parents
        for block in blocks[:found]:
            policy.touch(block, index, request, new=False)
        for block in blocks[found:]:
            policy.touch(block, index, request, new=True)
            cached[block] = 1
            if (parent := parents[block]) != ROOT:
                children[parent] += 1
        self.used += len(blocks) - found
        policy.served(index, request)
        for block in policy.changed(request.time):
            self._offer(block)
        if blocks:
            self._shrink(request, blocks)
        if until is not None and (last := self.look_up(blocks)):
            self.pins[blocks[last - 1]] += 1
            heapq.heappush(self._running, (until, blocks[last - 1]))
        return found

    def release(self, now: float) -> None:
        """Unpin what ended before now, and drop what expired."""
        while self._running and self._running[0][0] <= now:
            _, block = heapq.heappop(self._running)
            self.pins[block] -= 1
            self._offer(block)
        if self.policy.expires:
            for heap in self._leaves.values():
                while (top := self._top(heap)) is not None and self.policy.expired(top, now):
                    heapq.heappop(heap)
                    self._drop(top)

    def _shrink(self, request: TraceRequest, blocks: tuple[int, ...]) -> None:
        """Evict down to the capacity. The request's own blocks go last, unless the policy may leave them out."""
        end = blocks[-1]
        self._stamps[end] += 1  # no candidate
        if self.policy.bypasses:
            self._offer(end)
        goal = self.policy.goal(self.used, self.capacity)
        while self.used > goal:
            victim = self._choose(request.time)
            if victim is None:
                break
            self._drop(victim)
            self.evictions += 1
        while self.used > self.capacity:  # only pinned blocks and this prompt are left: its end is not stored
            self._drop(end)
            self.rejected += 1
            end = self.parents[end]
        if not self.policy.bypasses and end != ROOT:
            self._offer(end)

    def _is_free(self, block: int) -> bool:
        """Whether a block is a cached leaf of no running request."""
        return bool(self.cached[block]) and not self.children[block] and not self.pins[block]

    def _offer(self, block: int) -> None:
        """Make a leaf a candidate for eviction, by its priority of now."""
        if not self._is_free(block):
            return
        self._stamps[block] += 1
        self._order += 1
        heap = self._leaves.setdefault(self.policy.queue(block), [])
        heapq.heappush(heap, (self.policy.key(block), self._order, block, self._stamps[block]))

    def _top(self, heap: list[tuple[Any, int, int, int]]) -> int | None:
        """The first candidate of a queue; entries that are out of date are removed."""
        while heap:
            _, _, block, stamp = heap[0]
            if stamp == self._stamps[block] and self._is_free(block):
                return block
            heapq.heappop(heap)
        return None

    def _choose(self, now: float) -> int | None:
        """The next block to evict; None: every leaf is pinned or protected."""
        for queue in self.policy.queues():
            heap = self._leaves.get(queue, [])
            while (block := self._top(heap)) is not None:
                if self.policy.protects(block, now):
                    break  # keys order a queue by age, so all behind it are protected too
                heapq.heappop(heap)
                if not self.policy.spares(block):
                    return block
                self._offer(block)
        return None

    def _drop(self, block: int) -> None:
        """Remove a leaf; its parent may become one."""
        self.cached[block] = 0
        self.used -= 1
        self.policy.forget(block)
        if (parent := self.parents[block]) != ROOT:
            self.children[parent] -= 1
            self._offer(parent)


def simulate(
    trace: Trace, policy: BlockPolicy, capacity: float, seconds_per_token: tuple[float, float] | None = None
) -> Simulation:
    """Serve all requests of a trace in order.

    Args:
        trace: with blocks.
        policy: a fresh one, which keeps state.
        capacity: blocks.
        seconds_per_token: a declared model of time, for prompt tokens that miss and for output tokens; a request's
            blocks are pinned for as long. None: a request ends before the next one arrives.

    Raises:
        UserError: the policy needs a field that the trace lacks.
    """
    cache = PrefixCache(trace, capacity, policy)
    hits = []
    for index, request in enumerate(trace.requests):
        until = None
        if seconds_per_token is not None:
            cache.release(request.time)
            found = cache.look_up(request.blocks) * (trace.block_tokens or 0)
            until = request.time + max(0, request.input_tokens - found) * seconds_per_token[0]
            until += request.output_tokens * seconds_per_token[1]
        hits.append(cache.serve(index, request, until))
    return Simulation(tuple(hits), cache.evictions, cache.rejected)
