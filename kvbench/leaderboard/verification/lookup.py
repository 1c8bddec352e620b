"""What a submission names, found among what is here: its method, its task, its tokenizer. Nothing it brings is run.

Names are looked up in the lists that `kvbench list` shows. What looks like a path is nobody's: neither a file of code
nor a file of data is ever read because a stranger wrote where it is.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from kvbench.analysis.compare import is_full
from kvbench.errors import UserError
from kvbench.leaderboard.submission.records import Check
from kvbench.leaderboard.verification.outcome import RefusedError, blaming, flag, ok, show
from kvbench.method import BudgetKind, Card, Method
from kvbench.registry import Kind, find_method, find_task, list_entries
from kvbench.runs.command import write_setting
from kvbench.runs.results import Result
from kvbench.runs.spec import RunSpec
from kvbench.settings import configure, jsonable_settings, setting_fields, setting_types
from kvbench.task import Task, find_frame
from kvbench.template import Frame

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase  # noqa: TID251  # its type

    from kvbench.hf import Prediction


class StrangerError(Exception):
    """What a submission names is not here: no fault of its own, but what rests on it cannot be verified."""


def find_known_method(spec: RunSpec) -> tuple[Method, list[str]]:
    """The method with the run's settings, and the settings that it has got since.

    Raises:
        StrangerError: it is none of those here, of another version, or reads a file of the submitter's.
        RefusedError: it is one of those here, and cannot have these settings.
    """
    name, version = spec.method.name, spec.method.version
    if not set(name.split("+")) <= _names("method"):
        raise StrangerError(f"no method {show(name)} is here")
    with blaming("method", name):
        found = _method(name)
    if found.card.version != version:
        raise StrangerError(f"{name} is of version {show(version)}, and the one here of {found.card.version}")
    if file := _own_file(found, spec.method.settings):  # some methods read theirs when they are made
        raise StrangerError(f"setting {file} of {name} names a file of the submitter's")
    made = _configure(found, spec.method.settings, "method")
    return made, sorted(jsonable_settings(made).keys() - spec.method.settings.keys())


def check_card(result: Result, method: Method | None) -> tuple[Card, Check]:
    """The card that counts, ours where the method is here, and what is to be said of the result's.

    Raises:
        RefusedError: the result's is no card, of another method, or wrong where it decides what a row means.
    """
    with blaming("method", "its card"):
        said = Card.model_validate(result.method.card)
    named = result.method.name, result.method.version, result.method.family
    if (said.name, said.version, said.family) != named:
        raise RefusedError("method", f"its card is of {show(said.name)} version {show(said.version)}")
    if method is None:
        return said, flag("method", "its card is the submitter's own")
    ours = method.card
    for key in ("family", "budget", "models"):
        if getattr(said, key) != getattr(ours, key):
            raise RefusedError("method", f"{key} on its card is {show(getattr(said, key))}, not {getattr(ours, key)}")
    changed = sorted(key for key, value in ours if value != getattr(said, key))
    words = f"; what its card says has changed since in {', '.join(changed)}" if changed else ""
    return ours, ok("method", f"{ours.name} version {ours.version} is here{words}")


def is_known_full(result: Result) -> bool:
    """Whether it is the dense cache's: of a method that is here under its name, and of as many bytes.

    Anybody can write on a card that a method takes no budget and loses nothing, and into a journal what it holds.
    """
    if not is_full(result):
        return False
    try:
        method, _ = find_known_method(result.spec)
    except (StrangerError, RefusedError):
        return False
    dense = result.model.kind == "diffusion" or (result.memory is not None and result.memory.ratio_total == 1)
    return method.card.budget is BudgetKind.NONE and dense


def find_known_task(spec: RunSpec) -> Task:
    """The task with the run's settings.

    Raises:
        StrangerError: it is none of those here, of another version, or its data are.
        RefusedError: it is here, and what the spec says of it is not true.
    """
    said = spec.task
    if said.name not in _names("task"):
        raise StrangerError(f"no task {show(said.name)} is here")
    found = _task(said.name)
    if found.version != said.version:
        raise StrangerError(f"{said.name} is of version {show(said.version)}, and the one here of {found.version}")
    if file := _own_file(found, said.settings):
        raise StrangerError(f"setting {file} of {said.name} names a file of the submitter's")
    task: Task = _configure(found, said.settings, "task")
    with blaming("task", said.name):
        pairs: dict[str, tuple[object, object]] = {
            "suite": (said.suite, task.suite), "truncation": (said.truncation, task.truncation),
            "prompt_id": (said.prompt_id, task.prompt_id), "mode": (spec.mode in task.modes, True),
            "scorer": (said.scorer in {x.id for x in task.scorers}, True),
            "settings": (said.settings, jsonable_settings(task)),
        }
        revision = task.dataset_revision
    if revision != said.dataset_revision:
        raise StrangerError(f"its data are {show(said.dataset_revision)}, and those here {show(revision)}")
    if wrong := [key for key, (one, other) in pairs.items() if one != other]:
        raise RefusedError("task", f"its {wrong[0]} is not one of {said.name} version {said.version}")
    return task


def is_own_split(said: str, task: str) -> bool:
    """Whether settings were chosen on the very examples of a row: `TASK` or `TASK:test`, by any name of its task."""
    if said.endswith(":dev"):
        return False
    name = said.removesuffix(":test")
    return any(name in (x.name, *x.aliases) for x in list_entries("task") if x.name == task) or name == task


def find_known_tokenizer(spec: RunSpec, task: Task) -> tuple[PreTrainedTokenizerBase, Frame, Path]:
    """The tokenizer of the run's model, how it frames a prompt, and the folder that it is from.

    Raises:
        StrangerError: it is not here.
        RefusedError: it is, and is not the run's.
    """
    from kvbench.hf import find_copy

    said = spec.model
    folder = find_copy(said.id, said.revision)
    if folder is None:
        raise StrangerError(f"model {show(said.id)} at {show(said.revision)} is not on this machine")
    try:
        tokenizer, found = _load(folder)
    except UserError as error:
        raise StrangerError(str(error)) from error
    if found != said.tokenizer_sha256:
        raise RefusedError(
            "tokenizer", f"the tokenizer of {show(said.id)} is {found[:12]}, the run's {show(said.tokenizer_sha256)}"
        )
    tokenizer, frame = find_frame(task, tokenizer, "none" if spec.task.chat_template_sha is None else "own")
    if frame.sha != spec.task.chat_template_sha:
        raise RefusedError(
            "tokenizer", f"the chat template of {show(said.id)} is {frame.sha}, the run's "
            f"{show(spec.task.chat_template_sha)}"
        )
    return tokenizer, frame, folder


def check_model(spec: RunSpec, card: Card, folder: Path) -> Check:
    """Whether the run's weights are those that are here under its model's name.

    Raises:
        RefusedError: no such model has so many parameters, or the method is for another kind.
    """
    from kvbench.hf.find import hash_model

    said = spec.model
    if card.models != said.kind:
        raise RefusedError("model", f"{spec.method.name} is for {card.models} models, and its model is {said.kind}")
    with blaming("model", f"{said.id} in {show(said.dtype)}"):
        params = predict(folder, said.dtype).params
    if params != said.params:
        raise RefusedError("model", f"{said.id} has {params} parameters, not {said.params}")
    if not any(folder.glob("*.safetensors")) and not said.id.startswith("random:"):
        return flag("model", f"the weights of {said.id} are not on this machine: not compared")
    found = hash_model(said.id, folder)
    if found != said.sha256:
        return flag("model", f"the weights of {said.id} are {found[:12]} here, the run's {show(said.sha256[:12])}")
    return ok("model", f"{said.id} is here, with the run's weights")


def _own_file(kind: type[Method | Task], settings: Mapping[str, Any]) -> str | None:
    """The first setting with free text of the submitter's, which is where kvbench takes paths."""
    types, fields = setting_types(kind), setting_fields(kind)
    for name, value in settings.items():
        if name in types and value is not None and value != fields[name].default and _is_text(types[name]):
            return name
    return None


