"""The board of trace simulations: hit rates by policy and capacity, apart from all runs of models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from kvbench.errors import first_line
from kvbench.leaderboard.site.charts import LEFT, RIGHT, TOP, Curve, Point, make_curves
from kvbench.runs.spec import Record

Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0)]
HEIGHT = 220.0
MOST_ROWS = 1000


class TraceRow(Record):
    """One policy at one capacity."""

    policy: str
    settings: dict[str, str | int | float | bool]
    blocks: Count | None
    """Capacity; null: infinite."""
    gigabytes: float | None
    block: Share
    low: Share
    high: Share
    token: Share
    request: Share
    reused_tokens: Count
    of_optimum: float
    evictions: Count
    rejected: Count


class TraceTable(Record):
    """results/trace/NAME.json: the last line of `kvbench trace run --json`."""

    kind: Literal["trace simulation"]
    trace: str
    order: str
    model: str
    rows: tuple[TraceRow, ...] = Field(max_length=MOST_ROWS)

    @cached_property
    def capacities(self) -> tuple[int, ...]:
        """Finite capacities, smallest first."""
        return tuple(sorted({x.blocks for x in self.rows if x.blocks}))

    def ordered(self) -> list[TraceRow]:
        """Rows by capacity, the best block hit rate first; infinite capacity last."""
        return sorted(self.rows, key=lambda x: (math.inf if x.blocks is None else x.blocks, -x.block, x.policy))


@dataclass(frozen=True)
class TraceBoard:
    """One trace with its chart."""

    table: TraceTable
    curves: tuple[Curve, ...]
    ticks: tuple[tuple[float, str], ...]
    levels: tuple[tuple[float, str], ...]
    height: float = HEIGHT


@dataclass(frozen=True)
class Traces:
    """The boards of a results folder."""

    boards: tuple[TraceBoard, ...]
    problems: tuple[str, ...]
    """Reasons why files are not shown."""


def read_traces(results: Path) -> Traces:
    """Read the trace simulations of a results folder."""
    tables, problems = [], []
    for path in sorted((results / "trace").glob("*.json")):
        try:
            tables.append(TraceTable.model_validate_json(path.read_bytes()))
        except (OSError, ValidationError) as error:
            problems.append(f"{path.name} is not what `kvbench trace run --json` prints: {first_line(error)}")
    names = sorted({x.policy for table in tables for x in table.rows})
    return Traces(tuple(draw_trace(x, names) for x in tables), tuple(problems))


def draw_trace(table: TraceTable, names: Sequence[str]) -> TraceBoard:
    """Place every policy's hit rates on a logarithmic axis of capacity.

    names: of the policies of all traces; a policy's place among them decides its color and marker.
    """
    sizes = table.capacities
    top = max((x.high for x in table.rows), default=1.0) or 1.0

    def across(blocks: int) -> float:
        span = math.log(sizes[-1] / sizes[0]) or 1.0
        return round(LEFT + (RIGHT - LEFT) * math.log(blocks / sizes[0]) / span, 1)

    def up(rate: float) -> float:
        return round(TOP + HEIGHT * (1 - rate / top), 1)

    policies: dict[str, list[Point]] = {}
    for x in table.ordered():
        if x.blocks:
            policies.setdefault(x.policy, []).append(Point(across(x.blocks), up(x.block), up(x.low), up(x.high)))
    return TraceBoard(
        table, make_curves(dict(sorted(policies.items())), HEIGHT, names),
        tuple((across(x), _shorten(x)) for x in _few(sizes)),
        tuple((up(x), f"{x:.2f}") for x in (0.0, top / 2, top)),
    )


def _few(sizes: Sequence[int]) -> tuple[int, ...]:
    """First, middle and last capacity, whose labels do not collide."""
    return tuple(dict.fromkeys((sizes[0], sizes[len(sizes) // 2], sizes[-1]))) if sizes else ()


def _shorten(blocks: int) -> str:
    return f"{blocks / 1000:.3g}k" if blocks >= 1000 else str(blocks)
