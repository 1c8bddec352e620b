"""What the files of a run hold: lines of samples.jsonl, and result.json."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvbench.spec import SCHEMA_VERSION, History, ModelSpec, Record, RunSpec, TaskSpec, Visibility
from kvbench.task import Mode


class TokenCounts(Record):
    """Tokens of one turn."""

    context: int
    """Held when the method compressed."""
    query: int
    """Run after that, in this turn."""
    generated: int


class Times(Record):
    """Seconds on the user's clock."""

    prefill_s: float | None
    """Context to first logits, compression included; on the first turn only."""
    compress_s: float | None
    """The part of the prefill that the method took to decide and to move rows."""
    ttft_s: float
    """To the first token, with the prefill on the first turn."""
    decode_s: float
    steps: int
    """Forward passes of decoding: tpot = decode_s / steps."""


class Bytes(Record):
    """Bytes of the cache at one turn, counted from storages."""

    dense_bytes: int
    cache_bytes: int
    tail_bytes: int
    host_bytes: int
    end_bytes: int
    peak_bytes: int
    read_bytes_per_step: int


class Evidence(Record):
    """What the stores say happened to the rows of one turn's conversation."""

    acted: bool
    identity: bool
    rows_seen: int
    rows_kept: tuple[float, ...]
    facts: dict[str, int]


class AgreementPart(Record):
    """The answer tokens from `start` on, up to the next part's start."""

    start: int
    top1: float
    kl: float
    n: int


class Agreement(Record):
    """Next-token distributions against the dense cache's, on the golden answers as forced tokens."""

    top1: float
    """Share of positions with the same most likely token."""
    kl: float
    """Mean divergence from the dense cache, in nats."""
    n: int
    """Positions."""
    by_distance: tuple[AgreementPart, ...] = ()
    """Of answers of 64 tokens and more: how it changes with the distance from the question."""


class Baseline(Record):
    """The same answer without a cache, in the same job: with as many passes, or with half of them."""

    score: float | None
    seconds: float
    passes: int
    committed: int
    """Tokens of its answer up to the end."""
    same: float
    """Share of the canvas whose tokens are the policy's own."""


class Denoising(Record):
    """What an answer of a diffusion model took."""

    canvas: int
    """Tokens of the answer's room."""
    steps: int | None
    """Passes that were asked for; None: a threshold decides."""
    block: int
    passes: int
    rows: float
    """Computed per pass, mean over layers."""
    total: int
    """Rows of a pass that computes all."""
    committed: int
    """Tokens of the answer up to its end."""
    baselines: dict[str, Baseline]
    """`none`, and `half-steps` where steps decide."""


class Line(Record):
    """One (sample, turn) of samples.jsonl. A failed sample ends with a line that has an error."""

    schema_version: Literal[1] = SCHEMA_VERSION
    sample: str
    index: int
    turn: int
    turns: int
    prompt_hash: str
    prediction: str | None
    ids: tuple[int, ...]
    references: tuple[str, ...]
    score: float | None
    scores: dict[str, float]
    """By scorer."""
    tokens: TokenCounts | None
    stop_reason: str | None
    times: Times | None
    bytes: Bytes | None
    evidence: Evidence | None
    agreement: Agreement | None
    """None: the dense cache itself, random weights, or no memory for a dense cache."""
    denoising: Denoising | None = None
    """Of a diffusion model."""
    kernels: dict[str, str] = Field(default_factory=dict)
    """What implementation ran, by operation, in the whole sample; on the line of its first turn."""
    facts: dict[str, Any]
    """From the task."""
    started: str
    seconds: float
    """All that this turn took, the harness included."""
    error: str | None


class Answer(BaseModel):
    """What comparisons read of a line."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)

    schema_version: Literal[1] = SCHEMA_VERSION
    sample: str
    index: int
    turn: int
    prompt_hash: str
    score: float | None
    facts: dict[str, Any]


class TurnScore(Record):
    """Mean over the samples of one turn."""

    mean: float
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
    card: dict[str, Any]


class MemoryResult(Record):
    """Means over samples."""

    dense_bytes: int
    cache_bytes: int
    ratio: float
    ratio_total: float
    read_bytes_per_step: int
    tail_bytes: int
    host_bytes: int
    end_bytes: int
    peak_bytes: int
    bytes_per_token: float


class Latency(Record):
    """Medians over samples; p50 and p95 are of the time per output token, n the turns it was measured on."""

    clock: Literal["user"]
    prefill_s: float | None
    compress_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    tokens_per_s: float | None
    p50: float | None
    p95: float | None
    n: int


class BaselineResult(Record):
    """No cache, in the same job."""

    mean: float | None
    """Of the same metric."""
    tokens_per_s: float
    speedup: float
    """Of the policy over it: the ratio of all seconds."""
    nfe: float
    same_tokens: float
    """Share of the policy's tokens that it has too."""


class DiffusionResult(Record):
    """Means over answers; the regime of a diffusion run, and what it took."""

    steps: float | None
    """Passes asked for; None: a threshold decides."""
    block: float
    canvas: float
    remasking: str
    threshold: float | None
    temperature: float
    nfe: float
    """Forward passes of an answer."""
    rows_per_step: float
    rows_share: float
    """Of the rows that passes without a cache compute."""
    recomputed_rows: float
    """Rows of an answer computed again after the first time."""
    committed_tokens: float
    """Up to the end of the answer."""
    baselines: dict[str, BaselineResult]


class Output(Record):
    """What was generated."""

    tokens: int
    stop_reasons: dict[str, int]
    truncated: int = 0
    """Samples whose prompt lost its middle; the fact `cut_tokens` says how much."""


class CertificateResult(Record):
    """n_acted of n: the samples in which the method had something to do, and in which it did."""

    kind: str
    n_acted: int
    n: int
    n_identity: int
    """Samples at which these settings are the method's declared identity."""
    rows_seen: int
    rows_kept: float
    """Mean over samples, layers and heads."""
    rows_kept_by_layer: tuple[float, ...]
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
    """result.json, schema version 1."""

    schema_version: Literal[1] = SCHEMA_VERSION
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
    certificate: CertificateResult | None
    kernels: Kernels
    environment: Environment
