"""What `kvbench bench` writes: one file per job, one cell per method, clock, length and batch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from kvbench.bench.forecast import State
from kvbench.runs.journal import CacheBytes
from kvbench.runs.results import Environment
from kvbench.runs.schema import SCHEMA_VERSION
from kvbench.runs.spec import Implementation, MethodSpec, ModelSpec, Record

Clock = Literal["kernel", "step", "user"]
Outcome = Literal["ok", "out of memory", "refused", "failed", "skipped"]
FEW = 5
"""Rounds below which the ends of an interval are no 95 %, but the rounds themselves."""


class Median(Record):
    """A median of rounds and its 95 % bootstrap interval."""

    median: float
    low: float
    high: float
    n: int
    """Rounds."""


class Speedup(Median):
    """An anchor's time over the method's; above 1 the method is faster."""

    paired: bool
    """Whether both were timed in turn, round by round; else they ran one after the other."""

    @property
    def within_noise(self) -> bool:
        """Whether the interval holds 1, or there are too few rounds to say."""
        return self.n < FEW or self.low <= 1 <= self.high


class Time(Record):
    """One quantity of one method on one clock."""

    seconds: Median
    bytes_moved: int | None = None
    """That it must move at least, by the stores' account and the weights' size."""
    bandwidth_share: float | None = None
    """`bytes_moved` over the seconds, as a share of the copy bandwidth of the same job."""
    speedups: dict[str, Speedup] = Field(default_factory=dict)
    """By anchor."""


class DeviceMemory(Record):
    """By the GPU's allocator, without what was there before (weights, anchors)."""

    steady_bytes: int
    """After the context was compressed."""
    peak_bytes: int
    """The most while the context came to be."""


class Predicted(Record):
    """By `kvbench plan`, before the cell ran."""

    stored_bytes: int
    peak_bytes: int
    largest_batch: int
    """Sequences that fit what was free when the cell began."""


class Cell(Record):
    """One method at one length and batch, on one clock."""

    method: MethodSpec
    budget: str | None
    """That it was given; null for a method that takes none."""
    clock: Clock
    length: int
    batch: int
    asked_batch: str
    """As asked for: a number, or `max`, the largest that fits: as predicted, or less where that ran out of memory."""
    state: State
    outcome: Outcome
    reason: str | None = None
    """Of an outcome that is not ok."""
    graph: bool | None = None
    """Whether it was timed as a captured CUDA graph, and its anchors too; null on the user clock."""
    graph_reason: str | None = None
    """Why not."""
    steps: int = 0
    """Decode steps timed."""
    times: dict[str, Time] = Field(default_factory=dict)
    """`attention` on the kernel clock, `step` on the step clock; `prefill`, `compression`, `token` and `answer` (from
    the prompt's first token to the answer's last) on the user clock."""
    tokens_per_s: float | None = None
    """Of all sequences, by the step or the token."""
    memory: CacheBytes | None = None
    """By the stores' ledger."""
    device_memory: DeviceMemory | None = None
    predicted: Predicted | None = None
    kernels: dict[str, str] = Field(default_factory=dict)
    """What each operation ran as."""


class Ruler(Record):
    """A copy on the device before the cells and after them, bytes read and written per second."""

    copied_bytes: int
    before: float
    after: float | None


class Bench(Record):
    """The file of one job."""

    schema_version: Literal[2] = SCHEMA_VERSION
    status: Literal["running", "done"]
    command: dict[str, Any]
    """What was asked for."""
    model: ModelSpec
    kernels: Implementation
    weight_bytes: int
    memory_bytes: int
    """Of the device."""
    ruler: Ruler
    cells: tuple[Cell, ...]
    environment: Environment