def _is_text(kind: Any) -> bool:
    """Whether a setting of this type can hold any text, and not only words that the type lists."""
    return kind in (str, Path) or (get_origin(kind) is not Literal and any(_is_text(x) for x in get_args(kind)))


def _configure(found: type[Any], settings: Mapping[str, Any], kind: Kind) -> Any:
    """An instance that has these settings, and where they are silent its own."""
    name = found.card.name if kind == "method" else found.name
    with blaming(kind, f"{name} cannot have its settings"):
        made = configure(found, {key: write_setting(x) for key, x in settings.items()}, "setting", name)
    if wrong := [key for key, value in jsonable_settings(made).items() if settings.get(key, value) != value]:
        raise RefusedError(kind, f"{name} cannot have its settings: {wrong[0]} is not {show(settings[wrong[0]])}")
    return made


@functools.cache
def predict(folder: Path, dtype: str) -> Prediction:
    """The size and the shape of a model in this element type."""
    from kvbench.hf import predict_memory

    return predict_memory(str(folder), dtype)


@functools.cache
def _method(name: str) -> type[Method]:
    return find_method(name)


@functools.cache
def _task(name: str) -> type[Task]:
    return find_task(name)


@functools.cache
def _names(kind: Kind) -> frozenset[str]:
    return frozenset(x.name for x in list_entries(kind))


@functools.cache
def _load(folder: Path) -> tuple[PreTrainedTokenizerBase, str]:
    from kvbench.hf import load_tokenizer
    from kvbench.hf.find import hash_tokenizer

    tokenizer = load_tokenizer(str(folder))
    return tokenizer, hash_tokenizer(tokenizer)
