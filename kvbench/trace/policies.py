"""Eviction policies: which leaf of the prefix tree goes first."""

from __future__ import annotations

import bisect
import heapq
import math
import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from kvbench.errors import UserError
from kvbench.trace.requests import Request, Trace


@dataclass(kw_only=True)
class Policy:
    """Ranks blocks for eviction; the cache evicts the leaf with the lowest key. The base evicts the least recent one.

    An object serves one simulation. Fields are settings; state is made by `prepare`.
    """

    name: ClassVar[str] = "lru"
    source: ClassVar[str] = ""
    """Paper and section."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Fields of a request without which the policy means nothing."""
    offline: ClassVar[bool] = False
    """Whether it looks at later requests."""
    bypasses: ClassVar[bool] = False
    """Whether blocks of the request that is served may go at once."""
    expires: ClassVar[bool] = False

    @property
    def settings(self) -> dict[str, Any]:
        """The settings by name."""
        return {x.name: getattr(self, x.name) for x in fields(self)}

    def prepare(self, trace: Trace, capacity: float) -> None:
        """Make the state.

        Raises:
            UserError: the trace lacks a field that the policy needs.
        """
        for name in self.needs:
            if not trace.has(name):
                raise UserError(
                    f"policy '{self.name}' needs the field {name}, and trace {trace.name} has none. "
                    "Choose another policy or a trace with it: see `kvbench trace list`."
                )
        self.last = [0.0] * len(trace.parents)
        self.capacity = capacity

    def touch(self, block: int, index: int, request: Request, *, new: bool) -> None:
        """A request uses a block; new: it is stored by this request."""
        del request, new
        self.last[block] = index

    def served(self, index: int, request: Request) -> None:
        """All blocks of a request were touched."""

    def key(self, block: int) -> Any:
        """The priority of a block; the lowest goes first."""
        return self.last[block]

    def queue(self, block: int) -> int:
        """The queue that a block is ranked in."""
        del block
        return 0

    def queues(self) -> Sequence[int]:
        """Queues in the order in which victims are looked for."""
        return (0,)

    def spares(self, block: int) -> bool:
        """Whether the first leaf of its queue gets another chance."""
        del block
        return False

    def protects(self, block: int, now: float) -> bool:
        """Whether a block may not be evicted yet."""
        del block, now
        return False

    def expired(self, block: int, now: float) -> bool:
        """Whether a block is dropped although there is room."""
        del block, now
        return False

    def changed(self, now: float) -> Iterable[int]:
        """Blocks whose key has changed without a touch."""
        del now
        return ()

    def goal(self, used: int, capacity: float) -> float:
        """Blocks to evict down to."""
        del used
        return capacity

    def forget(self, block: int) -> None:
        """A block was dropped."""


@dataclass(kw_only=True)
class LRU(Policy):
    """Least recently used."""


@dataclass(kw_only=True)
class FIFO(Policy):
    """First stored, first evicted."""

    name: ClassVar[str] = "fifo"

    def touch(self, block: int, index: int, request: Request, *, new: bool) -> None:
        """Only storing counts."""
        if new:
            self.last[block] = index


@dataclass(kw_only=True)
class LFU(Policy):
    """Least frequently used since it was stored; of equals the least recent."""

    name: ClassVar[str] = "lfu"

    def prepare(self, trace: Trace, capacity: float) -> None:
        """Counts by block."""
        super().prepare(trace, capacity)
        self.count = [0] * len(trace.parents)

    def touch(self, block: int, index: int, request: Request, *, new: bool) -> None:
        """Count from the time when it was stored."""
        self.count[block] = 1 if new else self.count[block] + 1
        self.last[block] = index

    def key(self, block: int) -> Any:
        """Uses, then recency."""
        return self.count[block], self.last[block]


