"""Records of result.json, which summarizes the journal of a run."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from kvbench.runs.journal import Agreement, CacheBytes
from kvbench.runs.schema import SCHEMA_VERSION
from kvbench.runs.spec import History, ModelSpec, Record, RunSpec, TaskSpec, Visibility
from kvbench.task import Mode

IntervalMethod = Literal["bootstrap", "exact"]
"""`bootstrap`: of every score, in results of kvbench 0.1. `exact`: `find_interval` of kvbench/runs/stats.py."""


class TurnScore(Record):
    """Mean score of one turn over samples; null if the scorer does not apply to it."""

    mean: float | None
    n: int


class Score(Record):
    """The main metric; its mean is null if a sample failed or the model's weights are random."""

    metric: str
    higher_is_better: bool
    mean: float | None
    partial_mean: float | None
    """Mean over the samples that did not fail."""
    ci95: tuple[float, float] | None
    """95 % confidence interval of the mean, by context; null also where a graded score does not vary."""
    interval: IntervalMethod = "bootstrap"
    """Method of the interval (docs/statistics.md); the default is for files that lack this field."""
    by_turn: tuple[TurnScore, ...]


TASKS = "the tasks' train split"
"""The value of `trained_on` of a part that was trained on text of the tasks."""


class BudgetResult(Record):
    """The budget as requested, its kind, and its resolution on the first sample."""

    asked: str | None
    kind: str
    resolved: dict[str, Any]

    @property
    def trained(self) -> bool:
        """Whether a part of the method was trained on text of the tasks."""
        return self.resolved.get("trained_on") == TASKS


class MethodResult(Record):
    """The method, its settings and its card."""

    name: str
    version: str
    family: str
    settings: dict[str, Any]
    code: str | None = None
    card: dict[str, Any]


class MemoryResult(CacheBytes):
    """Bytes of the cache, means over samples."""

    ratio: float
    """Stored bytes over bytes of the full cache."""
    ratio_total: float
    """The same with host memory and files."""
    bytes_per_token: float
    """Stored bytes per token of context."""
    full_16bit_bytes: int | None = None
    """Bytes of the full cache in 16 bits, whatever type it was computed in; None: a file older than this field."""


class Latency(Record):
    """Medians over samples; p50 and p95 of the time per output token, over n turns."""

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
    """Why there are no times: samples ran on several machines or numbers of threads. None: on one."""
    untimed: str | None = None
    """Why there are no times: prefills were shared, or answers decoded in a batch. None: neither."""


class BaselineResult(Record):
    """A run without a cache in the same job."""

    mean: float | None
    """Mean of the run's metric."""
    tokens_per_s: float | None
    """None if samples ran on several machines."""
    speedup: float
    """Of the policy over the baseline: the ratio of the sums of seconds."""
    nfe: float
    same_tokens: float
    """Share of the longer answer's positions, stop tokens excluded, with the policy's token; mean over answers."""


class LosslessResult(Record):
    """Drafting and verification, over all answers."""

    accepted_per_round: float
    tokens_per_round: float
    """Accepted tokens and the one that verification adds."""
    acceptance: float | None
    """Share of drafted tokens that were accepted; None: none were drafted."""
    resident_bytes: int
    """Bytes of the cache outside host memory right after the context, mean over contexts."""
    reloaded_bytes_per_token: float
    """Bytes fetched from host memory for verification, per token after the first."""
    different: int
    """Tokens that differ from greedy decoding with the cache that verifies alone."""
    tokens: int
    """Tokens that were compared."""
    speedup: float | None
    """Decoding time of that cache alone over that of the method, in the same run; None: samples have no times."""


class ReuseResult(Record):
    """Reuse across prompts, over all samples."""

    computed_share: float
    """Tokens times layers that were run for prompts, over those of full prefills."""
    reused_share: float
    """Tokens times layers whose entries were taken over, over all."""
    hits: int
    misses: int
    mismatched: int
    refused: int
    loaded: int = 0
    """Chunks from files: earlier runs or samples computed them, and the time to build them is not in this run."""
    chunk_bytes: int
    """Bytes of all chunks of a sample, mean."""
    moved_bytes: int
    """Bytes copied from chunks into a prompt's cache, mean."""
    ttft_in_hand_s: float | None
    """Median time to first token without the time to build missing chunks, which `latency.ttft_s` includes."""
    build_s: float | None
    """Median time to build them. None here and above: samples have no times."""


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
    """Counts of generated tokens and of stop reasons."""

    tokens: int
    stop_reasons: dict[str, int]
    truncated: int = 0
    """Samples whose prompts were cut in the middle; their fact `cut_tokens` has the number of tokens."""
    reference_tokens: float | None = None
    """Mean tokens of a reference answer under the model's tokenizer; None: a file older than this field."""


class EffectResult(Record):
    """The effect check: the method changed the cache in n_acted of the n samples in which it had to."""

    kind: str
    n_acted: int
    n: int
    n_identity: int
    """Samples in which the method declares these settings lossless."""
    entries_seen: int
    entries_kept: float
    """Mean over samples, layers and heads."""
    entries_kept_by_layer: tuple[float, ...]
    facts: dict[str, int]
    """Sums or maxima over samples, by counter."""


class Kernels(Record):
    """The requested implementation, the operations that ran, and the implementation of each of their functions."""

    implementation: str
    ops: tuple[str, ...]
    ran: dict[str, str] = Field(default_factory=dict)


class BatchResult(Record):
    """How answers were decoded in a run with `--batch`."""

    size: int
    """The most answers that were decoded together."""
    alone: str | None
    """Why answers were decoded one at a time; None: they were not."""
    tokens: int | None
    """Tokens compared with answers decoded one at a time; None in float32, where tests prove them equal."""
    different: int | None
    """How many of them differ."""


class Git(Record):
    """The commit that kvbench ran from, and whether its code had uncommitted changes."""

    commit: str
    dirty: bool


class Environment(Record):
    """Software, hardware and time of a run."""

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
    """Places of the parts of a model that is spread over GPUs, memory and disk."""
    started: str
    seconds: float
    """Sum over samples: an interrupted run counts its work once."""


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
    n_questions: int | None = None
    """Questions that were asked and answered; contexts of a data set may have unequal numbers."""
    score: Score
    scores: dict[str, float]
    agreement: Agreement | None
    """Means over turns; n is the sum of positions."""
    output: Output
    memory: MemoryResult | None
    latency: Latency
    diffusion: DiffusionResult | None = None
    lossless: LosslessResult | None = None
    """For methods that draft and verify only."""
    reuse: ReuseResult | None = None
    """For methods that reuse entries across prompts only."""
    batch: BatchResult | None = None
    """None: without `--batch`."""
    effect: EffectResult | None
    kernels: Kernels
    environment: Environment


class SuiteRecord(Record):
    """suite.json: the runs of a suite under one method."""

    schema_version: Literal[2] = SCHEMA_VERSION
    name: str
    version: str
    runs: tuple[str, ...]
    """Run ids, in the order of the suite."""
