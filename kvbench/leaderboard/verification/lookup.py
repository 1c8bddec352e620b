"""Finds the method, task, tokenizer and model that a submission names among those installed here.

Names are looked up in the lists that `kvbench list` shows. Paths in a submission are never followed, and none of its
code is run.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from kvbench.analysis.compare import is_full
from kvbench.constraints import setting_fields, setting_types
from kvbench.errors import UserError
from kvbench.leaderboard.submission.bundle import Head
from kvbench.leaderboard.submission.outcome import RefusedError, flag, ok, quote, refusing_errors
from kvbench.leaderboard.submission.records import METHOD, Check
from kvbench.method import BudgetKind, Card, Method
from kvbench.registry import Kind, find_method, find_task, list_entries
from kvbench.runs.command import write_setting
from kvbench.runs.provenance import hash_contents
from kvbench.runs.results import Result
from kvbench.runs.spec import RunSpec
from kvbench.settings import configure, jsonable_settings
from kvbench.task import Split, Task, find_frame
from kvbench.text.template import Frame, find_bos

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase  # noqa: TID251  # its type

    from kvbench.hf import ModelSize


LOOKALIKES = str.maketrans("01i5", "olls")
PAIRS = {"rn": "m", "vv": "w"}
"""Two letters that look like one."""


class UnverifiableError(Exception):
    """Something that the submission names is not installed here, so the parts that depend on it are not verified."""


def find_known_method(spec: RunSpec) -> tuple[Method, list[str]]:
    """Return the method with the run's settings, and the names of settings added to the method since.

    Raises:
        UnverifiableError: it is not registered, has another version, or a setting is a path.
        RefusedError: it is registered, and does not accept these settings.
    """
    name, version = spec.method.name, spec.method.version
    if not set(name.split("+")) <= _names("method"):
        raise UnverifiableError(f"method {quote(name)} is not registered here")
    if spec.method.code is not None:
        raise UnverifiableError(f"{name} ran from the submitter's own file, not as the registered method")
    with refusing_errors("method", name):
        found = _method(name)
    if found.card.version != version:
        raise UnverifiableError(f"{name} has version {quote(version)}, here it has {found.card.version}")
    if file := _find_path_setting(found, spec.method.settings):  # some methods read such a file in their constructor
        raise UnverifiableError(f"setting {file} of {name} may name a file of the submitter")
    made = _configure(found, spec.method.settings, "method")
    return made, sorted(jsonable_settings(made).keys() - spec.method.settings.keys())


def check_method_name(name: str) -> None:
    """Check that no reader can take the name for another one.

    Raises:
        RefusedError: it is not printable ASCII, has a + that joins no methods, or differs from a registered name, or
            from several in a row, only in case, punctuation or characters that look alike.
    """
    if not name or not name.isascii() or not name.isprintable() or name != name.strip():
        raise RefusedError("method", f"its name {quote(name)} is not printable ASCII")
    parts = name.split("+")
    if not all(parts):
        raise RefusedError("method", f"its name {quote(name)} has a + without a method on both sides")
    skeletons = {skeleton(x): x for x in _names("method")}
    for part in (*parts, name):
        known = skeletons.get(skeleton(part), part)
        if part != known:
            raise RefusedError("method", f"its name {quote(name)} can be taken for the registered method {known}")
    composed = re.fullmatch(f"(?:{'|'.join(skeletons)})+", skeleton(name))
    if composed and not set(parts) <= _names("method"):
        raise RefusedError("method", f"its name {quote(name)} can be taken for registered methods in a row")


def check_source(bundle: Head) -> Check | None:
    """Check that a submitted method of the submitter's own comes with the source that ran. Nothing of it is run.

    Raises:
        RefusedError: the source is missing, is other code, or goes by the name of a registered method.
    """
    stated, manifest = bundle.spec.method, bundle.manifest
    if manifest is None:  # a run of the user's own
        return None
    name, known = quote(stated.name), set(stated.name.split("+")) <= _names("method")
    if stated.code is None:
        if not known:
            raise RefusedError(
                "source", f"method {name} is not registered here: run it by its file, and submit it with --source FILE"
            )
        if manifest.source is not None:
            raise RefusedError("source", f"method {name} is registered, and did not run from {quote(manifest.source)}")
        return None
    if known:
        raise RefusedError("source", f"a method of the submitter's own has the registered name {name}: give it another")
    if manifest.source is None:
        raise RefusedError("source", f"method {name} comes without its source: submit it with --source FILE")
    content = bundle.files[METHOD]
    if hash_contents([(manifest.source, content)]) != stated.code:
        raise RefusedError("source", f"{quote(manifest.source)} is not the code that ran as method {name}")
    with refusing_errors("source", quote(manifest.source)):
        content.decode("utf-8")
    return ok("source", f"{manifest.source}, {len(content):,} bytes, is the code that ran; it is shown and was not run")


def check_card(result: Result, method: Method | None) -> tuple[Card, Check]:
    """Return the card that counts (ours if the method is registered), and the check of the submitted one.

    Raises:
        RefusedError: the card is invalid, of another method, or differs from ours in family, budget kind or models.
    """
    with refusing_errors("method", "its card"):
        stated = Card.model_validate(result.method.card)
    named = result.method.name, result.method.version, result.method.family
    if (stated.name, stated.version, stated.family) != named:
        raise RefusedError("method", f"its card describes {quote(stated.name)} version {quote(stated.version)}")
    if method is None:
        return stated, flag("method", "its card is the submitter's and was not checked")
    ours = method.own_card
    for key in ("family", "budget", "models"):
        known = (ours.budget, method.budget_kind) if key == "budget" else (getattr(ours, key),)
        if getattr(stated, key) not in known:
            raise RefusedError(
                "method", f"{key} on its card is {quote(getattr(stated, key))}, not {getattr(ours, key)}"
            )
    changed = sorted(key for key, value in ours if value != getattr(stated, key))
    words = f"; its card has changed since in {', '.join(changed)}" if changed else ""
    return ours, ok("method", f"{ours.name} version {ours.version} is registered{words}")


def is_known_full(result: Result) -> bool:
    """Whether the run is of the full cache: a registered method without a budget, and as many bytes as the full cache.

    Card and journal alone prove nothing, since the submitter writes both.
    """
    if not is_full(result):
        return False
    try:
        method, _ = find_known_method(result.spec)
    except (UnverifiableError, RefusedError):
        return False
    whole = result.model.kind == "diffusion" or (result.memory is not None and result.memory.ratio_total == 1)
    return method.budget_kind is BudgetKind.NONE and whole


def find_known_task(spec: RunSpec) -> Task:
    """Return the task with the run's settings.

    Raises:
        UnverifiableError: it is not registered, has another version, or other data.
        RefusedError: it is registered, and the spec contradicts it.
    """
    stated = spec.task
    if stated.name not in _names("task"):
        raise UnverifiableError(f"task {quote(stated.name)} is not registered here")
    found = _task(stated.name)
    if found.version != stated.version:
        raise UnverifiableError(f"{stated.name} has version {quote(stated.version)}, here it has {found.version}")
    if stated.code is not None:
        raise UnverifiableError(f"{stated.name} was the submitter's own file, not the registered task")
    if file := _find_path_setting(found, stated.settings):
        raise UnverifiableError(f"setting {file} of {stated.name} may name a file of the submitter")
    task: Task = _configure(found, stated.settings, "task")
    with refusing_errors("task", stated.name):
        pairs: dict[str, tuple[object, object]] = {
            "suite": (stated.suite, task.suite), "truncation": (stated.truncation, task.truncation),
            "prompt_id": (stated.prompt_id, task.prompt_id), "mode": (spec.mode in task.modes, True),
            "scorer": (stated.scorer in {x.id for x in task.scorers}, True),
            "settings": (_write(stated.settings), _write(jsonable_settings(task))),
        }
        revision = task.dataset_revision
    if revision != stated.dataset_revision:
        raise UnverifiableError(f"its data revision is {quote(stated.dataset_revision)}, here it is {quote(revision)}")
    if wrong := [key for key, (one, other) in pairs.items() if one != other]:
        raise RefusedError("task", f"its {wrong[0]} does not fit {stated.name} version {stated.version}")
    return task


def is_task_known(stated: str) -> bool:
    """Whether this is `TASK`, `TASK:dev` or `TASK:test` of a registered task, under any alias."""
    return any(_name_task(stated) in x.names for x in list_entries("task"))


def is_tuned_on_test(stated: str, task: str) -> bool:
    """Whether settings were chosen on the test examples of this task: `TASK` or `TASK:test`, under any alias."""
    if stated.endswith(":dev"):
        return False
    name = _name_task(stated)
    return any(name in x.names for x in list_entries("task") if x.name == task) or name == task


def _name_task(stated: str) -> str:
    """The task of a statement such as `niah:dev`."""
    name, _, split = stated.rpartition(":")
    return name if split in (Split.DEV, Split.TEST) else stated


def find_known_tokenizer(spec: RunSpec, task: Task) -> tuple[PreTrainedTokenizerBase, Frame, Path]:
    """Return the tokenizer of the run's model, its chat frame, and its folder.

    Raises:
        UnverifiableError: it is not on this machine.
        RefusedError: it is, and differs from the run's.
    """
    from kvbench.hf import find_copy

    stated = spec.model
    folder = find_copy(stated.id, stated.revision)
    if folder is None:
        raise UnverifiableError(f"model {quote(stated.id)} at {quote(stated.revision)} is not on this machine")
    try:
        tokenizer, found = _load(folder)
    except UserError as error:
        raise UnverifiableError(str(error)) from error
    if found != stated.tokenizer_sha256:
        raise RefusedError(
            "tokenizer",
            f"the tokenizer of {quote(stated.id)} is {found[:12]}, the run's {quote(stated.tokenizer_sha256)}",
        )
    tokenizer, frame = find_frame(task, tokenizer, "none" if spec.task.chat_template_sha is None else "own")
    if frame.sha != spec.task.chat_template_sha:
        raise RefusedError(
            "tokenizer", f"the chat template of {quote(stated.id)} is {frame.sha}, the run's "
            f"{quote(spec.task.chat_template_sha)}"
        )
    if (bos := find_bos(tokenizer, frame)) != spec.task.bos:
        raise RefusedError("tokenizer", f"its prompts begin as bos {spec.task.bos} says, the tokenizer's as {bos}")
    return tokenizer, frame, folder


def check_model(spec: RunSpec, card: Card, folder: Path) -> tuple[ModelSize, Check]:
    """Compare the run's model with the installed one of that name, whose size is returned.

    Raises:
        RefusedError: other number of parameters, a method for the other kind of model, or more tokens than it supports.
    """
    from kvbench.hf.find import find_revision, hash_model

    stated = spec.model
    if card.models != stated.kind:
        raise RefusedError("model", f"{spec.method.name} is for {card.models} models, and its model is {stated.kind}")
    with refusing_errors("model", f"{stated.id} in {quote(stated.dtype)}"):
        size = predict(folder, stated.dtype)
    if size.params != stated.params:
        raise RefusedError("model", f"{stated.id} has {size.params} parameters, not {stated.params}")
    if (longest := max(spec.task.length, spec.turns)) > size.max_length:  # a turn has at least one token
        raise RefusedError(
            "model", f"{stated.id} supports {size.max_length} tokens, and its contexts and turns need {longest}"
        )
    if stated.revision != (revision := find_revision(folder)):
        raise RefusedError(
            "model", f"its revision is {quote(stated.revision)}, that of {stated.id} is {quote(revision)}"
        )
    if not any(folder.glob("*.safetensors")) and not stated.random:
        return size, flag("model", f"the weights of {stated.id} are not on this machine: not compared")
    found = hash_model(stated.id, folder)
    if found != stated.sha256:
        there = quote(stated.sha256[:12])
        return size, flag("weights", f"the weights of {stated.id} have hash {found[:12]} here, {there} in the run")
    return size, ok("model", f"{stated.id} with the run's weights is on this machine")


def skeleton(name: str) -> str:
    """The name without case and punctuation, look-alikes as one character."""
    text = "".join(x for x in name.lower() if x.isalnum()).translate(LOOKALIKES)
    for pair, one in PAIRS.items():
        text = text.replace(pair, one)
    return text


def _find_path_setting(kind: type[Method | Task], settings: Mapping[str, Any]) -> str | None:
    """Name of the first setting that holds free text and thus may be a path; None if there is none."""
    types, fields = setting_types(kind), setting_fields(kind)
    for name, value in settings.items():
        if name in types and value is not None and value != fields[name].default and _is_text(types[name]):
            return name
    return None


def _is_text(kind: Any) -> bool:
    """Whether a setting of this type accepts arbitrary text, not only listed words."""
    return kind in (str, Path) or any(map(_is_text, get_args(kind)))


def _configure(found: type[Any], settings: Mapping[str, Any], kind: Kind) -> Any:
    """Create an instance with these settings and the defaults for all others."""
    name = found.card.name if kind == "method" else found.name
    with refusing_errors(kind, f"{name} does not accept its settings"):
        made = configure(found, {key: write_setting(x) for key, x in settings.items()}, "setting", name)
    ours = jsonable_settings(made)
    if wrong := [key for key, value in ours.items() if _write(settings.get(key, value)) != _write(value)]:
        raise RefusedError(kind, f"{name} does not accept its settings: {wrong[0]} is not {quote(settings[wrong[0]])}")
    return made


def _write(value: object) -> str:
    """As JSON, in which 1, 1.0 and true differ, as they do in a run's id."""
    return json.dumps(value, sort_keys=True)


@functools.cache
def predict(folder: Path, dtype: str) -> ModelSize:
    """Size and shape of a model in this element type, from its configuration."""
    from kvbench.hf import predict_memory

    return predict_memory(str(folder), dtype)


_method, _task = functools.cache(find_method), functools.cache(find_task)


@functools.cache
def _names(kind: Kind) -> frozenset[str]:
    return frozenset(x.name for x in list_entries(kind))


@functools.cache
def _load(folder: Path) -> tuple[PreTrainedTokenizerBase, str]:
    from kvbench.hf import load_tokenizer
    from kvbench.hf.find import hash_tokenizer

    tokenizer = load_tokenizer(str(folder))
    return tokenizer, hash_tokenizer(tokenizer)