@dataclass(kw_only=True)
class Random(Policy):
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
class ARC(Policy):
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

    def touch(self, block: int, index: int, request: Request, *, new: bool) -> None:
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
class S3FIFO(Policy):
    """Three FIFO queues: a small one for new blocks, a main one, and ghosts."""

    name: ClassVar[str] = "s3-fifo"
    source: ClassVar[str] = "Yang et al., SOSP 2023, algorithm 1; victims are the oldest leaf of the chosen queue"

    small: float = 0.1
    """Share of the capacity for new blocks."""

    def prepare(self, trace: Trace, capacity: float) -> None:
        """Queues by flag, uses capped at 3, ghosts."""
        super().prepare(trace, capacity)
        self.main = bytearray(len(trace.parents))
        self.uses = bytearray(len(trace.parents))
        self.size = [0, 0]
        self.ghosts: OrderedDict[int, None] = OrderedDict()
        self.clock = 0

    def touch(self, block: int, index: int, request: Request, *, new: bool) -> None:
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


@dataclass(kw_only=True)
class Optimum(Policy):
    """Evicts the block whose next use is farthest away; it may leave a prompt's own end out. An upper bound.

    It is optimal where requests end before the next one arrives; with running requests pinned it is a heuristic.
    """

    name: ClassVar[str] = "optimum"
    source: ClassVar[str] = "Belady 1966; with pinned requests as in section C3 of the card"
    offline: ClassVar[bool] = True
    bypasses: ClassVar[bool] = True

    def prepare(self, trace: Trace, capacity: float) -> None:
        """The next use of every reference."""
        super().prepare(trace, capacity)
        self.next_uses = find_next_uses(trace)
        self.following = [math.inf] * len(trace.parents)
        self.reference = 0

    def touch(self, block: int, index: int, request: Request, *, new: bool) -> None:
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
class Succinct(Policy):
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

    def touch(self, block: int, index: int, request: Request, *, new: bool) -> None:
        """Read the bit."""
        self.last[block] = index
        self.discard[block] = self.bits[self.reference]
        self.reference += 1

    def key(self, block: int) -> Any:
        """Blocks to discard first, then by recency."""
        return not self.discard[block], self.last[block]


def find_discards(trace: Trace, capacity: float) -> list[bool]:
    """For each block reference, whether the optimum evicts the block before its next use."""
    from kvbench.trace.cache import PrefixCache  # the cache is built on policies

    class Recorder(Optimum):
        def touch(self, block: int, index: int, request: Request, *, new: bool) -> None:
            latest[block] = self.reference
            super().touch(block, index, request, new=new)

        def forget(self, block: int) -> None:
            discards[latest[block]] = True

    discards = [False] * trace.references
    latest = [0] * len(trace.parents)
    recorder = Recorder()
    recorder.prepare(trace, capacity)
    cache = PrefixCache(trace, capacity, recorder)
    for index, request in enumerate(trace.requests):
        cache.serve(index, request)
    return discards


@dataclass(kw_only=True)
class TailLRU(Policy):
    """LRU that first evicts what a conversation can lose without a slow next turn.

    The last blocks of a conversation, up to `threshold` tokens less the expected new tokens, are computed again fast
    enough.
    """

    name: ClassVar[str] = "t-lru"
    source: ClassVar[str] = "Tail-Optimized LRU, arXiv 2510.15152; threshold and expected tokens are settings"
    needs: ClassVar[tuple[str, ...]] = ("session",)

    threshold: int = 2048
    """Uncached tokens with which the next turn is still fast enough."""
    expected: int = 256
    """New tokens expected in the next turn."""

    def prepare(self, trace: Trace, capacity: float) -> None:
        """A flag by block."""
        super().prepare(trace, capacity)
        self.safe = bytearray(len(trace.parents))
        self.tokens = trace.block_tokens or 1

    def served(self, index: int, request: Request) -> None:
        """Flag the end of the conversation."""
        spare = max(0, self.threshold - self.expected) // self.tokens
        cut = max(0, len(request.blocks) - spare)
        for place, block in enumerate(request.blocks):
            self.safe[block] = place >= cut

    def key(self, block: int) -> Any:
        """What can be lost first, then by recency."""
        return not self.safe[block], self.last[block]


@dataclass(kw_only=True)
class FixedTTL(Policy):
    """Drops a block that was not used for a fixed time; least recently used where room is short before."""

    name: ClassVar[str] = "ttl"
    expires: ClassVar[bool] = True

    seconds: float = 300.0

    def prepare(self, trace: Trace, capacity: float) -> None:
        """Times of last use."""
        super().prepare(trace, capacity)
        if self.seconds <= 0:
            raise UserError(f"policy 'ttl': seconds {self.seconds} must be above 0.")

    def touch(self, block: int, index: int, request: Request, *, new: bool) -> None:
        """Note the time."""
        self.last[block] = request.time

    def expired(self, block: int, now: float) -> bool:
        """Whether its time is over."""
        return self.last[block] + self.seconds <= now


