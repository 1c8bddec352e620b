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
    """A random leaf, each with the same probability."""

    name: ClassVar[str] = "random"

    seed: int = 0

    def prepare(self, trace: Trace, capacity: float) -> None:
        """A generator of its own."""
        super().prepare(trace, capacity)
        self.random = random.Random(self.seed)
        self.clock = 0.0

    def key(self, block: int) -> Any:
        """The time at which it would go: exponential, so that its age does not matter to the choice."""
        self.last[block] = self.clock + self.random.expovariate(1.0)
        return self.last[block]

    def spares(self, block: int) -> bool:
        """It goes now: those that stay have drawn later times, and later ones draw from now on."""
        self.clock = self.last[block]
        return False


@dataclass(kw_only=True)
class TwoQueues(BlockPolicy):
    """Blocks in two queues; the first one gives a victim if it is large enough before a request's blocks arrive."""

    def prepare(self, trace: Trace, capacity: float) -> None:
        """The queue of each block, and the queues' sizes."""
        super().prepare(trace, capacity)
        self.second = bytearray(len(trace.parents))
        self.size = [0, 0]
        self._request = self._arrived = 0

    def queue(self, block: int) -> int:
        """0: the first queue; 1: the second."""
        return self.second[block]

    def arrive(self, block: int, index: int, *, second: bool) -> None:
        """A request stores a block in a queue."""
        if index != self._request:
            self._request, self._arrived = index, 0
        self._arrived += not second
        self.second[block] = second
        self.size[second] += 1

    def promote(self, block: int) -> None:
        """Move a block to the second queue."""
        self.second[block] = 1
        self.size[0] -= 1
        self.size[1] += 1

    @property
    def before(self) -> int:
        """Blocks in the first queue without those that the request has stored."""
        return self.size[0] - self._arrived

    def forget(self, block: int) -> None:
        """It leaves its queue."""
        self.size[self.second[block]] -= 1


@dataclass(kw_only=True)
class ARC(TwoQueues):
    """Adaptive replacement: once-used and repeatedly used blocks in two lists, whose sizes follow ghost hits."""

    name: ClassVar[str] = "arc"
    source: ClassVar[str] = "Megiddo and Modha, FAST 2003, figure 4; victims are the oldest leaf of the chosen list"

    def prepare(self, trace: Trace, capacity: float) -> None:
        """Two ghost lists, and the size that the list of once-used blocks should have."""
        super().prepare(trace, capacity)
        self.ghosts: tuple[OrderedDict[int, None], OrderedDict[int, None]] = (OrderedDict(), OrderedDict())
        self.target = 0.0
        self.was_often = False

    def touch(self, block: int, index: int, request: TraceRequest, *, new: bool) -> None:
        """Move between the lists, and move the target on a ghost hit."""
        self.last[block] = index
        once, often = self.ghosts
        self.was_often = block in often
        if not new:
            if not self.second[block]:
                self.promote(block)
        elif block in once:
            self.target = min(self.capacity, self.target + max(1.0, len(often) / len(once)))
            del once[block]
            self.arrive(block, index, second=True)
        elif block in often:
            self.target = max(0.0, self.target - max(1.0, len(once) / len(often)))
            del often[block]
            self.arrive(block, index, second=True)
        else:
            self.arrive(block, index, second=False)

    def queues(self) -> Sequence[int]:
        """The list that is above its target first, or at it if the last block is a ghost of the other list."""
        above = self.before > self.target or (self.was_often and self.before == self.target)
        return (0, 1) if self.before and above else (1, 0)

    def forget(self, block: int) -> None:
        """Remember it as a ghost: of once-used blocks as many as the cache has room for, of all blocks twice."""
        super().forget(block)
        once, often = self.ghosts
        self.ghosts[self.second[block]][block] = None
        while once and self.size[0] + len(once) > self.capacity:
            once.popitem(last=False)
        while often and sum(self.size) + len(once) + len(often) > 2 * self.capacity:
            often.popitem(last=False)


@dataclass(kw_only=True)
class S3FIFO(TwoQueues):
    """Three FIFO queues: a small one for new blocks, a main one, and ghosts."""

    name: ClassVar[str] = "s3-fifo"
    source: ClassVar[str] = "Yang et al., SOSP 2023, algorithm 1; victims are the oldest leaf of the chosen queue"

    small: float = 0.1
    """Share of the capacity for new blocks."""

    def prepare(self, trace: Trace, capacity: float) -> None:
        """Uses capped at 3, ghosts."""
        super().prepare(trace, capacity)
        if not 0 <= self.small <= 1:
            raise UserError(f"policy 's3-fifo': small {self.small} must be from 0 to 1.")
        self.uses = bytearray(len(trace.parents))
        self.ghosts: OrderedDict[int, None] = OrderedDict()
        self.clock = 0

    def touch(self, block: int, index: int, request: TraceRequest, *, new: bool) -> None:
        """A ghost goes to the main queue; a hit only counts."""
        if not new:
            self.uses[block] = min(3, self.uses[block] + 1)
            return
        self.arrive(block, index, second=block in self.ghosts)
        self.ghosts.pop(block, None)
        self.uses[block] = 0
        self._enqueue(block)

    def _enqueue(self, block: int) -> None:
        self.clock += 1
        self.last[block] = self.clock

    def queues(self) -> Sequence[int]:
        """The small queue first while it is over its share."""
        return (0, 1) if self.before >= self.small * self.capacity else (1, 0)

    def spares(self, block: int) -> bool:
        """A block that was used goes to the main queue, or to its end with one use less."""
        if not self.second[block] and self.uses[block] > 1:
            self.promote(block)
            self.uses[block] = 0
        elif self.second[block] and self.uses[block]:
            self.uses[block] -= 1
        else:
            return False
        self._enqueue(block)
        return True

    def forget(self, block: int) -> None:
        """Blocks that leave the small queue are remembered as ghosts."""
        super().forget(block)
        if not self.second[block]:
            self.ghosts[block] = None
            while len(self.ghosts) > (1 - self.small) * self.capacity:
                self.ghosts.popitem(last=False)
