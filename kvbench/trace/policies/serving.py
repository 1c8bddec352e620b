"""Policies of serving systems, which know conversations, tools, workflows and time."""

from __future__ import annotations

import bisect
import heapq
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from kvbench.errors import UserError
from kvbench.trace.policies.base import BlockPolicy
from kvbench.trace.requests import Trace, TraceRequest


@dataclass(kw_only=True)
class TailLRU(BlockPolicy):
    """LRU that first evicts the blocks that a conversation can lose without a slow next turn.

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

    def served(self, index: int, request: TraceRequest) -> None:
        """Flag the end of the conversation."""
        spare = max(0, self.threshold - self.expected) // self.tokens
        cut = max(0, len(request.blocks) - spare)
        for place, block in enumerate(request.blocks):
            self.safe[block] = place >= cut

    def key(self, block: int) -> Any:
        """Blocks that a conversation can lose go first, then the least recent."""
        return not self.safe[block], self.last[block]


@dataclass(kw_only=True)
class TimedPolicy(BlockPolicy):
    """Recency in seconds of the trace instead of requests."""

    def touch(self, block: int, index: int, request: TraceRequest, *, new: bool) -> None:
        """Note the time."""
        self.last[block] = request.time


@dataclass(kw_only=True)
class FixedTTL(TimedPolicy):
    """Drops a block that was not used for a fixed time; least recently used where room is short before."""

    name: ClassVar[str] = "ttl"
    expires: ClassVar[bool] = True

    seconds: float = 300.0

    def prepare(self, trace: Trace, capacity: float) -> None:
        """Check the settings."""
        super().prepare(trace, capacity)
        if self.seconds <= 0:
            raise UserError(f"policy 'ttl': seconds {self.seconds} must be above 0.")

    def expired(self, block: int, now: float) -> bool:
        """Whether its time is over."""
        return self.last[block] + self.seconds <= now


@dataclass(kw_only=True)
class Continuum(BlockPolicy):
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
        """Durations by tool, and those of calls that have not ended; ends of protection by block."""
        super().prepare(trace, capacity)
        self.durations: dict[str, list[float]] = {}
        self.calls: list[tuple[float, str, float]] = []
        self.until = [0.0] * len(trace.parents)
        self.now = 0.0
        self.pending: list[tuple[float, int]] = []

    def served(self, index: int, request: TraceRequest) -> None:
        """Protect the end of the prompt for as long as it pays by the calls that have ended."""
        self.now = request.time
        while self.calls and self.calls[0][0] <= self.now:
            _, tool, seconds = heapq.heappop(self.calls)
            bisect.insort(self.durations.setdefault(tool, []), seconds)
        if request.tool is None or not request.blocks:
            return
        seen = self.durations.get(request.tool, [])
        keep = self.cold if len(seen) < self.least else self._best(seen, request.input_tokens)
        end, start = request.blocks[-1], request.time + (request.seconds or 0.0)  # of the call
        self.until[end] = start + keep
        heapq.heappush(self.pending, (self.until[end], end))
        if request.tool_seconds is not None:
            heapq.heappush(self.calls, (start + request.tool_seconds, request.tool, request.tool_seconds))

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
class KVFlow(BlockPolicy):
    """Evicts prompts' own ends first, then fixed prefixes of the agents whose next run is farthest away."""

    name: ClassVar[str] = "kvflow"
    source: ClassVar[str] = "KVFlow, section 3: steps to execution, the least over the agents that share a block"
    needs: ClassVar[tuple[str, ...]] = ("agent", "upcoming")

    def prepare(self, trace: Trace, capacity: float) -> None:
        """Agents by block and steps by (workflow, agent)."""
        super().prepare(trace, capacity)
        self.agents: dict[int, set[str]] = {}
        self.prefixes: dict[str, tuple[int, ...]] = {}
        self.steps: dict[str, dict[str, int]] = {}
        self.renewed: set[int] = set()

    def served(self, index: int, request: TraceRequest) -> None:
        """Note the agent's fixed prefix and the steps of all agents of its workflow."""
        if request.agent is None:
            return
        for block in request.blocks[: request.fixed_blocks]:
            self.agents.setdefault(block, set()).add(request.agent)
        if request.fixed_blocks:
            self.prefixes[request.agent] = request.blocks[: request.fixed_blocks]
        ahead: dict[str, int] = {}
        for step, agent in enumerate(request.upcoming or (), 1):
            ahead.setdefault(agent, step)
        before = self.steps.get(request.session or "", {})
        self.steps[request.session or ""] = ahead
        self.renewed.update(block for x in (*before, *ahead) for block in self.prefixes.get(x, ()))

    def changed(self, now: float) -> Iterable[int]:
        """Blocks of fixed prefixes whose steps have changed; the end of one may have been evicted."""
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
class SAGA(TimedPolicy):
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
        if self.horizon <= 0:
            raise UserError(f"policy 'saga': horizon {self.horizon} must be above 0.")
        self.made: Counter[str] = Counter()
        self.reused: Counter[str] = Counter()
        self.open: dict[str, str] = {}
        self.bonus = [0.0] * len(trace.parents)

    def served(self, index: int, request: TraceRequest) -> None:
        """Count a reuse of the session's last tool, and give the prompt's blocks their terms."""
        session, tool = request.session or "", request.tool or "none"
        if (before := self.open.get(session)) is not None:
            self.reused[before] += 1
        self.open[session] = tool
        self.made[tool] += 1
        chance = (self.reused[tool] + 1) / (self.made[tool] + 2)
        share = len(request.blocks) / self.capacity if math.isfinite(self.capacity) else 0.0
        for block in request.blocks:
            self.bonus[block] = self.reuse * chance - self.size * share

    def key(self, block: int) -> Any:
        """The sum of the terms; recency alone moves with time, and for all blocks alike."""
        return self.last[block] / self.horizon + self.bonus[block]


@dataclass(kw_only=True)
class MooncakeStore(TimedPolicy):
    """Evicts a share of the store at a high watermark, least recent first; recently read blocks are leased."""

    name: ClassVar[str] = "mooncake-store"
    source: ClassVar[str] = "Mooncake store's defaults: watermark 90 %, 5 % a pass, lease 10 s; no soft pins in a trace"

    watermark: float = 0.9
    step: float = 0.05
    lease: float = 10.0

    def prepare(self, trace: Trace, capacity: float) -> None:
        """Check the settings."""
        super().prepare(trace, capacity)
        for name, value in (("watermark", self.watermark), ("step", self.step)):
            if not 0 < value <= 1:
                raise UserError(f"policy 'mooncake-store': {name} {value} must be above 0, and 1 at most.")

    def goal(self, used: int, capacity: float) -> float:
        """Nothing below the watermark; a whole pass above it."""
        return used - self.step * capacity if used > self.watermark * capacity else math.inf

    def protects(self, block: int, now: float) -> bool:
        """A lease that still runs."""
        return self.last[block] + self.lease > now