@dataclass(kw_only=True)
class Continuum(Policy):
    """Keeps a program's blocks through a tool call, for the time that is expected to pay.

    tau* = argmax over tau of P(duration <= tau) (eta T + reload) - tau, P the durations of this tool seen so far.
    """

    name: ClassVar[str] = "continuum"
    source: ClassVar[str] = "Continuum, arXiv 2511.02230; queueing time T is a setting, 0: unknown in a trace"
    needs: ClassVar[tuple[str, ...]] = ("tool", "tool_seconds")

    cold: float = 2.0
    """Seconds where fewer than `least` durations of a tool were seen."""
    least: int = 10
    eta: float = 1.0
    waiting: float = 0.0
    """T, seconds in the queue after an eviction."""
    seconds_per_token: float = 1e-4
    """Of prefill: a declared model."""

    def prepare(self, trace: Trace, capacity: float) -> None:
        """Durations by tool; ends of protection by block."""
        super().prepare(trace, capacity)
        self.durations: dict[str, list[float]] = {}
        self.until = [0.0] * len(trace.parents)
        self.now = 0.0
        self.pending: list[tuple[float, int]] = []

    def served(self, index: int, request: Request) -> None:
        """Protect the end of the prompt for as long as it pays."""
        self.now = request.time
        if request.tool is None or not request.blocks:
            return
        seen = self.durations.setdefault(request.tool, [])
        keep = self.cold if len(seen) < self.least else self._best(seen, request.input_tokens)
        end = request.blocks[-1]
        self.until[end] = request.time + (request.seconds or 0.0) + keep
        heapq.heappush(self.pending, (self.until[end], end))
        if request.tool_seconds is not None:
            bisect.insort(seen, request.tool_seconds)

    def _best(self, seen: list[float], tokens: int) -> float:
        gain = self.eta * self.waiting + tokens * self.seconds_per_token
        value, best = 0.0, 0.0
        for count, tau in enumerate(seen, 1):
            if count / len(seen) * gain - tau > value:
                value, best = count / len(seen) * gain - tau, tau
        return best

    def changed(self, now: float) -> Iterable[int]:
        """Blocks whose protection has ended."""
        self.now = now
        while self.pending and self.pending[0][0] <= now:
            yield heapq.heappop(self.pending)[1]

    def key(self, block: int) -> Any:
        """Protected blocks last."""
        return self.until[block] > self.now, self.last[block]


@dataclass(kw_only=True)
class KVFlow(Policy):
    """Evicts prompts' own ends first, then fixed prefixes of the agents whose next run is farthest away."""

    name: ClassVar[str] = "kvflow"
    source: ClassVar[str] = "KVFlow, section 3: steps to execution, the least over the agents that share a block"
    needs: ClassVar[tuple[str, ...]] = ("agent", "upcoming")

    def prepare(self, trace: Trace, capacity: float) -> None:
        """Agents by block and steps by (workflow, agent)."""
        super().prepare(trace, capacity)
        self.agents: dict[int, set[str]] = {}
        self.ends: dict[str, int] = {}
        self.steps: dict[str, dict[str, int]] = {}
        self.renewed: set[int] = set()

    def touch(self, block: int, index: int, request: Request, *, new: bool) -> None:
        """Note recency."""
        self.last[block] = index

    def served(self, index: int, request: Request) -> None:
        """Note the agent's fixed prefix and the steps of all agents of its workflow."""
        if request.agent is None:
            return
        for block in request.blocks[: request.fixed_blocks]:
            self.agents.setdefault(block, set()).add(request.agent)
        if request.fixed_blocks:
            self.ends[request.agent] = request.blocks[request.fixed_blocks - 1]
        ahead: dict[str, int] = {}
        for step, agent in enumerate(request.upcoming or (), 1):
            ahead.setdefault(agent, step)
        self.steps[request.session or ""] = ahead
        self.renewed.update(self.ends[x] for x in ahead if x in self.ends)

    def changed(self, now: float) -> Iterable[int]:
        """Ends of fixed prefixes whose steps have changed."""
        del now
        renewed, self.renewed = self.renewed, set()
        return sorted(renewed)

    def key(self, block: int) -> Any:
        """Own ends first, then the largest number of steps, then recency."""
        agents = self.agents.get(block)
        if not agents:
            return 0, 0.0, self.last[block]
        steps = min((x[agent] for x in self.steps.values() for agent in agents if agent in x), default=math.inf)
        return 1, -steps, self.last[block]


