"""RunSpec: every resolved setting that can change the outcome of a run. The run id is a hash of it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import to_jsonable_python

from kvbench.models.sources import is_random
from kvbench.runs.schema import SCHEMA_VERSION
from kvbench.task import Mode

if TYPE_CHECKING:
    from kvbench.hf import Model

Visibility = Literal["visible", "hidden", "first-turn"]
History = Literal["reference", "own"]
Implementation = Literal["torch", "triton", "flash"]
"""Implementations of operations: `kernels.choice.IMPLEMENTATIONS`."""


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

    @property
    def random(self) -> bool:
        """Whether its weights are random, so that its answers have no score."""
        return is_random(self.id)


class DenoisingSpec(Record):
    """How a diffusion model generates an answer."""

    steps: int | None = None
    """Denoising steps per answer; None: one per `tokens_per_step` tokens."""
    tokens_per_step: int = 1
    """The model's default, or the task's if that is smaller."""
    block: int | None = None
    """Tokens per block; blocks are finished in order, and divide the response block. None: it is one block."""
    remasking: Literal["low-confidence", "random"] = "low-confidence"
    temperature: float = 0.0
    threshold: float | None = None
    """Commit all tokens of at least this probability; None: a fixed number per step."""
    response_length: int | None = None
    """Tokens of the response block. None: as many as the answer may have."""


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
HASH_LENGTH = 64
NOT_IDENTITY: dict[str, Any] = {
    "schema_version": True, "versions": True, "sources": True, "bound": True, "method": {"family"}, "task": {"suite"},
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
    parts: int | None = Field(default=None, ge=1)
    """Tokens of the parts into which contexts are cut; None: the task's own parts, if any."""
    batch: int = Field(default=1, ge=1)
    """Answers decoded together."""
    chunk: int | None
    """Most prompt tokens per forward pass; None: the whole prompt at once."""
    kernels: Implementation
    device: Literal["cpu", "cuda"]
    generation: GenerationSpec
    versions: Versions
    sources: Sources
    weights_sha256: str | None = None
    """Of the weights in the file that the method's setting `weights` names; None: it names none."""
    bound: dict[str, str] | None = None
    """Values that the method resolved on the model, long ones as hashes. None: a file older than this field."""

    @property
    def run_id(self) -> str:
        """A readable name and the hash of the identity: versions, settings, and hashes of model and data.

        The code that computed it (`versions`, `sources`) is provenance: recorded next to the identity, not part of it.
        """
        document = self.model_dump(mode="json", exclude=NOT_IDENTITY)
        for part in ("method", "task"):
            if document[part]["code"] is None:  # run ids stay the same as before this field
                del document[part]["code"]
        for name in ("parts", "weights_sha256"):
            if document[name] is None:
                del document[name]
        generation = document["generation"]
        if generation["denoising"] is not None and generation["denoising"]["response_length"] is None:
            del generation["denoising"]["response_length"]
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

    def find_bound_changes(self, other: RunSpec) -> list[str]:
        """Differences between what the method resolved on the model here and in another run, usually today's."""
        if self.bound is None or other.bound is None:
            return []
        return [
            f"{name} {show_value(self.bound.get(name))}, now {show_value(other.bound.get(name))}"
            for name in sorted(self.bound.keys() | other.bound.keys())
            if self.bound.get(name) != other.bound.get(name)
        ]


def show_value(value: object) -> str:
    """A value for a message; of a hash, the beginning."""
    text = "none" if value is None else str(value)
    return text[:12] if re.fullmatch(rf"[0-9a-f]{{{HASH_LENGTH}}}", text) else text


def describe_bound(resolution: Mapping[str, object]) -> dict[str, str]:
    """Values that a method resolved on a model, as short texts; those longer than a hash as hashes."""
    texts = {
        name: value if isinstance(value, str) else json.dumps(to_jsonable_python(value), sort_keys=True)
        for name, value in resolution.items()
    }
    return {
        name: text if len(text) <= HASH_LENGTH else hashlib.sha256(text.encode()).hexdigest()
        for name, text in texts.items()
    }


def find_origin(spec: RunSpec) -> str:
    """The code that computes entries and the kind of device: a chunk of another origin is never used."""
    code, versions = spec.sources, spec.versions
    return (
        f"{code.method} {code.kernels} {code.harness} torch {versions.torch} transformers {versions.transformers} "
        f"{spec.kernels} {spec.device}"
    )


def shorten(run_id: str) -> str:
    """The hash at the end of a run id."""
    return run_id.rpartition("-")[2]
