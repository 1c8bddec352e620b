"""Requests of a trace, and the prefix tree of their prompts."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace

ROOT = -1


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace. Fields that the trace does not have are None."""

    time: float
    """Arrival in seconds after the first request."""
    blocks: tuple[int, ...]
    """Nodes of the prefix tree, from the first block of the prompt on. Empty where the trace has lengths only."""
    input_tokens: int
    output_tokens: int
    session: str | None = None
    """The conversation that the request belongs to."""
    user: str | None = None
    tool: str | None = None
    """The tool that is called after this request."""
    tool_seconds: float | None = None
    """Time from the end of this request to the next one of its session."""
    seconds: float | None = None
    """Time that the request took when it was recorded."""
    agent: str | None = None
    """The agent of a workflow that made the request; its prompt begins with the agent's fixed prefix."""
    fixed_blocks: int = 0
    """Blocks of the agent's fixed prefix."""
    upcoming: tuple[str, ...] | None = None
    """Agents that run next in the same workflow, in order."""


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival, and the prefix tree that their blocks are nodes of."""

    name: str
    requests: tuple[TraceRequest, ...]
    block_tokens: int | None
    """Tokens of a block; None where the trace has lengths only."""
    parents: tuple[int, ...] = ()
    """Parent of each node; ROOT for the first block of a prompt."""

    @property
    def references(self) -> int:
        """Block references of all requests."""
        return sum(len(x.blocks) for x in self.requests)

    @property
    def longest(self) -> int:
        """Blocks of the longest prompt."""
        return max((len(x.blocks) for x in self.requests), default=0)

    def has(self, name: str) -> bool:
        """Whether any request has a field."""
        return any(getattr(x, name) is not None for x in self.requests)

    def reordered(self, order: Iterable[int], name: str) -> Trace:
        """The same requests in another order, one per second."""
        taken = tuple(replace(self.requests[index], time=float(place)) for place, index in enumerate(order))
        return replace(self, name=name, requests=taken)


@dataclass
class PrefixTree:
    """Gives each distinct prefix of blocks a node, so that equal blocks after different prefixes are different."""

    parents: list[int] = field(default_factory=list)
    _nodes: dict[tuple[int, Hashable], int] = field(default_factory=dict)

    def add(self, ids: Sequence[Hashable]) -> tuple[int, ...]:
        """Nodes of a prompt's blocks, from the root on."""
        path = []
        node = ROOT
        for x in ids:
            key = (node, x)
            found = self._nodes.get(key)
            if found is None:
                found = self._nodes[key] = len(self.parents)
                self.parents.append(node)
            node = found
            path.append(node)
        return tuple(path)
