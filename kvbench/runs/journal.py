"""What the journal of a run holds: lines of samples.jsonl, one per turn of a sample."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvbench.runs.schema import SCHEMA_VERSION
from kvbench.runs.spec import Record


class TokenCounts(Record):
    """Tokens of one turn."""

    context: int
    """Held when the method compressed."""
    query: int
    """Run after that, in this turn."""
    generated: int


class Times(Record):
    """Seconds, end-to-end timing."""

    prefill_s: float | None
    """Context to first logits, compression included; on the first turn only."""
    compress_s: float | None
    """The part of the prefill that the method took to decide and to move rows."""
    ttft_s: float
    """To the first token, with the prefill on the first turn."""
    decode_s: float
    steps: int
    """Tokens that took `decode_s`: forward passes of decoding; of a diffusion model the answer's up to its end."""


class CacheBytes(Record):
    """Bytes of the cache of one conversation, counted from storages."""

    full_bytes: int
    """The full cache of the same context."""
    stored_bytes: int
    """What holds the context right after compression, spare room excluded."""
    spare_bytes: int
    """Room allocated for later tokens, at that moment."""
    end_bytes: int
    """All of it at the end of the turn, host memory excluded."""
    peak_bytes: int
    """The most held at once, between operations, host memory excluded."""
    host_bytes: int
    """Bytes in host memory; on a CPU, a tier that the store declares as such."""
    read_bytes_per_step: int
    """Bytes of KV entries that one decode step reads; 0 where a method that reads a part made no step."""


class Effect(Record):
    """Counters, kept by the stores, of what a method did to the KV entries of one conversation."""

    acted: bool
    identity: bool
    """The settings are the method's declared identity: nothing has to change."""
    entries_seen: int
    """Entries per KV head that the full cache of the context holds, in the layer with the most."""
    entries_kept: tuple[float, ...]
    """Mean entries per KV head after compression, by layer."""
    facts: dict[str, int]
    """Totals over the layers, by name."""
    maxima: tuple[str, ...] = ("distinct_codes", "distinct_key_codes", "distinct_value_codes")
    """Facts whose totals are maxima; the others are sums. The default is for files that lack this field."""


def total_facts(effects: Iterable[Effect]) -> dict[str, int]:
    """The facts of several samples, each a sum or a maximum."""
    total: dict[str, int] = {}
    for effect in effects:
        for name, value in effect.facts.items():
            before = total.get(name, 0)
            total[name] = max(before, value) if name in effect.maxima else before + value
    return total


class AgreementPart(Record):
    """The answer tokens from `start` on, up to the next part's start."""

    start: int
    top1: float
    kl: float
    n: int


class Agreement(Record):
    """Next-token distributions against the dense cache's, on the reference answers as forced tokens."""

    top1: float
    """Share of positions with the same most likely token."""
    kl: float
    """Mean divergence from the dense cache, in nats."""
    n: int
    """Positions."""
    by_distance: tuple[AgreementPart, ...] = ()
    """Of answers of 64 tokens and more: how it changes with the distance from the question."""


class BaselineLine(Record):
    """The same answer without a cache, in the same job: with the same settings, or with half of the denoising steps."""

    score: float | None
    seconds: float
    nfe: int
    committed_tokens: int
    """Tokens of its answer up to the stop token."""
    same_tokens: float
    """Share of positions of the longer answer, stop tokens excluded, that have the policy's token."""


class DenoisingLine(Record):
    """Settings and cost of an answer of a diffusion model."""

    response_length: int
    """Tokens of the response block."""
    steps: int | None
    """Denoising steps requested; None: a threshold decides."""
    block: int
    nfe: int
    """Forward passes."""
    computed_tokens: float
    """Tokens computed per forward pass, mean over layers."""
    sequence_length: int
    """Tokens of prompt and response block, all of which a pass without a cache computes."""
    committed_tokens: int
    """Tokens of the answer up to the stop token."""
    baselines: dict[str, BaselineLine]
    """`none`, and `half-steps` where steps decide."""


class Machine(Record):
    """What the seconds of a sample depend on."""

    cpu: str
    gpu: str | None
    threads: int


class Line(Record):
    """One (sample, turn) of samples.jsonl. A failed sample ends with a line that has an error."""

    schema_version: Literal[2] = SCHEMA_VERSION
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
    bytes: CacheBytes | None
    effect: Effect | None
    agreement: Agreement | None
    """None: the dense cache itself, random weights, or no memory for a dense cache."""
    denoising: DenoisingLine | None = None
    """Of a diffusion model."""
    kernels: dict[str, str] = Field(default_factory=dict)
    """What implementation ran, by operation, in the whole sample; on the line of its first turn."""
    machine: Machine | None = None
    """Where the sample ran; on the line of its first turn. None: a journal from before it was noted."""
    facts: dict[str, Any]
    """From the task."""
    started: str
    seconds: float
    """What this turn took, the harness included; the dense cache that `agreement` is taken to comes after it."""
    error: str | None


class Answer(BaseModel):
    """What comparisons read of a line."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)

    schema_version: Literal[1, 2] = SCHEMA_VERSION
    sample: str
    index: int
    turn: int
    prompt_hash: str
    score: float | None
    facts: dict[str, Any]
