"""A spec as what one would ask `kvbench run` for."""

from __future__ import annotations

import json
import shlex

from kvbench.runs.options import Request, list_options
from kvbench.runs.spec import RunSpec


def write_request(spec: RunSpec) -> Request:
    """What makes a run of this spec, as `kvbench run` would be asked."""
    filling = spec.generation.denoising
    generation: dict[str, object] = {"max_new_tokens": spec.generation.max_new_tokens}
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
    for option in list_options():
        value = getattr(request, option.name)
        if (value == option.default and not option.required) or (option.name, value) == ("history", "reference"):
            continue
        if option.repeatable:
            words += [word for x in value for word in (option.flag, x)]
        else:
            words += [option.flag] if value is True else [option.flag, str(value)]
    return shlex.join(words)
