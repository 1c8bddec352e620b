"""The interface of an eviction policy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from kvbench.errors import UserError
from kvbench.trace.requests import Trace, TraceRequest


@dataclass(kw_only=True)
class BlockPolicy:
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

    def touch(self, block: int, index: int, request: TraceRequest, *, new: bool) -> None:
        """A request uses a block; new: it is stored by this request."""
        del request, new
        self.last[block] = index

    def served(self, index: int, request: TraceRequest) -> None:
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
