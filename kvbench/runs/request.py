"""What a user typed and what it means: names found, settings read and the protocol checked, before any model."""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

from kvbench.budget import DEFAULT_BUDGET, Budget, BudgetKind
from kvbench.errors import UserError, unknown
from kvbench.kernels.choice import IMPLEMENTATIONS, REST
from kvbench.method import Method
from kvbench.registry import find_method, find_task, list_architectures, list_models, list_ops
from kvbench.runs.options import Request
from kvbench.runs.provenance import find_ops
from kvbench.runs.spec import GenerationSpec, Protocol, read_generation, resolve_protocol, see_all
from kvbench.settings import configure, parse_pairs
from kvbench.task import Mode, Scorer, Split, Task
from kvbench.template import Template

DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
"""transformers' own ways to spread a model over the GPUs of a machine, then its memory, then its disk."""


@dataclass(frozen=True)
class ResolvedRequest:
    """A request whose every name and setting is found; only what the model has to say is open."""

    request: Request
    task: Task
    method: Method
    protocol: Protocol
    template: Template
    scorer: Scorer
    budget: Budget | None
    generation: GenerationSpec
    length: int


def check(request: Request) -> ResolvedRequest:
    """Look up every name and read every setting; methods, which import torch, come last.

    Raises:
        UserError: whatever is wrong with the request, the model and the device apart.
    """
    task_class = find_task(request.task)
    task = configure(task_class, parse_pairs(request.task_settings, "--task-set"), "--task-set", request.task)
    protocol = resolve_protocol(
        request.mode, request.visibility, request.history, request.turns, recompress=request.recompress,
        default_turns=task.default_turns,
    )
    if protocol.mode not in task.modes:
        raise unknown(f"mode for task {task.name}", request.mode, [str(x) for x in task.modes])
    if task.leak is not None and protocol.visibility == "hidden" and protocol.mode is not Mode.MULTI_REQUEST:
        raise UserError(f"{task.name} cannot be hidden: its context begins with {task.leak}. Leave --visibility out.")
    if request.template not in get_args(Template):
        raise unknown("template", request.template, get_args(Template))
    template = cast("Template", request.template)
    scorer = find_scorer(task, request.scorer)
    budget = None if request.budget is None else Budget.parse(request.budget)
    generation = read_generation(parse_pairs(request.generation, "--gen"))
    length = task.default_length if request.length is None else request.length
    _check_numbers(request, length)
    task.check_samples(request.samples)
    check_kernels(request.kernels)
    _check_output(request)
    if request.device_map is not None:
        read_device_map(request.device_map)
        if request.model.startswith("random:"):
            raise UserError(f"model '{request.model}' has no files to spread by a device map. Leave --device-map out.")
    method_class = find_method(request.method)
    _check_operations(request, method_class)
    method = configure(method_class, parse_pairs(request.method_settings, "--set"), "--set", request.method)
    if protocol.recompress:
        method.require_recompressible()
    if method.card.models == "diffusion":
        protocol = see_all(protocol, request.visibility, request.chunk)
    budget = _resolve_budget(budget, method)
    return ResolvedRequest(request, task, method, protocol, template, scorer, budget, generation, length)


def find_scorer(task: Task | type[Task], name: str | None) -> Scorer:
    """A task's scorer by id; None: its first.

    Raises:
        UserError: the task has no such scorer.
    """
    known = {x.id: x for x in task.scorers}
    if name is not None and name not in known:
        raise unknown(f"scorer of {task.name}", name, known)
    return known[name] if name is not None else task.scorers[0]


def read_device_map(text: str) -> str | dict[str, str | int]:
    """What transformers takes: one of its words, or the object in a JSON file.

    Raises:
        UserError: neither, or no accelerate to do it.
    """
    found: object = text
    if text not in DEVICE_MAPS:
        if not text.endswith(".json"):
            raise unknown("device map", text, DEVICE_MAPS, "Or give a .json file of places by module name.")
        try:
            found = json.loads(Path(text).expanduser().read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"device map '{text}' cannot be read: {error}.") from error
        if not isinstance(found, dict) or not found or not all(isinstance(x, str | int) for x in found.values()):
            raise UserError(
                f"device map '{text}' is no object of places by module name. Write for example "
                '{"model.embed_tokens": 0, ...}; a place is the number of a GPU, "cpu" or "disk".'
            )
    if importlib.util.find_spec("accelerate") is None:
        raise UserError("--device-map needs the package accelerate. Install it: pip install 'kvbench[accelerate]'")
    return cast("str | dict[str, str | int]", found)


