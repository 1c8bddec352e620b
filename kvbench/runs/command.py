"""A spec as what one would ask `kvbench run` for."""

from __future__ import annotations

import json
import shlex
from dataclasses import fields

from kvbench.runs.request import Request
from kvbench.runs.spec import RunSpec

OPTIONS = {"method_settings": "--set", "task_settings": "--task-set", "generation": "--gen"}
"""Of those that may come more than once."""


def write_request(spec: RunSpec) -> Request:
    """What makes a run of this spec, as `kvbench run` would be asked."""
    filling = spec.generation.denoising
    generation: dict[str, object] = {"limit": spec.generation.limit}
    if filling is not None:
        generation |= filling.model_dump(exclude={"tokens_per_step"})
    return Request(
        method=spec.method.name, task=spec.task.name, model=spec.model.id, budget=spec.budget, mode=spec.mode,
        visibility=spec.visibility, history=spec.history, recompress=spec.recompress,
        template="none" if spec.task.chat_template_sha is None else "own", scorer=spec.task.scorer, split=spec.split,
        length=spec.task.length, samples=spec.samples, turns=spec.turns, seed=spec.seed,
        method_settings=_pairs(spec.method.settings), task_settings=_pairs(spec.task.settings),
        generation=_pairs({key: value for key, value in generation.items() if value is not None}), chunk=spec.chunk,
        kernels=spec.kernels, dtype=spec.model.dtype, suite=spec.suite,
    )


def _pairs(settings: dict[str, object]) -> tuple[str, ...]:
    return tuple(f"{key}={write_setting(value)}" for key, value in settings.items())


def write_setting(value: object) -> str:
    """A setting as `--set` takes it."""
    return value if isinstance(value, str) else json.dumps(value)


def write_command(spec: RunSpec) -> str:
    """The command line, without what is a default; a shell takes it as it stands, whatever the names hold."""
    request = write_request(spec)
    words = ["kvbench", "run"]
    for field in fields(Request):
        value = getattr(request, field.name)
        if value == field.default or field.name == "suite" or (field.name, value) == ("history", "reference"):
            continue
        option = OPTIONS.get(field.name, f"--{field.name}")
        if isinstance(value, tuple):
            words += [word for x in value for word in (option, x)]
        else:
            words += [option] if value is True else [option, str(value)]
    return shlex.join(words)
