"""Records of `kvbench bench`: one file per job, one cell per method, timing level, length and batch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from kvbench.bench.forecast import State
from kvbench.runs.journal import CacheBytes
from kvbench.runs.results import Environment
from kvbench.runs.schema import SCHEMA_VERSION
from kvbench.runs.spec import Implementation, MethodSpec, ModelSpec, Record

Timing = Literal["kernel", "step", "end-to-end"]
Outcome = Literal["ok", "out of memory", "refused", "failed", "skipped"]
FEW = 5
"""With fewer rounds, the reported interval is just the range of the rounds, not a 95 % interval."""


class Median(Record):
    """A median over rounds and its 95 % bootstrap interval."""

    median: float
    low: float
    high: float
    n: int
    """Number of rounds."""


class Speedup(Median):
    """An anchor's time divided by the method's time; above 1 the method is faster."""

    paired: bool
    """True if both were timed in turn, round by round; false if one was timed after the other."""

    @property
    def within_noise(self) -> bool:
        """True if the interval contains 1 or there are fewer than FEW rounds."""
        return self.n < FEW or self.low <= 1 <= self.high


class Time(Record):
    """The time of one quantity."""

    seconds: Median
    bytes_moved: int | None = None
    """Bytes that must be read at least, from the stores' counters and the size of the weights."""
    bandwidth_share: float | None = None
    """`bytes_moved` per second, as a share of the copy bandwidth of the same job."""
    speedups: dict[str, Speedup] = Field(default_factory=dict)
    """Speed-up over each anchor, by the anchor's name."""


class DeviceMemory(Record):
    """Bytes of the GPU's allocator, less those allocated before the cell (weights, anchors)."""

    steady_bytes: int
    """After compression of the context."""
    peak_bytes: int
    """Maximum during prefill and compression."""


class Predicted(Record):
    """The forecast of `kvbench plan`, made before the cell ran."""

    stored_bytes: int
    peak_bytes: int
    max_batch: int
    """Sequences that fit into the memory that was free at the start of the job."""


class BenchCell(Record):
    """One method at one length and batch, at one timing level."""

    method: MethodSpec
    budget: str | None
    """Null for a method without a budget."""
    timing: Timing
    length: int
    batch: int
    """Sequences timed. For `max`: as predicted, or fewer after an out-of-memory error."""
    asked_batch: str
    """As requested: a number, or `max` for the largest batch that fits."""
    state: State
    outcome: Outcome
    reason: str | None = None
    """Explains an outcome other than ok."""
    graph: bool | None = None
    """True if method and anchors were timed as captured CUDA graphs; null for end-to-end timing."""
    graph_reason: str | None = None
    """Explains why no graph was used."""
    steps: int = 0
    """Decode steps timed."""
    times: dict[str, Time] = Field(default_factory=dict)
    """By quantity. Kernel timing: `attention`. Decode step timing: `step`. End-to-end timing: `prefill`, `compression`,
    `token`, and `answer` (prefill and all decode steps)."""
    tokens_per_s: float | None = None
    """Of all sequences together, from `step` or `token`."""
    memory: CacheBytes | None = None
    """Counted by the stores' ledger."""
    device_memory: DeviceMemory | None = None
    predicted: Predicted | None = None
    kernels: dict[str, str] = Field(default_factory=dict)
    """The implementation that ran, by operation."""


class CopyBandwidth(Record):
    """Bandwidth of a large copy on the device, before and after the cells; bytes read plus written, per second."""

    copied_bytes: int
    before: float
    after: float | None


class Bench(Record):
    """The file of one job."""

    schema_version: Literal[2] = SCHEMA_VERSION
    status: Literal["running", "done"]
    command: dict[str, Any]
    """The options of the command."""
    model: ModelSpec
    kernels: Implementation
    weight_bytes: int
    memory_bytes: int
    """Bytes that weights and caches may take together."""
    copy_bandwidth: CopyBandwidth
    cells: tuple[BenchCell, ...]
    environment: Environment