@dataclass(kw_only=True)
class SAGA(Policy):
    """Recency in units of a horizon, plus the share of a tool's requests that were reused, less the prompt's size.

    The paper names these three terms; its code is not published, so weights and horizon are settings of ours.
    """

    name: ClassVar[str] = "saga"
    source: ClassVar[str] = "SAGA, arXiv 2605.00528, WA-LRU; weights unverified"
    needs: ClassVar[tuple[str, ...]] = ("tool", "session")

    horizon: float = 60.0
    reuse: float = 1.0
    size: float = 0.1

    def prepare(self, trace: Trace, capacity: float) -> None:
        """Requests and reuses by tool."""
        super().prepare(trace, capacity)
        self.made: dict[str, int] = {}
        self.reused: dict[str, int] = {}
        self.open: dict[str, str] = {}
        self.bonus = [0.0] * len(trace.parents)

    def touch(self, block: int, index: int, request: Request, *, new: bool) -> None:
        """Note the time."""
        self.last[block] = request.time

    def served(self, index: int, request: Request) -> None:
        """Count a reuse of the session's last tool, and give the prompt's blocks their terms."""
        session, tool = request.session or "", request.tool or "none"
        if (before := self.open.get(session)) is not None:
            self.reused[before] = self.reused.get(before, 0) + 1
        self.open[session] = tool
        self.made[tool] = self.made.get(tool, 0) + 1
        chance = (self.reused.get(tool, 0) + 1) / (self.made[tool] + 2)
        share = len(request.blocks) / self.capacity if math.isfinite(self.capacity) else 0.0
        for block in request.blocks:
            self.bonus[block] = self.reuse * chance - self.size * share

    def key(self, block: int) -> Any:
        """The sum of the terms; recency alone moves with time, and for all blocks alike."""
        return self.last[block] / self.horizon + self.bonus[block]


@dataclass(kw_only=True)
class MooncakeStore(Policy):
    """Evicts a share of the store at a high watermark, least recent first; recently read blocks are leased."""

    name: ClassVar[str] = "mooncake-store"
    source: ClassVar[str] = "Mooncake store's defaults: watermark 90 %, 5 % a pass, lease 10 s; no soft pins in a trace"

    watermark: float = 0.9
    step: float = 0.05
    lease: float = 10.0

    def touch(self, block: int, index: int, request: Request, *, new: bool) -> None:
        """Note the time."""
        self.last[block] = request.time

    def goal(self, used: int, capacity: float) -> float:
        """Nothing below the watermark; a whole pass above it."""
        return used - self.step * capacity if used > self.watermark * capacity else math.inf

    def protects(self, block: int, now: float) -> bool:
        """A lease that still runs."""
        return self.last[block] + self.lease > now


POLICIES: dict[str, type[Policy]] = {
    x.name: x for x in (
        LRU, FIFO, LFU, ARC, S3FIFO, Random, Optimum, Succinct, TailLRU, FixedTTL, Continuum, KVFlow, SAGA,
        MooncakeStore,
    )
}


def order_by_prefix(trace: Trace) -> list[int]:
    """BatchLLM's order of an offline batch: depth first through the prefix tree, so that equal prefixes are together.

    Source: BatchLLM, section 4. With room for the longest prompt LRU then reaches the hit rate of an infinite cache.
    """
    first: dict[int, int] = {}
    for request in trace.requests:
        for block in request.blocks:
            first.setdefault(block, len(first))
    return sorted(range(len(trace.requests)), key=lambda i: tuple(first[x] for x in trace.requests[i].blocks))
