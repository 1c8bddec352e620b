"""RunSpec: every resolved setting that can change the outcome of a run. The run id is a hash of it."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from kvbench.errors import MOST_TURNS, UserError, check_number, unknown
from kvbench.runs.schema import SCHEMA_VERSION
from kvbench.task import Mode

if TYPE_CHECKING:
    from kvbench.hf import Model

Visibility = Literal["visible", "hidden", "first-turn"]
History = Literal["reference", "own"]
Implementation = Literal["torch", "triton", "flash"]
"""Implementations of operations: `kernels.choice.IMPLEMENTATIONS`."""
VISIBILITIES: dict[Mode, tuple[Visibility, ...]] = {
    Mode.SINGLE: ("visible", "hidden"),
    Mode.MULTI_TURN: ("first-turn", "hidden"),
    Mode.MULTI_REQUEST: ("hidden",),
}
"""Whether a method sees questions when it compresses, by mode; the first is the default."""


class Record(BaseModel):
    """Part of a file: immutable, without unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class MethodSpec(Record):
    """The method and its settings."""

    name: str
    version: str
    family: str
    settings: dict[str, Any]
    code: str | None = None
    """SHA-256 of the source of a user's own file; None: a registered method, which its version identifies."""


class TaskSpec(Record):
    """The task, and the facts about its prompts that are known to change scores."""

    name: str
    version: str
    suite: str
    settings: dict[str, Any]
    length: int
    scorer: str
    dataset_revision: str | None
    prompt_id: str
    chat_template_sha: str | None
    bos: Literal["tokenizer", "template", "none"]
    """Whether the tokenizer or the chat template adds the beginning-of-sequence token."""
    truncation: Literal["none", "middle"] = "none"
    """`middle`: prompts of data sets that are too long are cut in the middle."""
    stop: tuple[int, ...]
    """Ids of the tokens that end an answer."""
    code: str | None = None
    """As in `MethodSpec`."""


class ModelSpec(Record):
    """The model, identified by the contents of its files."""

    id: str
    revision: str | None
    kind: Literal["autoregressive", "diffusion"]
    dtype: str
    params: int
    sha256: str
    tokenizer_sha256: str

    @classmethod
    def of(cls, model: Model) -> Self:
        """The identity of a loaded model."""
        return cls(**{name: getattr(model, name) for name in cls.model_fields})


class DenoisingSpec(Record):
    """How a diffusion model generates an answer."""

    steps: int | None = None
    """Denoising steps per answer; None: one per `tokens_per_step` tokens."""
    tokens_per_step: int = 1
    """The model's default, or the task's if that is smaller."""
    block: int | None = None
    """Tokens per block; blocks are finished in order. None: the whole answer is one block."""
    remasking: Literal["low-confidence", "random"] = "low-confidence"
    temperature: float = 0.0
    threshold: float | None = None
    """Commit all tokens of at least this probability; None: a fixed number per step."""


class GenerationSpec(Record):
    """How answers are generated."""

    decoding: Literal["greedy", "denoising"] = "greedy"
    max_new_tokens: int | None = None
    """A cap on the number of tokens that the task allows for an answer."""
    denoising: DenoisingSpec | None = None
    """For diffusion models only."""


class Versions(Record):
    """Versions of the packages that compute results."""

    kvbench: str
    torch: str
    transformers: str


class Sources(Record):
    """SHA-256 of the code that computes results, by component."""

    method: str
    task: str
    kernels: str
    harness: str


PROTOCOL_VERSION: Literal[1] = 1
"""Raised when a change of the harness changes numbers: how prompts are run, bytes counted or scores averaged."""
NOT_IDENTITY: dict[str, Any] = {
    "schema_version": True, "versions": True, "sources": True, "method": {"family"}, "task": {"suite"},
}
"""Fields that are not part of the identity: provenance and grouping."""


class RunSpec(Record):
    """The spec of a run. Two runs of the same spec have the same scores."""

    schema_version: Literal[2] = SCHEMA_VERSION
    protocol_version: Literal[1] = PROTOCOL_VERSION
    suite: str | None
    method: MethodSpec
    task: TaskSpec
    model: ModelSpec
    mode: Mode
    visibility: Visibility
    history: History
    recompress: bool
    budget: str | None
    """As requested; None: the method takes no budget."""
    split: Literal["dev", "test"]
    seed: int
    samples: int
    turns: int
    batch: int = Field(default=1, ge=1)
    """Answers decoded together."""
    chunk: int | None
    """Most prompt tokens per forward pass; None: the whole prompt at once."""
    kernels: Implementation
    device: Literal["cpu", "cuda"]
    generation: GenerationSpec
    versions: Versions
    sources: Sources

    @property
    def run_id(self) -> str:
        """A readable name and the hash of the identity: versions, settings, and hashes of model and data.

        The code that computed it (`versions`, `sources`) is provenance: recorded next to the identity, not part of it.
        """
        document = self.model_dump(mode="json", exclude=NOT_IDENTITY)
        for part in ("method", "task"):
            if document[part]["code"] is None:  # run ids stay the same as before this field
                del document[part]["code"]
        generation = document["generation"]
        generation["limit"] = generation.pop("max_new_tokens")  # its earlier name: run ids stay the same
        canonical = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        digest = hashlib.sha256(canonical.encode()).hexdigest()[:12]
        prefix = re.sub(r"[^a-z0-9_.+-]+", "-", f"{self.method.name}-{self.task.name}".lower()).strip("-.")
        return f"{prefix[:80]}-{digest}"

    def find_code_changes(self, other: RunSpec) -> list[str]:
        """Differences between this run's code and another's, usually today's: sources by part, packages by version."""
        sources, versions = other.sources.model_dump(), other.versions.model_dump()
        return [
            *(f"source of the {part}" for part, value in self.sources if value != sources[part]),
            *(f"{name} {value}, now {versions[name]}" for name, value in self.versions if value != versions[name]),
        ]


