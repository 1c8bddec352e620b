"""Records of samples.jsonl, the journal of a run: one line per turn of a sample."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvbench.runs.schema import SCHEMA_VERSION
from kvbench.runs.spec import Record


class TokenCounts(Record):
    """Tokens of one turn."""

    context: int
    """Tokens in the cache when the method compressed."""
    query: int
    """Tokens of the question that were run after compression, in this turn."""
    generated: int
    reference: int | None = None
    """Tokens of the reference answer. None: a file older than this field."""


class Times(Record):
    """Seconds, end-to-end timing."""

    prefill_s: float | None
    """From the start of the context to the first logits, compression included; first turn only."""
    compress_s: float | None
    """The part of the prefill spent on compression: selecting and moving entries, and scores that are computed then.

    Scores that a method gathers in the attention of the context, such as H2O's sums, are in `prefill_s` alone.
    """
    ttft_s: float
    """Time to first token; on the first turn with the prefill."""
    decode_s: float
    steps: int
    """Decode steps that took `decode_s`; for a diffusion model, tokens of the answer up to its end."""


class CacheBytes(Record):
    """Bytes of the cache of one conversation, counted from the storages of its tensors."""

    full_bytes: int
    """Bytes of the full cache of the same context."""
    stored_bytes: int
    """Bytes that hold the context right after compression, without spare bytes."""
    spare_bytes: int
    """Bytes allocated for later tokens, right after compression."""
    end_bytes: int
    """All bytes at the end of the turn, without host memory."""
    peak_bytes: int
    """Most bytes at once, measured between operations, without host memory."""
    host_bytes: int
    """Bytes of the context in host memory; on a CPU, bytes in the tier that the store declares as host memory."""
    read_bytes_per_step: int
    """Bytes of KV entries that one decode step reads; 0 if a retrieval method ran no step."""
    end_stored_bytes: int | None = None
    """Bytes that hold the conversation at the end of the turn, without spare bytes and `host_bytes`.

    None here and below: a diffusion model, or a file older than these fields.
    """
    end_full_bytes: int | None = None
    """Bytes of the full cache of the same conversation."""
    distinct_read_bytes_per_step: int | None = None
    """As `read_bytes_per_step`, with an entry counted once that several query heads read."""
    full_read_bytes_per_step: int | None = None
    """Bytes that the full cache reads at the same step."""
    file_bytes: int = 0
    """Bytes of entries in files."""
    host_read_bytes_per_step: int | None = None
    """The part of `read_bytes_per_step` that comes from host memory."""
    file_read_bytes_per_step: int | None = None
    """The part of `read_bytes_per_step` that comes from files."""

    @property
    def off_device_bytes(self) -> int:
        """Bytes in host memory and in files."""
        return self.host_bytes + self.file_bytes


class Effect(Record):
    """The stores' counters of changes to the KV entries of one conversation."""

    acted: bool
    """Whether a counter shows a change."""
    identity: bool
    """Whether the method declares these settings lossless, so that no change is required."""
    entries_seen: int
    """Entries per KV head in the full cache of the context, in the layer with the most."""
    entries_kept: tuple[float, ...]
    """Mean entries per KV head after compression, by layer."""
    facts: dict[str, int]
    """Totals over the layers, by name."""
    maxima: tuple[str, ...] = ("distinct_codes", "distinct_key_codes", "distinct_value_codes")
    """Facts whose totals are maxima; the others are sums. The default is for files that lack this field."""
    restarts: tuple[str, ...] = ()
    """Facts that every fork counts from 0. Files older than this field name none."""


def add_forks(turns: Sequence[Effect]) -> Effect:
    """The effect of forks of one context: that of the last, with the sums of what every fork counts from 0."""
    added: Counter[str] = Counter()
    for effect in turns:
        added.update({name: effect.facts[name] for name in effect.restarts if name in effect.facts})
    return turns[-1].model_copy(update={"facts": {**turns[-1].facts, **added}})


def total_facts(effects: Iterable[Effect]) -> dict[str, int]:
    """The facts of several samples, each a sum or a maximum."""
    total: dict[str, int] = {}
    for effect in effects:
        for name, value in effect.facts.items():
            before = total.get(name, 0)
            total[name] = max(before, value) if name in effect.maxima else before + value
    return total


class AgreementPart(Record):
    """Agreement on the answer tokens from `start` up to the start of the next part."""

    start: int
    top1: float
    kl: float
    n: int


