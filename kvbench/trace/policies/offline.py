"""Policies that look at later requests: the optimum, predictions of it, and an order of a batch."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any, ClassVar

from kvbench.errors import UserError
from kvbench.trace.cache import simulate
from kvbench.trace.policies.base import BlockPolicy
from kvbench.trace.requests import Trace, TraceRequest


@dataclass(kw_only=True)
class Optimum(BlockPolicy):
    """Evicts the block whose next use is farthest away; it may leave a prompt's own end out. An upper bound.

    It is optimal where requests end before the next one arrives; with running requests pinned it is a heuristic.
    """

    name: ClassVar[str] = "optimum"
    source: ClassVar[str] = "Belady 1966; a heuristic where running requests are pinned"
    offline: ClassVar[bool] = True
    bypasses: ClassVar[bool] = True

    def prepare(self, trace: Trace, capacity: float) -> None:
        """The next use of every reference."""
        super().prepare(trace, capacity)
        self.next_uses = find_next_uses(trace)
        self.following = [math.inf] * len(trace.parents)
        self.reference = 0

    def touch(self, block: int, index: int, request: TraceRequest, *, new: bool) -> None:
        """Look the next use up; references come in order."""
        self.following[block] = self.next_uses[self.reference]
        self.reference += 1

    def key(self, block: int) -> Any:
        """The farthest first."""
        return -self.following[block]


def find_next_uses(trace: Trace) -> list[float]:
    """For each block reference in order, the index of the next request that uses the block; infinite: none."""
    seen: dict[int, float] = {}
    found: list[float] = []
    for index in range(len(trace.requests) - 1, -1, -1):
        for block in reversed(trace.requests[index].blocks):
            found.append(seen.get(block, math.inf))
            seen[block] = index
    return found[::-1]


@dataclass(kw_only=True)
class Succinct(BlockPolicy):
    """One predicted bit per reference: the optimum will evict this block before its next use. Such blocks go first.

    The bits are those of the optimum at this capacity, each flipped with the probability `error`.
    """

    name: ClassVar[str] = "succinct"
    source: ClassVar[str] = "Antoniadis et al., Paging with Succinct Predictions, ICML 2023: discard predictions"
    offline: ClassVar[bool] = True

    error: float = 0.0
    seed: int = 0

    def prepare(self, trace: Trace, capacity: float) -> None:
        """Predictions for every reference."""
        super().prepare(trace, capacity)
        if not 0 <= self.error <= 1:
            raise UserError(f"policy 'succinct': error {self.error} must be from 0 to 1.")
        flips = random.Random(self.seed)
        self.bits = [x != (flips.random() < self.error) for x in find_discards(trace, capacity)]
        self.discard = bytearray(len(trace.parents))
        self.reference = 0

    def touch(self, block: int, index: int, request: TraceRequest, *, new: bool) -> None:
        """Read the bit."""
        self.last[block] = index
        self.discard[block] = self.bits[self.reference]
        self.reference += 1

    def key(self, block: int) -> Any:
        """Blocks to discard first, then by recency."""
        return not self.discard[block], self.last[block]


def find_discards(trace: Trace, capacity: float) -> list[bool]:
    """For each block reference, whether the optimum evicts the block before its next use."""
    class Recorder(Optimum):
        def touch(self, block: int, index: int, request: TraceRequest, *, new: bool) -> None:
            latest[block] = self.reference
            super().touch(block, index, request, new=new)

        def forget(self, block: int) -> None:
            discards[latest[block]] = True

    discards = [False] * trace.references
    latest = [0] * len(trace.parents)
    simulate(trace, Recorder(), capacity)
    return discards


def order_by_prefix(trace: Trace) -> list[int]:
    """BatchLLM's order of an offline batch: depth first through the prefix tree, so that equal prefixes are together.

    Source: BatchLLM, section 4. With room for the longest prompt LRU then reaches the hit rate of an infinite cache.
    """
    first: dict[int, int] = {}
    for request in trace.requests:
        for block in request.blocks:
            first.setdefault(block, len(first))
    return sorted(range(len(trace.requests)), key=lambda i: tuple(first[x] for x in trace.requests[i].blocks))