def _check_numbers(request: Request, length: int) -> None:
    for name, value in (("samples", request.samples), ("length", length), ("chunk", request.chunk)):
        if value is not None and value < 1:
            raise UserError(f"{name} {value} must be 1 or more.")
    if request.split not in tuple(Split):
        raise unknown("split", request.split, [str(x) for x in Split])


def check_kernels(name: str) -> None:
    """Refuse an implementation that is unknown, or whose package is missing.

    Raises:
        UserError: with the package.
    """
    if name not in IMPLEMENTATIONS:
        raise unknown("kernels", name, IMPLEMENTATIONS)
    for kernels, package in (("triton", "triton"), ("flash", "flash_attn")):
        if name == kernels and importlib.util.find_spec(package) is None:
            raise UserError(
                f"kernels '{name}' need the package {package.replace('_', '-')}. "
                f"Install it: pip install 'kvbench[{name}]'"
            )


def check_kernels_device(kernels: str, device: str) -> None:
    """Refuse an implementation that a kind of device does not run.

    Raises:
        UserError: with what to do.
    """
    if kernels == "triton" and device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise UserError(
            "kernels 'triton' need a GPU, and this run is on cpu. Use --kernels torch, or set TRITON_INTERPRET=1 to "
            "have them interpreted, for tests: that is very slow."
        )
    if kernels == "flash" and device == "cpu":
        raise UserError("kernels 'flash' need a GPU, and this run is on cpu. Use --kernels torch.")


def check_kernels_dtype(kernels: str, device: str, dtype: str) -> None:
    """Refuse an implementation that does not compute in a model's element type.

    Raises:
        UserError: with what to do.
    """
    if kernels == "flash" and dtype == "float32":
        raise UserError("kernels 'flash' compute in 16 bits. Use --dtype bfloat16, or --kernels torch.")
    if kernels == "triton" and device == "cpu" and dtype == "bfloat16":
        raise UserError("Triton's interpreter multiplies bfloat16 wrongly. Use --dtype float32, or --kernels torch.")


def _check_operations(request: Request, method: type[Method]) -> None:
    """Every operation that the method's run loads must have the implementation: none stands in for it."""
    if REST.get(request.kernels, request.kernels) != "torch":
        used = find_ops(method)
        missing = [op for op, found in list_ops().items() if op in used and request.kernels not in found]
        if missing:
            raise UserError(
                f"kernels '{request.kernels}' are missing for what {request.method} uses: {', '.join(missing)}. "
                "Use --kernels torch."
            )


def _check_output(request: Request) -> None:
    for package in request.trackers:
        if importlib.util.find_spec(package) is None:
            raise UserError(f"--{package} needs the package {package}. Install it: pip install {package}")
    folder = request.out.absolute()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise UserError(f"output folder '{request.out}' cannot be made: {folder} is a file. Give another --out.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"output folder '{request.out}' is not writable. Give another --out.")


def check_model(name: str) -> None:
    """Refuse the name of nothing before the slow imports; what looks like a path or a hub id is the loader's.

    Raises:
        UserError: no bundled model, no folder, and no path or hub id.
    """
    source = name.removeprefix("random:")
    if name != source and source in list_architectures():
        raise UserError(
            f"model '{name}' is a shape without a tokenizer, for `kvbench bench` and `kvbench plan`. A task needs one: "
            "give random: before a local folder or a hub id."
        )
    if "/" not in source and source not in list_models() and not Path(source).expanduser().is_dir():
        raise unknown("model", name, list_models(), "Or give a local folder or a hub id such as org/name.")


def _resolve_budget(asked: Budget | None, method: Method) -> Budget | None:
    """The default where none was asked for; how far it can be reached needs the model."""
    card = method.card
    if card.budget is BudgetKind.NONE and asked not in (None, Budget("fraction", 1.0)):
        raise UserError(
            f"{card.name} takes no budget, got {asked}. Leave --budget out; in a sweep, give it a "
            "[[grid]] of its own."
        )
    if asked is not None and asked.kind == "paper" and card.paper_budget is None:
        raise UserError(f"{card.name} has no paper budget on its card. Use a share (25%) or rows (1024).")
    return DEFAULT_BUDGET if asked is None and card.budget in (BudgetKind.STORED, BudgetKind.READ) else asked