class Agreement(Record):
    """Next-token distributions compared with the full cache's, teacher-forced on the reference answers."""

    top1: float
    """Share of positions with the same top-1 token."""
    kl: float
    """Mean KL divergence from the full cache, in nats."""
    n: int
    """Number of positions."""
    by_distance: tuple[AgreementPart, ...] = ()
    """For answers of 64 tokens or more: agreement by distance from the question."""


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


class LosslessLine(Record):
    """Rounds of drafting and verification of one answer, and the same answer decoded one token at a time."""

    rounds: int
    drafted: int
    """Tokens."""
    accepted: int
    """Drafted tokens that the cache that verifies would have chosen too."""
    reloaded_bytes: int
    """Bytes of the cache that verifies, fetched from host memory."""
    different: int
    """Tokens that differ from greedy decoding with the cache that verifies alone, one token at a time."""
    plain_s: float
    """Seconds of that decoding."""


class ReuseLine(Record):
    """Entries taken over and computed for the prompt of a sample."""

    tokens: int
    """Of the prompt, over all layers."""
    computed: int
    """Tokens that were run for the prompt, over all layers."""
    reused: int
    """Tokens whose entries were taken over, over all layers."""
    hits: int
    """Look-ups that found a chunk, those that this prompt built before included."""
    misses: int
    """Chunks that were computed."""
    mismatched: int
    """Misses of chunks that were there for another model, method or template, or damaged."""
    refused: int
    """Chunks that could not be written to the folder of chunks; this sample still uses them."""
    loaded: int = 0
    """Hits of chunks in files, which an earlier run or sample computed."""
    chunk_bytes: int
    """Bytes of all chunks."""
    moved_bytes: int
    """Bytes that were copied from chunks into the prompt's cache."""
    build_s: float
    """Seconds in which missing chunks were computed, a part of the prefill."""


class Machine(Record):
    """The hardware that a sample's times depend on."""

    cpu: str
    gpu: str | None
    threads: int


class BatchLine(Record):
    """How the answers of a sample were decoded in a run with `--batch`."""

    size: int
    """Answers that were decoded together."""
    alone: str | None = None
    """Why they were decoded one at a time instead; None: they were not."""
    tokens: int | None = None
    """Tokens of the first answer, compared with the same answer decoded alone; in 16 bits, on the first sample. Earlier
    versions compared all answers of that sample."""
    different: int | None = None
    """How many of them differ."""


class Line(Record):
    """One turn of a sample. The last line of a failed sample has the error."""

    schema_version: Literal[2] = SCHEMA_VERSION
    sample: str
    index: int
    turn: int
    turns: int
    prompt_hash: str
    prediction: str | None
    ids: tuple[int, ...]
    question: str | None = None
    """Without the separator before it. None: a file older than this field."""
    references: tuple[str, ...]
    score: float | None
    scores: dict[str, float]
    """By scorer."""
    tokens: TokenCounts | None
    stop_reason: str | None
    times: Times | None
    """None if the sample took a shared prefill or its answers were decoded in a batch."""
    bytes: CacheBytes | None
    effect: Effect | None
    agreement: Agreement | None
    """None for methods that take no budget and reuse nothing, for diffusion models, for random weights, and if the full
    cache does not fit in memory."""
    denoising: DenoisingLine | None = None
    """For diffusion models only."""
    kernels: dict[str, str] = Field(default_factory=dict)
    """The implementation of each operation in the whole sample; on the line of its first turn."""
    shared_prefill: bool = False
    """Whether the exact prefill of the context was run once for several runs of a sweep."""
    batch: BatchLine | None = None
    """None: without `--batch`."""
    lossless: LosslessLine | None = None
    """For methods that draft and verify only."""
    reuse: ReuseLine | None = None
    """For methods that reuse entries across prompts, on the first turn."""
    machine: Machine | None = None
    """On the line of the sample's first turn. None in early journals."""
    facts: dict[str, Any]
    """From the task, such as keys and depths."""
    started: str
    seconds: float
    """Time of this turn with the harness, without the full cache's run for `agreement`; of turns that were run together
    an equal share of the time of all, such runs included."""
    error: str | None


MOST_SCORE = 1e100
"""Largest absolute score that comparisons read: sums of larger ones, which a hostile file may have, can be infinite."""


class Answer(BaseModel):
    """The fields of a line that comparisons read."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)

    schema_version: Literal[1, 2] = SCHEMA_VERSION
    sample: str
    index: int
    turn: int
    prompt_hash: str
    score: Annotated[float, Field(ge=-MOST_SCORE, le=MOST_SCORE)] | None
    facts: dict[str, Any]
