"""Policies of general caches: recency, frequency, queues, and lists that adapt."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvbench.errors import UserError
from kvbench.trace.policies.base import BlockPolicy
from kvbench.trace.requests import Trace, TraceRequest


@dataclass(kw_only=True)
class LRU(BlockPolicy):
    """Least recently used."""


@dataclass(kw_only=True)
class FIFO(BlockPolicy):
    """First stored, first evicted."""

    name: ClassVar[str] = "fifo"

    def touch(self, block: int, index: int, request: TraceRequest, *, new: bool) -> None:
        """Only storing counts."""
        if new:
            self.last[block] = index


@dataclass(kw_only=True)
class LFU(BlockPolicy):
    """Least frequently used since it was stored; of equals the least recent."""

    name: ClassVar[str] = "lfu"

    def prepare(self, trace: Trace, capacity: float) -> None:
        """Counts by block."""
        super().prepare(trace, capacity)
        self.count = [0] * len(trace.parents)

    def touch(self, block: int, index: int, request: TraceRequest, *, new: bool) -> None:
        """Count from the time when it was stored."""
        self.count[block] = 1 if new else self.count[block] + 1
        self.last[block] = index

    def key(self, block: int) -> Any:
        """Uses, then recency."""
        return self.count[block], self.last[block]


@dataclass(kw_only=True)
class RandomLeaf(BlockPolicy):
    """A random leaf."""

    name: ClassVar[str] = "random"

    seed: int = 0

    def prepare(self, trace: Trace, capacity: float) -> None:
        """A generator of its own."""
        super().prepare(trace, capacity)
        self.random = random.Random(self.seed)

    def key(self, block: int) -> Any:
        """A draw when it becomes a leaf or is used."""
        return self.random.random()


@dataclass(kw_only=True)
class ARC(BlockPolicy):
    """Adaptive replacement: once-used and repeatedly used blocks in two lists, whose sizes follow ghost hits."""

    name: ClassVar[str] = "arc"
    source: ClassVar[str] = "Megiddo and Modha, FAST 2003, figure 4; victims are the oldest leaf of the chosen list"

    def prepare(self, trace: Trace, capacity: float) -> None:
        """Two lists by flag, two ghost lists."""
        super().prepare(trace, capacity)
        self.frequent = bytearray(len(trace.parents))
        self.size = [0, 0]
        self.ghosts: tuple[OrderedDict[int, None], OrderedDict[int, None]] = (OrderedDict(), OrderedDict())
        self.target = 0.0

    def touch(self, block: int, index: int, request: TraceRequest, *, new: bool) -> None:
        """Move between the lists, and move the target on a ghost hit."""
        self.last[block] = index
        once, often = self.ghosts
        if new:
            again = block in once or block in often
            if block in once:
                self.target = min(self.capacity, self.target + max(1.0, len(often) / len(once)))
                del once[block]
            elif block in often:
                self.target = max(0.0, self.target - max(1.0, len(once) / len(often)))
                del often[block]
            self.frequent[block] = again
            self.size[again] += 1
        elif not self.frequent[block]:
            self.frequent[block] = 1
            self.size[0] -= 1
            self.size[1] += 1

    def queue(self, block: int) -> int:
        """0: used once; 1: used again."""
        return self.frequent[block]

    def queues(self) -> Sequence[int]:
        """The list that is above its target first."""
        return (0, 1) if self.size[0] > self.target else (1, 0)

    def forget(self, block: int) -> None:
        """Remember it as a ghost; both ghost lists together hold as many as the cache."""
        kind = self.frequent[block]
        self.size[kind] -= 1
        self.ghosts[kind][block] = None
        while sum(map(len, self.ghosts)) > self.capacity:
            longer = self.ghosts[0] if len(self.ghosts[0]) >= len(self.ghosts[1]) else self.ghosts[1]
            longer.popitem(last=False)


@dataclass(kw_only=True)
class S3FIFO(BlockPolicy):
    """Three FIFO queues: a small one for new blocks, a main one, and ghosts."""

    name: ClassVar[str] = "s3-fifo"
    source: ClassVar[str] = "Yang et al., SOSP 2023, algorithm 1; victims are the oldest leaf of the chosen queue"

    small: float = 0.1
    """Share of the capacity for new blocks."""

    def prepare(self, trace: Trace, capacity: float) -> None:
        """Queues by flag, uses capped at 3, ghosts."""
        super().prepare(trace, capacity)
        if not 0 <= self.small <= 1:
            raise UserError(f"policy 's3-fifo': small {self.small} must be from 0 to 1.")
        self.main = bytearray(len(trace.parents))
        self.uses = bytearray(len(trace.parents))
        self.size = [0, 0]
        self.ghosts: OrderedDict[int, None] = OrderedDict()
        self.clock = 0

    def touch(self, block: int, index: int, request: TraceRequest, *, new: bool) -> None:
        """A ghost goes to the main queue; a hit only counts."""
        if not new:
            self.uses[block] = min(3, self.uses[block] + 1)
            return
        self.main[block] = block in self.ghosts
        self.ghosts.pop(block, None)
        self.uses[block] = 0
        self.size[self.main[block]] += 1
        self._enqueue(block)

    def _enqueue(self, block: int) -> None:
        self.clock += 1
        self.last[block] = self.clock

    def queue(self, block: int) -> int:
        """0: small; 1: main."""
        return self.main[block]

    def queues(self) -> Sequence[int]:
        """The small queue first while it is over its share."""
        return (0, 1) if self.size[0] >= self.small * self.capacity else (1, 0)

    def spares(self, block: int) -> bool:
        """A block that was used goes to the main queue, or to its end with one use less."""
        if not self.main[block] and self.uses[block] > 1:
            self.size[0] -= 1
            self.size[1] += 1
            self.main[block], self.uses[block] = 1, 0
        elif self.main[block] and self.uses[block]:
            self.uses[block] -= 1
        else:
            return False
        self._enqueue(block)
        return True

    def forget(self, block: int) -> None:
        """Blocks that leave the small queue are remembered as ghosts."""
        self.size[self.main[block]] -= 1
        if not self.main[block]:
            self.ghosts[block] = None
            while len(self.ghosts) > (1 - self.small) * self.capacity:
                self.ghosts.popitem(last=False)
