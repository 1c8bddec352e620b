"""Eviction policies: which leaf of the prefix tree goes first."""

from __future__ import annotations

from kvbench.trace.policies.base import BlockPolicy
from kvbench.trace.policies.classic import ARC, FIFO, LFU, LRU, S3FIFO, RandomLeaf
from kvbench.trace.policies.offline import Optimum, Succinct, order_by_prefix
from kvbench.trace.policies.serving import SAGA, Continuum, FixedTTL, KVFlow, MooncakeStore, TailLRU

__all__ = [
    "LRU",
    "POLICIES",
    "BlockPolicy",
    "Optimum",
    "order_by_prefix",
]

POLICIES: dict[str, type[BlockPolicy]] = {
    x.name: x for x in (
        LRU, FIFO, LFU, ARC, S3FIFO, RandomLeaf, Optimum, Succinct, TailLRU, FixedTTL, Continuum, KVFlow, SAGA,
        MooncakeStore,
    )
}
