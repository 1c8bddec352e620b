"""What result.json holds: a run in one record, made from its journal."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from kvbench.runs.journal import Agreement, CacheBytes
from kvbench.runs.schema import SCHEMA_VERSION
from kvbench.runs.spec import History, ModelSpec, Record, RunSpec, TaskSpec, Visibility
from kvbench.task import Mode


class TurnScore(Record):
    """Mean over the samples of one turn; null where the scorer has nothing to say of it."""

    mean: float | None
    n: int


class Score(Record):
    """The headline metric; null where a sample failed or the model's weights are random."""

    metric: str
    higher_is_better: bool
    mean: float | None
    partial_mean: float | None
    """Over the samples that did not fail."""
    ci95: tuple[float, float] | None
    by_turn: tuple[TurnScore, ...]


class BudgetResult(Record):
    """What was asked, what it counts, and what it came to."""

    asked: str | None
    kind: str
    resolved: dict[str, Any]


class MethodResult(Record):
    """The method with its card."""

    name: str
    version: str
    family: str
    settings: dict[str, Any]
    code: str | None = None
    card: dict[str, Any]


class MemoryResult(CacheBytes):
    """Means over samples."""

    ratio: float
    ratio_total: float
    bytes_per_token: float


class Latency(Record):
    """Medians over samples; p50 and p95 are of the time per output token, n the turns it was measured on."""

    timing: Literal["end-to-end"]
    prefill_s: float | None
    compress_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    tokens_per_s: float | None
    p50: float | None
    p95: float | None
    n: int
    mixed: str | None = None
    """Why there are none: the samples did not all run on one machine, with as many threads."""


class BaselineResult(Record):
    """No cache, in the same job."""

    mean: float | None
    """Of the same metric."""
    tokens_per_s: float | None
    """None: as in `Latency`."""
    speedup: float
    """Of the policy over the baseline: the ratio of the sums of seconds."""
    nfe: float
    same_tokens: float
    """Share of the longer answer's positions, stop tokens excluded, with the policy's token; mean over answers."""


class DiffusionResult(Record):
    """Settings and cost of a diffusion run; means over answers."""

    steps: float | None
    """Denoising steps requested; None: a threshold decides."""
    block: float
    response_length: float
    remasking: str
    threshold: float | None
    temperature: float
    nfe: float
    """Forward passes per answer."""
    computed_tokens_per_step: float
    computed_share: float
    """Computed tokens over those that passes without a cache compute."""
    recomputed_tokens: float
    """Tokens per answer that were computed again after the first time."""
    committed_tokens: float
    """Tokens up to the stop token."""
    baselines: dict[str, BaselineResult]


class Output(Record):
    """What was generated."""

    tokens: int
    stop_reasons: dict[str, int]
    truncated: int = 0
    """Samples whose prompt lost its middle; the fact `cut_tokens` says how much."""


class EffectResult(Record):
    """n_acted of n: the samples in which the method had something to do, and in which it did."""

    kind: str
    n_acted: int
    n: int
    n_identity: int
    """Samples at which these settings are the method's declared identity."""
    entries_seen: int
    entries_kept: float
    """Mean over samples, layers and heads."""
    entries_kept_by_layer: tuple[float, ...]
    facts: dict[str, int]
    """Sums over samples."""


class Kernels(Record):
    """The implementation that was set, the operations that ran, and what each function of them ran as."""

    implementation: str
    ops: tuple[str, ...]
    ran: dict[str, str] = Field(default_factory=dict)


class Git(Record):
    """The checkout that kvbench ran from."""

    commit: str
    dirty: bool


class Environment(Record):
    """Where and when."""

    python: str
    torch: str
    transformers: str
    triton: str | None
    kvbench: str
    git: Git | None
    cpu: str
    gpu: str | None
    threads: int
    device_map: dict[str, str] | None = None
    """Where each part of a model was that is spread over GPUs, memory and disk."""
    started: str
    seconds: float
    """Sum over samples, so that an interrupted run counts its work once."""


class Result(Record):
    """result.json, schema version 2."""

    schema_version: Literal[2] = SCHEMA_VERSION
    run_id: str
    status: Literal["ok", "failed"]
    error: str | None
    suite: str | None
    spec: RunSpec
    model: ModelSpec
    method: MethodResult
    task: TaskSpec
    mode: Mode
    visibility: Visibility
    history: History
    budget: BudgetResult
    n_samples: int
    n_scored: int
    n_failed: int
    score: Score
    scores: dict[str, float]
    agreement: Agreement | None
    """Mean over the samples' turns; n counts positions."""
    output: Output
    memory: MemoryResult | None
    latency: Latency
    diffusion: DiffusionResult | None = None
    effect: EffectResult | None
    kernels: Kernels
    environment: Environment


class SuiteRecord(Record):
    """suite.json"""

    schema_version: Literal[2] = SCHEMA_VERSION
    name: str
    version: str
    runs: tuple[str, ...]
    """Ids, in the order of the suite."""