class Protocol(Record):
    """How the questions about one context are asked."""

    mode: Mode
    visibility: Visibility
    history: History
    recompress: bool
    turns: int


def resolve_protocol(
    mode: str, visibility: str | None, history: str | None, turns: int | None, *, recompress: bool, default_turns: int
) -> Protocol:
    """Fill in the defaults of a protocol.

    Raises:
        UserError: an unknown name, or options that exclude each other.
    """
    if mode not in tuple(Mode):
        raise unknown("mode", mode, [str(x) for x in Mode])
    kind = Mode(mode)
    allowed = VISIBILITIES[kind]
    every = {x for xs in VISIBILITIES.values() for x in xs}
    if visibility is not None and visibility not in every:
        raise unknown("visibility", visibility, every)
    if visibility is not None and visibility not in allowed:
        reason = {
            Mode.SINGLE: "its one question is visible or hidden",
            Mode.MULTI_TURN: "only the first question can be in the prompt when the context is compressed",
            Mode.MULTI_REQUEST: "every question comes after the shared context is compressed",
        }[kind]
        raise UserError(
            f"visibility '{visibility}' has no meaning in mode {mode}: {reason}. Allowed: {', '.join(allowed)}."
        )
    if history is not None and history not in ("reference", "own"):
        raise unknown("history", history, ["reference", "own"])
    if kind is not Mode.MULTI_TURN and history == "own":
        raise UserError(f"history 'own' has no meaning in mode {mode}: no turn follows another. Use --mode multi-turn.")
    if kind is not Mode.MULTI_TURN and recompress:
        raise UserError(f"--recompress has no meaning in mode {mode}: no turn follows another. Use --mode multi-turn.")
    if turns is not None:
        check_number("turns", turns, most=MOST_TURNS)
    if kind is Mode.SINGLE and turns not in (None, 1):
        raise UserError(
            f"turns {turns} has no meaning in mode single: it asks one question per context. "
            "Leave --turns out, or use --mode multi-turn or multi-request."
        )
    return Protocol(
        mode=kind,
        visibility=next(x for x in allowed if visibility in (None, x)),
        history="own" if history == "own" else "reference",
        recompress=recompress,
        turns=1 if kind is Mode.SINGLE else turns or default_turns,
    )


def make_visible(protocol: Protocol, visibility: str | None, chunk: int | None) -> Protocol:
    """The protocol for a diffusion model, which runs the whole prompt in every pass and keeps no cache between answers.

    visibility, chunk: as requested.

    Raises:
        UserError: an option that does not apply to diffusion models.
    """
    if protocol.mode is Mode.MULTI_REQUEST:
        raise UserError(
            "mode multi-request has no meaning on a diffusion model: no cache remains after an answer for requests to "
            "share. Use --mode single or multi-turn."
        )
    if visibility not in (None, "visible") or protocol.recompress or chunk is not None:
        raise UserError(
            "on a diffusion model every pass runs the whole prompt, and no context is compressed: leave --visibility, "
            "--recompress and --chunk out."
        )
    return protocol.model_copy(update={"visibility": "visible"})


def read_generation(given: dict[str, str]) -> GenerationSpec:
    """Read `--gen key=value` options.

    Raises:
        UserError: an unknown key or an invalid value.
    """
    for key in given:
        if key not in GENERATION:
            raise unknown("generation setting", key, GENERATION, "Autoregressive decoding is greedy.")
    read = {key: GENERATION[key](key, text) for key, text in given.items()}
    most = read.pop("max_new_tokens", None)
    return GenerationSpec(max_new_tokens=most, denoising=DenoisingSpec(**read) if read else None)


def _whole(key: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"--gen {key}={text} must be a whole number, 1 or more.")
    check_number(f"--gen {key}", int(text))
    return int(text)


def _number(key: str, text: str) -> float:
    top = 1.0 if key == "threshold" else math.inf
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= top or math.isinf(value):
        raise UserError(f"--gen {key}={text} must be a number from 0{' to 1' if key == 'threshold' else ' on'}.")
    return value


def _remasking(key: str, text: str) -> str:
    if text not in ("low-confidence", "random"):
        raise unknown(key, text, ["low-confidence", "random"])
    return text


GENERATION: dict[str, Callable[[str, str], Any]] = {
    "max_new_tokens": _whole, "steps": _whole, "block": _whole, "remasking": _remasking, "temperature": _number,
    "threshold": _number,
}
"""Readers of `--gen` settings; all but max_new_tokens are for diffusion models."""
