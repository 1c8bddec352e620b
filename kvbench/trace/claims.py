"""Published statements next to the values of a trace, with the definition that was used."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from pathlib import Path

from kvbench.trace.cache import simulate
from kvbench.trace.measures import measure, read_capacity
from kvbench.trace.memory import measure_waste
from kvbench.trace.policies import LRU, order_by_prefix
from kvbench.trace.requests import Trace

FILE = Path(__file__).with_name("claims.toml")
KNOWN_MISMATCH = "known-mismatch"
EXACT = 0.0101


@dataclass(frozen=True)
class TraceClaim:
    """A statement of a paper. Either a value with a tolerance, or a bound."""

    id: str
    source: str
    trace: str
    measure: str
    blocks: str
    note: str
    value: float | None = None
    within: float = 0.0
    least: float | None = None
    most: float | None = None

    def judge(self, found: float) -> str:
        """`reproduced` (to the last digit that papers print, 0.01), `close`, `shape holds` or `differs`."""
        if self.value is not None:
            away = abs(found - self.value)
            return "reproduced" if away <= min(EXACT, self.within) else "close" if away <= self.within else "differs"
        low, high = -math.inf if self.least is None else self.least, math.inf if self.most is None else self.most
        return "shape holds" if low <= found <= high else "differs"


def list_claims() -> list[TraceClaim]:
    """All statements of the file."""
    return [TraceClaim(**x) for x in tomllib.loads(FILE.read_text(encoding="utf-8"))["claim"]]


def evaluate(claim: TraceClaim, trace: Trace) -> float:
    """The number that the trace gives under the claim's definition."""
    if claim.measure.startswith("waste:"):
        wanted = claim.measure.removeprefix("waste:")
        return next(x.share for x in measure_waste(trace) if x.scheme == wanted)
    infinite = measure(trace, simulate(trace, LRU(), math.inf))
    if claim.measure == "ordered-less-infinite":
        ordered = trace.reordered(order_by_prefix(trace), trace.name)
        return measure(ordered, simulate(ordered, LRU(), trace.longest)).block - infinite.block
    found = measure(trace, simulate(trace, LRU(), read_capacity(claim.blocks, trace)))
    if claim.measure == "share-of-infinite":
        return found.block / infinite.block
    return found.request if claim.measure == "request" else found.token
