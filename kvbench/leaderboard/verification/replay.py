"""Rebuilds the job of a finished run without its model, to regenerate examples and recompute the summary."""

from __future__ import annotations

import functools
import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from kvbench.budget import Budget, Shape
from kvbench.engine.agreement import FullCache
from kvbench.leaderboard.submission.outcome import refusing_errors
from kvbench.leaderboard.verification.lookup import predict
from kvbench.method import BudgetKind, Card, Method
from kvbench.runs.environment import find_versions
from kvbench.runs.examples import Made, make_examples
from kvbench.runs.provenance import find_sources
from kvbench.runs.spec import RunSpec, Sources
from kvbench.task import Scorer, Task
from kvbench.text.template import Frame

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase  # noqa: TID251  # its type

    from kvbench.runs.job import Job

CACHE_SIZE = 4
"""Sets of examples kept in memory: runs that are verified together mostly share them."""
_cache: OrderedDict[str, list[Made]] = OrderedDict()


@dataclass(frozen=True)
class MethodStub:
    """The part of a method that a summary needs: its card, and what its settings declare."""

    own_card: Card
    budget_kind: BudgetKind
    exact: bool
    """Whether its logits are declared to be the full cache's, so that nothing is compared."""


@dataclass(frozen=True)
class ModelStub:
    """The part of a model that examples, scores and summaries need."""

    id: str
    tokenizer: PreTrainedTokenizerBase
    random: bool
    device_map: dict[str, str] | None
    max_length: int
    vocabulary: int


@dataclass(frozen=True)
class Replay:
    """Stands in for a job without a model."""

    spec: RunSpec
    method: MethodStub
    task: Task
    scorer: Scorer
    model: ModelStub
    frame: Frame
    resolution: dict[str, object] = field(default_factory=dict)

    @property
    def job(self) -> Job:
        """Typed as a job, for functions that make examples, score or summarize: they use only these fields."""
        return cast("Job", self)


def remake_examples(replay: Replay) -> Iterator[Made]:
    """Regenerate the run's examples one at a time, so that a wrong first one ends the check early.

    Raises:
        RefusedError: the spec allows no examples.
    """
    spec = replay.spec.model_copy(update={"versions": _versions(), "sources": _sources(type(replay.task))})
    key = json.dumps(spec.model_dump(mode="json", include={
        "task": True, "split": True, "seed": True, "turns": True, "samples": True, "mode": True, "parts": True,
        "sources": {"task"}, "model": {"tokenizer_sha256"},
    }))
    if key not in _cache:
        made = []
        with refusing_errors("prompts", "its prompts cannot be generated"):
            for _, example, encoded in make_examples(replace(replay, spec=spec).job, range(spec.samples)):
                made.append((example, encoded))
                yield example, encoded
        _cache[key] = made
        if len(_cache) > CACHE_SIZE:
            _cache.popitem(last=False)
    else:
        _cache.move_to_end(key)
        yield from _cache[key]


def fit_budget(method: Method, spec: RunSpec, shape: Shape) -> Method:
    """Fit the method to the run's budget on a context of this shape.

    Raises:
        RefusedError: the budget cannot be reached.
    """
    with refusing_errors("bytes", f"{spec.method.name} cannot reach budget {spec.budget}"):
        return method.fit(None if spec.budget is None else Budget.parse(spec.budget), shape)


def find_shapes(spec: RunSpec, folder: Path, lengths: Sequence[int]) -> dict[int, Shape]:
    """Shapes of the full cache for contexts of these lengths, from the model's configuration.

    Raises:
        RefusedError: the model has no shape in this element type.
    """
    with refusing_errors("bytes", f"{spec.model.id} in {spec.model.dtype}"):
        shape = predict(folder, spec.model.dtype).shape
    return {length: replace(shape, length=length) for length in lengths}


@functools.cache
def _sources(task: type[Task]) -> Sources:
    """Cached; examples do not depend on the method, so any method will do."""
    return find_sources(FullCache, task)


_versions = functools.cache(find_versions)
