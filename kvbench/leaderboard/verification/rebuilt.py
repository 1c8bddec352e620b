"""A finished run in the place of the job that made it: its examples made again, its lines summed up again, no model."""

from __future__ import annotations

import functools
import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from kvbench import __version__
from kvbench.budget import Budget, Shape
from kvbench.engine.agreement import Dense
from kvbench.leaderboard.verification.lookup import predict
from kvbench.leaderboard.verification.outcome import blaming
from kvbench.machine import find_version
from kvbench.method import Card, Method
from kvbench.runs.examples import Made, make_examples
from kvbench.runs.provenance import find_sources
from kvbench.runs.spec import RunSpec, Sources, Versions
from kvbench.task import Scorer, Task
from kvbench.template import Frame

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase  # noqa: TID251  # its type

    from kvbench.runs.job import Job

KEPT = 4
"""Sets of examples that are kept in memory: runs that are verified together mostly have the same."""
_kept: OrderedDict[str, list[Made]] = OrderedDict()


@dataclass(frozen=True)
class Account:
    """Of a method, what a summary asks: its card."""

    card: Card


@dataclass(frozen=True)
class Outline:
    """Of a model, what examples, scores and a summary ask."""

    tokenizer: PreTrainedTokenizerBase
    random: bool
    device_map: dict[str, str] | None


@dataclass(frozen=True)
class Replay:
    """What stands for a job where nothing runs."""

    spec: RunSpec
    method: Account
    task: Task
    scorer: Scorer
    model: Outline
    frame: Frame
    resolution: dict[str, object] = field(default_factory=dict)

    @property
    def job(self) -> Job:
        """As the functions take it that make examples, judge and summarize: they look at nothing that is not here."""
        return cast("Job", self)


def make_again(replay: Replay) -> Iterator[Made]:
    """The run's examples, made by the code that is here, one after the other: the first may be proof enough.

    Raises:
        RefusedError: with this spec they cannot be.
    """
    spec = replay.spec.model_copy(update={"versions": _versions(), "sources": _sources(type(replay.task))})
    key = json.dumps(spec.model_dump(mode="json", include={
        "task": True, "split": True, "seed": True, "turns": True, "samples": True, "mode": True, "sources": {"task"},
        "model": {"tokenizer_sha256"},
    }))
    if key not in _kept:
        made = []
        with blaming("prompts", "its prompts cannot be made"):
            for _, example, encoded in make_examples(replace(replay, spec=spec).job, range(spec.samples)):
                made.append((example, encoded))
                yield example, encoded
        _kept[key] = made
        if len(_kept) > KEPT:
            _kept.popitem(last=False)
    else:
        _kept.move_to_end(key)
        yield from _kept[key]


def fit(method: Method, spec: RunSpec, shape: Shape) -> Method:
    """The method at the run's budget on a context of this shape.

    Raises:
        RefusedError: the budget cannot be reached.
    """
    with blaming("bytes", f"{spec.method.name} cannot have budget {spec.budget}"):
        return method.fit(None if spec.budget is None else Budget.parse(spec.budget), shape)


def shapes(spec: RunSpec, folder: Path, lengths: Sequence[int]) -> dict[int, Shape]:
    """The dense cache of contexts of these lengths, from the model's configuration.

    Raises:
        RefusedError: it has none with this element type.
    """
    with blaming("bytes", f"{spec.model.id} in {spec.model.dtype}"):
        shape = predict(folder, spec.model.dtype).shape
    return {length: replace(shape, length=length) for length in lengths}


@functools.cache
def _sources(task: type[Task]) -> Sources:
    """Examples have no part of a method."""
    return find_sources(Dense, task)


@functools.cache
def _versions() -> Versions:
    import torch

    return Versions(
        kvbench=__version__, torch=torch.__version__, transformers=find_version("transformers") or "unknown"
    )
