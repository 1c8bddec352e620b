"""Memory of running requests under allocation schemes: reserved and used room, contiguous copies, rejected requests."""

from __future__ import annotations

import bisect
import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvbench.errors import MOST_INSTANCES, check_number, unknown
from kvbench.trace.requests import Trace

Held = TypeVar("Held")
PAGE = 16
"""Tokens of a page in the schemes below that use pages."""
RESERVED = 16_384
"""Tokens that a contiguous scheme reserves for every request."""
LAYER_TOKEN_BYTES = 2048
"""Keys (or values) of one token in one layer: 8 heads of 128 in 16 bits."""
MOST_PAGES = 10_000_000
GROUP_BYTES = (64 << 10, 2 << 20)
"""vAttention's page groups: 64 KiB and 2 MiB of one layer's keys or values."""


@dataclass(frozen=True)
class Waste:
    """One scheme over all requests of a trace, each at its full length."""

    scheme: str
    share: float
    """Reserved room that is never used."""


def measure_waste(trace: Trace) -> list[Waste]:
    """Internal fragmentation by scheme. trace: lengths are enough."""
    lengths = [x.input_tokens + x.output_tokens for x in trace.requests]
    schemes: list[tuple[str, Callable[[int], int]]] = [
        (f"contiguous, {RESERVED:,} tokens", lambda n: max(n, RESERVED)),
        ("contiguous, next power of two", lambda n: 1 << max(0, n - 1).bit_length()),
        (f"paged, {PAGE} tokens", lambda n: -(-n // PAGE) * PAGE),
        *(
            (f"page groups of {size >> 10:,} KiB", lambda n, page=size // LAYER_TOKEN_BYTES: -(-n // page) * page)
            for size in GROUP_BYTES
        ),
    ]
    return [Waste(name, 1 - sum(lengths) / max(1, sum(map(reserve, lengths)))) for name, reserve in schemes]


@dataclass(frozen=True)
class Copies:
    """Contiguous copies that moving a request's pages out takes, at the moment when it ends."""

    scheme: str
    copies: float
    """Mean per request."""
    pages: float
    """Mean pages of a copy."""


def count_copies(trace: Trace, pages: int, seconds: tuple[float, float] = (1e-4, 0.02)) -> list[Copies]:
    """Copies under single pages from a queue (vLLM) and under contiguous groups where there are any (FastSwitch).

    Args:
        trace: lengths and arrivals.
        pages: of the pool; a request that does not fit is left out.
        seconds: per prompt and output token, a declared model of how long a request runs.
    """
    check_number("pages", pages, most=MOST_PAGES)
    return [
        _summarize("pages from a queue", _run_pool(trace, seconds, _QueuePool(pages))),
        _summarize("contiguous groups", _run_pool(trace, seconds, _RangePool(pages))),
    ]


def _summarize(scheme: str, runs: Sequence[tuple[int, int]]) -> Copies:
    copies, pages = sum(x[0] for x in runs), sum(x[1] for x in runs)
    return Copies(scheme, copies / max(1, len(runs)), pages / max(1, copies))


class _QueuePool:
    """Free pages in a queue: freed ones go to its end."""

    def __init__(self, pages: int) -> None:
        self.free = deque(range(pages))

    def take(self, count: int) -> list[int] | None:
        return None if count > len(self.free) else [self.free.popleft() for _ in range(count)]

    def give(self, pages: list[int]) -> None:
        self.free.extend(pages)


class _RangePool:
    """Free pages as ranges: the smallest range that fits, or the largest ones one after the other."""

    def __init__(self, pages: int) -> None:
        self.ranges = [(0, pages)]  # (start, count), by start

    def take(self, count: int) -> list[int] | None:
        if sum(x[1] for x in self.ranges) < count:
            return None
        found: list[int] = []
        while count:
            fitting = [x for x in self.ranges if x[1] >= count]
            start, size = min(fitting, key=lambda x: (x[1], x[0])) if fitting else max(
                self.ranges, key=lambda x: (x[1], -x[0])
            )
            taken = min(size, count)
            self.ranges.remove((start, size))
            if size > taken:
                bisect.insort(self.ranges, (start + taken, size - taken))
            found += range(start, start + taken)
            count -= taken
        return found

    def give(self, pages: list[int]) -> None:
        self.ranges = _join(sorted([*self.ranges, *_find_runs(pages)]))


def _find_runs(pages: Sequence[int]) -> list[tuple[int, int]]:
    """Contiguous runs of pages, as (start, count)."""
    return _join((page, 1) for page in sorted(pages))


def _join(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same ranges, as (start, count) in order; those without a gap between them are one."""
    joined: list[tuple[int, int]] = []
    for start, count in ranges:
        if joined and joined[-1][0] + joined[-1][1] == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + count)
        else:
            joined.append((start, count))
    return joined


def _run_pool(
    trace: Trace, seconds: tuple[float, float], pool: _QueuePool | _RangePool
) -> list[tuple[int, int]]:
    """(copies, pages) of every request that ran."""
    return [(len(_find_runs(x)), len(x)) for x in _replay(trace, seconds, pool.take, pool.give) if x]


def _replay(
    trace: Trace, seconds: tuple[float, float], take: Callable[[int], Held | None], give: Callable[[Held], None]
) -> Iterator[Held | None]:
    """Take the pages of each request when it arrives and give them back when it ends; None: there was no room."""
    running: list[tuple[float, int, Held]] = []
    for index, x in enumerate(trace.requests):
        while running and running[0][0] <= x.time:
            give(heapq.heappop(running)[2])
        taken = take(-(-(x.input_tokens + x.output_tokens) // PAGE))
        if taken is not None:
            end = x.time + x.input_tokens * seconds[0] + x.output_tokens * seconds[1]
            heapq.heappush(running, (end, index, taken))
        yield taken


@dataclass(frozen=True)
class Rejections:
    """Requests that found no room."""

    scheme: str
    instances: int
    share: float


def count_rejections(
    trace: Trace, instances: int, pages: int, scheme: str, seconds: tuple[float, float] = (1e-4, 0.02)
) -> Rejections:
    """Serve requests on instances of `pages` pages each; with `borrow` a request may use several (Infinite-LLM).

    Raises:
        UserError: an unknown scheme, or no instance.
    """
    if scheme not in ("own", "borrow"):
        raise unknown("memory scheme", scheme, ("own", "borrow"))
    check_number("instances", instances, most=MOST_INSTANCES)
    check_number("pages", pages, most=MOST_PAGES)
    free = [pages] * instances

    def take(need: int) -> list[tuple[int, int]] | None:
        taken: list[tuple[int, int]] = []
        places = sorted(range(instances), key=lambda i: (-free[i], i))
        for place in places if scheme == "borrow" else places[:1]:
            if need and free[place]:
                taken.append((place, min(need, free[place])))
                need -= taken[-1][1]
        if need:
            return None
        for place, count in taken:
            free[place] -= count
        return taken

    def give(held: list[tuple[int, int]]) -> None:
        for place, count in held:
            free[place] += count

    rejected = sum(x is None for x in _replay(trace, seconds, take, give))
    return Rejections(scheme, instances, rejected / max(1, len(trace.requests)))
