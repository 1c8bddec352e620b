"""RunSpec: everything that can change the outcome of a run, resolved. Its hash names the run."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable
from typing import Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from kvbench.errors import UserError, unknown
from kvbench.runs.schema import SCHEMA_VERSION
from kvbench.task import Mode

Visibility = Literal["visible", "hidden", "first-turn"]
History = Literal["reference", "own"]
Implementation = Literal["torch", "triton", "flash"]
"""Of operations: `kernels.choice.IMPLEMENTATIONS`."""
VISIBILITIES: dict[Mode, tuple[Visibility, ...]] = {
    Mode.SINGLE: ("visible", "hidden"),
    Mode.MULTI_TURN: ("first-turn", "hidden"),
    Mode.MULTI_REQUEST: ("hidden",),
}
"""What a method may see of the questions when it compresses, by mode; the first is the default."""


class Record(BaseModel):
    """A part of a file: known fields only, never changed after it is made."""

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
    """The task, and each fact about its prompts that is known to change scores."""

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
    """Who puts the beginning-of-sequence token there."""
    truncation: Literal["none", "middle"] = "none"
    """Prompts are made to length; those of data sets that are too long lose their middle."""
    stop: tuple[int, ...]
    """Token ids that end an answer."""
    code: str | None = None
    """As of `MethodSpec`."""


class ModelSpec(Record):
    """The model by the content of its files."""

    id: str
    revision: str | None
    kind: Literal["autoregressive", "diffusion"]
    dtype: str
    params: int
    sha256: str
    tokenizer_sha256: str


class DenoisingSpec(Record):
    """How a diffusion model fills an answer in."""

    steps: int | None = None
    """Forward passes per answer; None: one for every `tokens_per_step` tokens."""
    tokens_per_step: int = 1
    """The model's own default, or the task's where that is less."""
    block: int | None = None
    """Tokens of a block, finished one after the other; None: the whole answer."""
    remasking: Literal["low-confidence", "random"] = "low-confidence"
    temperature: float = 0.0
    threshold: float | None = None
    """Commit all tokens of this probability; None: as many as the steps say."""


class GenerationSpec(Record):
    """How answers are made."""

    decoding: Literal["greedy", "denoising"] = "greedy"
    max_new_tokens: int | None = Field(None, validation_alias=AliasChoices("max_new_tokens", "limit"))
    """A cap on the number of tokens that the task allows for an answer; earlier files say `limit`."""
    denoising: DenoisingSpec | None = None
    """Of a diffusion model."""


class Versions(Record):
    """Packages that compute."""

    kvbench: str
    torch: str
    transformers: str


class Sources(Record):
    """sha256 of the code that computes."""

    method: str
    task: str
    kernels: str
    harness: str


PROTOCOL_VERSION: Literal[1] = 1
"""Raised when a change of the harness changes numbers: how prompts run, what is counted, how scores are averaged."""
NOT_IDENTITY: dict[str, Any] = {
    "schema_version": True, "versions": True, "sources": True, "method": {"family"}, "task": {"suite"},
}
"""Fields of a spec that two runs of one identity may differ in."""


class RunSpec(Record):
    """A run. Two runs of one spec have the same scores."""

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
    """As asked; None: the method takes none."""
    split: Literal["dev", "test"]
    seed: int
    samples: int
    turns: int
    batch: Literal[1] = 1
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

        The code that computed it (`versions`, `sources`) is provenance: recorded beside the identity, not part of it.
        """
        document = self.model_dump(mode="json", exclude=NOT_IDENTITY)
        for part in ("method", "task"):
            if document[part]["code"] is None:  # ids of registered ones are from before this field
                del document[part]["code"]
        generation = document["generation"]
        generation["limit"] = generation.pop("max_new_tokens")  # as in version 1: ids of earlier runs stay the same
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
    """How questions are asked of one context."""

    mode: Mode
    visibility: Visibility
    history: History
    recompress: bool
    turns: int


def resolve_protocol(
    mode: str, visibility: str | None, history: str | None, turns: int | None, *, recompress: bool, default_turns: int
) -> Protocol:
    """Fill in defaults and refuse what has no meaning.

    Raises:
        UserError: an unknown name, or names that do not go together.
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
            Mode.SINGLE: "one question is visible or hidden",
            Mode.MULTI_TURN: "only the first question can be there when the context is compressed",
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
    if turns is not None and turns < 1:
        raise UserError(f"turns {turns} must be 1 or more.")
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


def see_all(protocol: Protocol, visibility: str | None, chunk: int | None) -> Protocol:
    """The protocol on a diffusion model, which runs the whole prompt in every pass and carries nothing on.

    visibility, chunk: as asked.

    Raises:
        UserError: what has no meaning there.
    """
    if protocol.mode is Mode.MULTI_REQUEST:
        raise UserError(
            "mode multi-request has no meaning on a diffusion model: no cache outlives an answer, so that requests "
            "could share it. Use --mode single or multi-turn."
        )
    if visibility not in (None, "visible") or protocol.recompress or chunk is not None:
        raise UserError(
            "on a diffusion model every pass sees the whole prompt at once, and nothing is compressed once for all: "
            "leave --visibility, --recompress and --chunk out."
        )
    return protocol.model_copy(update={"visibility": "visible"})


def read_generation(given: dict[str, str]) -> GenerationSpec:
    """`--gen key=value` options.

    Raises:
        UserError: an unknown key, or a value that has no meaning.
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
"""`--gen` settings; all but max_new_tokens are for diffusion models."""
