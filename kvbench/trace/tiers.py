"""LMCache-like tiers: device, host and disk with an LRU each, written through, looked up in that order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.errors import UserError
from kvbench.trace.cache import PrefixCache
from kvbench.trace.policies import LRU
from kvbench.trace.requests import Trace

TIERS = ("device", "host", "disk")


@dataclass(frozen=True)
class Tiered:
    """Blocks found by tier; what a lower tier found beyond the ones above it is moved up."""

    capacities: tuple[float, ...]
    hits: tuple[int, ...]
    """By tier."""
    references: int

    @property
    def moved(self) -> int:
        """Blocks that were copied to the device."""
        return sum(self.hits[1:])


def serve_tiers(trace: Trace, capacities: Sequence[float]) -> Tiered:
    """Serve a trace from one to three tiers.

    capacities: blocks of the device, the host and the disk; each tier holds the most recent blocks, also those above.

    Raises:
        UserError: more than three tiers, or a lower one that is smaller than the one above.
    """
    if not 1 <= len(capacities) <= len(TIERS):
        raise UserError(f"{len(capacities)} tiers: give one to three capacities, of {', '.join(TIERS)}.")
    for above, below, name in zip(capacities, capacities[1:], TIERS[1:], strict=False):
        if below < above:
            raise UserError(f"tier {name} has {below:g} blocks, fewer than the {above:g} above it: it would add none.")
    caches = [PrefixCache(trace, capacity, LRU()) for capacity in capacities]
    hits = [0] * len(caches)
    for index, request in enumerate(trace.requests):
        reached = 0
        for tier, cache in enumerate(caches):
            found = cache.serve(index, request)
            hits[tier] += max(0, found - reached)
            reached = max(reached, found)
    return Tiered(tuple(capacities), tuple(hits), trace.references)
