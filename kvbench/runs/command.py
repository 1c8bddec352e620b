"""The request and the command line that make a run of a spec."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import replace

from kvbench.runs.options import Request, list_options
from kvbench.runs.spec import RunSpec


def write_request(spec: RunSpec) -> Request:
    """The request of a spec, as `kvbench run` would take it."""
    denoising = spec.generation.denoising
    generation: dict[str, object] = {"max_new_tokens": spec.generation.max_new_tokens}
    if denoising is not None:
        generation |= denoising.model_dump(exclude={"tokens_per_step"})
    return Request(
        method=spec.method.name, task=spec.task.name, model=spec.model.id, budget=spec.budget, mode=spec.mode,
        visibility=None if spec.model.kind == "diffusion" else spec.visibility,  # a diffusion model has no choice
        history=spec.history, recompress=spec.recompress,
        template="none" if spec.task.chat_template_sha is None else "own", scorer=spec.task.scorer, split=spec.split,
        length=spec.task.length, samples=spec.samples, turns=spec.turns, parts=spec.parts, seed=spec.seed,
        method_settings=write_settings(spec.method.settings), task_settings=write_settings(spec.task.settings),
        generation=write_settings({key: value for key, value in generation.items() if value is not None}),
        chunk=spec.chunk,
        batch=None if spec.batch == 1 else str(spec.batch), kernels=spec.kernels, dtype=spec.model.dtype,
        suite=spec.suite,
    )


def write_settings(settings: Mapping[str, object]) -> tuple[str, ...]:
    """Settings as `key=value` for `--set`."""
    return tuple(f"{key}={write_setting(value)}" for key, value in settings.items())


def write_setting(value: object) -> str:
    """A value as text for `--set`."""
    return value if isinstance(value, str) else json.dumps(value)


def write_command(spec: RunSpec) -> str:
    """The command line without default options, quoted for a shell. The default device differs between machines."""
    request = replace(write_request(spec), device=spec.device)
    words = ["kvbench", "run"]
    for option in list_options():
        value = getattr(request, option.name)
        if (value == option.default and not option.required) or (option.name, value) == ("history", "reference"):
            continue
        if option.repeatable:
            words += [word for x in value for word in (option.flag, x)]
        else:
            words += [option.flag] if value is True else [option.flag, str(value)]
    return shlex.join(words)
