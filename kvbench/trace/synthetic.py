"""A trace of our own: tenants with shared prefixes, conversations that grow, bursts, and workflows of agents.

Parameters follow published statistics: median input of some thousand tokens and output of some hundred (Mooncake,
FAST 2025, section 4), arrivals in bursts with a gamma shape below 1 (BurstGPT), and conversations of a few turns with
think times of a minute or two. They are parameters, not measurements.
"""

from __future__ import annotations

import random
from collections.abc import Hashable
from dataclasses import dataclass

from kvbench.trace.requests import PrefixTree, Trace, TraceRequest


@dataclass(frozen=True)
class Workload:
    """Parameters of the generator."""

    sessions: int = 800
    block_tokens: int = 512
    tenants: int = 8
    prefix_blocks: int = 4
    """Mean blocks of a tenant's system prompt; the first one is common to all tenants."""
    popularity: float = 1.1
    """Zipf exponent of tenants."""
    turns: float = 4.0
    """Mean turns of a conversation, geometric."""
    growth: float = 1500.0
    """Mean new tokens a turn, the user's and the tool's."""
    answer: float = 300.0
    """Mean output tokens."""
    think: float = 60.0
    """Mean seconds between the turns of a conversation."""
    rate: float = 0.5
    """New conversations per second, the mean."""
    shape: float = 0.5
    """Gamma shape of the times between conversations; below 1: bursts."""
    agents: int = 4
    """Agents of a workflow; half of the conversations are workflows that run their agents in turn."""


def make_trace(seed: int = 0, workload: Workload | None = None) -> Trace:
    """A trace from a seed; the same seed makes the same trace."""
    x = workload or Workload()
    draw = random.Random(seed)
    weights = [1 / (i + 1) ** x.popularity for i in range(x.tenants)]
    tree = PrefixTree()
    found: list[TraceRequest] = []
    start = 0.0
    for number in range(x.sessions):
        start += draw.gammavariate(x.shape, 1 / (x.rate * x.shape))
        tenant = draw.choices(range(x.tenants), weights)[0]
        found += _converse(draw, x, tree, number, tenant, start)
    found.sort(key=lambda request: request.time)
    return Trace("synthetic", tuple(found), x.block_tokens, tuple(tree.parents))


def _converse(
    draw: random.Random, x: Workload, tree: PrefixTree, number: int, tenant: int, start: float
) -> list[TraceRequest]:
    """The requests of one conversation."""
    workflow = number % 2 == 1
    turns = 1
    while draw.random() > 1 / x.turns:
        turns += 1
    prefix = 1 + int(draw.expovariate(1 / x.prefix_blocks)) if not workflow else x.prefix_blocks
    agents = [f"tenant{tenant}-agent{i}" for i in range(x.agents)]
    tokens = prefix * x.block_tokens
    time = start
    requests = []
    for turn in range(turns):
        agent = agents[turn % x.agents] if workflow else None
        tokens += 1 + int(draw.expovariate(1 / x.growth))
        output = 1 + int(draw.expovariate(1 / x.answer))
        think = draw.expovariate(1 / x.think)
        head: list[Hashable] = ["common", *((agent or f"tenant{tenant}", i) for i in range(prefix - 1))]
        own: list[Hashable] = [(number, i) for i in range(tokens // x.block_tokens - prefix)]
        last = turn + 1 == turns
        requests.append(TraceRequest(
            time=time, blocks=tree.add([*head, *own]), input_tokens=tokens, output_tokens=output,
            session=f"s{number}", user=f"tenant{tenant}", tool=None if last else f"tool{number % 3}",
            tool_seconds=None if last else think, seconds=output * 0.02, agent=agent,
            fixed_blocks=prefix if workflow else 0,
            upcoming=tuple(agents[t % x.agents] for t in range(turn + 1, turns)) if workflow else None,
        ))
        tokens += output
        time += output * 0.02 + think
    return requests
