"""Check a request without loading the model: look up names, read settings, resolve the protocol."""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

from kvbench.budget import DEFAULT_BUDGET, Budget, BudgetKind
from kvbench.errors import MOST, MOST_SAMPLES, MOST_SEED, UserError, check_number, is_whole, unknown
from kvbench.kernels.choice import IMPLEMENTATIONS, REST
from kvbench.method import Method
from kvbench.models.sources import RANDOM, find_added, is_random, list_added, refuse_missing
from kvbench.registry import find_method, find_task, list_architectures, list_models, list_ops
from kvbench.runs.generation import read_generation
from kvbench.runs.options import Request
from kvbench.runs.protocol import Protocol, make_visible, resolve_protocol
from kvbench.runs.provenance import find_ops
from kvbench.runs.spec import GenerationSpec
from kvbench.settings import configure, parse_pairs
from kvbench.task import Mode, Scorer, Split, Task
from kvbench.text.template import Template

DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
"""transformers' strategies to spread a model over the GPUs of a machine, then its memory, then its disk."""


@dataclass(frozen=True)
class ResolvedRequest:
    """A request with all names looked up and all settings read. What depends on the model is still open."""

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
    """Check a request by `resolve`, and that this machine has its packages and can write its output.

    Raises:
        UserError: bad input, except for the model and the device.
    """
    check_kernels(request.kernels)
    _check_output(request)
    if request.device_map is not None:
        read_device_map(request.device_map)
    return resolve(request)


def resolve(request: Request) -> ResolvedRequest:
    """Look up every name and read every setting. Methods come last because they import torch.

    Raises:
        UserError: bad input, except for the model, the device, and what depends on the machine.
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
    scorer = choose_scorer(task, request.scorer)
    budget = None if request.budget is None else Budget.parse(request.budget)
    generation = read_generation(parse_pairs(request.generation, "--gen"))
    length = task.default_length if request.length is None else request.length
    _check_numbers(request, length)
    read_batch(request.batch)
    task.check_samples(request.samples)
    task.check_turns(protocol.turns)
    if request.device_map is not None and is_random(request.model):
        raise UserError(f"model '{request.model}' has no files for a device map. Leave --device-map out.")
    method_class = find_method(request.method)
    _check_operations(request, method_class)
    if request.chunk_store is not None and not method_class.reads_parts:
        raise UserError(
            f"--chunk-store keeps chunks of methods that reuse entries across prompts, and {request.method} does not. "
            "Leave it out."
        )
    method = configure(method_class, parse_pairs(request.method_settings, "--set"), "--set", request.method)
    if protocol.recompress:
        method.require_recompressible()
    if method.card.models == "diffusion":
        protocol = make_visible(protocol, request.visibility, request.chunk)
    budget = _resolve_budget(budget, method)
    return ResolvedRequest(request, task, method, protocol, template, scorer, budget, generation, length)


def choose_scorer(task: Task | type[Task], name: str | None) -> Scorer:
    """A scorer of a task by its id; None: its first scorer.

    Raises:
        UserError: the task has no such scorer.
    """
    known = {x.id: x for x in task.scorers}
    if name is not None and name not in known:
        same = [x.id for x in task.scorers if x.metric == name]
        hint = f"'{name}' is the metric of {' and '.join(same)}: give its id." if same else ""
        raise unknown(f"scorer of {task.name}", name, known, hint)
    return known[name] if name is not None else task.scorers[0]


def read_device_map(text: str) -> str | dict[str, str | int]:
    """A device map for transformers: the name of a strategy, or the object in a JSON file.

    Raises:
        UserError: neither, or accelerate is missing.
    """
    found: object = text
    if text not in DEVICE_MAPS:
        if not text.endswith(".json"):
            raise unknown("device map", text, DEVICE_MAPS, "Or give a .json file with the place of each module.")
        try:
            found = json.loads(Path(text).expanduser().read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(
                f"device map '{text}' cannot be read: {error}. Give {', '.join(DEVICE_MAPS)}, or a .json file with the "
                "place of each module."
            ) from error
        if not isinstance(found, dict) or not found or not all(isinstance(x, str | int) for x in found.values()):
            raise UserError(
                f"device map '{text}' must be an object of places by module name. Write for example "
                '{"model.embed_tokens": 0, ...}; a place is the number of a GPU, "cpu" or "disk".'
            )
    if importlib.util.find_spec("accelerate") is None:
        raise UserError("--device-map needs the package accelerate. Install it: pip install 'kvbench[accelerate]'")
    return cast("str | dict[str, str | int]", found)


def read_batch(text: str | None) -> int | None:
    """The number of `--batch`; None: `auto`.

    Raises:
        UserError: neither a number from 1 to MOST nor `auto`.
    """
    if text == "auto":
        return None
    if text is None:
        return 1
    if not is_whole(text) or not int(text):
        raise UserError(f"batch '{text[:80]}' must be a whole number, 1 or more, or auto; at most {MOST:,}.")
    return int(text)


def _check_numbers(request: Request, length: int) -> None:
    check_number("samples", request.samples, most=MOST_SAMPLES)
    check_number("length", length)
    check_number("seed", request.seed, 0, MOST_SEED)
    for name, value in (("chunk", request.chunk), ("parts", request.parts)):
        if value is not None:
            check_number(name, value)
    if request.split not in tuple(Split):
        raise unknown("split", request.split, [str(x) for x in Split])


def check_kernels(name: str) -> None:
    """Check that an implementation is known and its package installed.

    Raises:
        UserError: it is not.
    """
    if name not in IMPLEMENTATIONS:
        raise unknown("kernels", name, IMPLEMENTATIONS)
    package = {"triton": "triton", "flash": "flash_attn"}.get(name)
    if package is not None and importlib.util.find_spec(package) is None:
        raise UserError(
            f"kernels '{name}' need the package {package.replace('_', '-')}. Install it: pip install 'kvbench[{name}]'"
        )


GPU_KERNELS = "use --kernels triton on a GPU: torch's operations, the default, start many small kernels there"


def check_kernels_device(kernels: str, device: str) -> None:
    """Check that an implementation runs on a kind of device.

    Raises:
        UserError: it does not.
    """
    if kernels == "triton" and device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise UserError(
            "kernels 'triton' need a GPU, and this run is on cpu. Use --kernels torch, or set TRITON_INTERPRET=1 to "
            "interpret them in tests, which is very slow."
        )
    if kernels == "flash" and device == "cpu":
        raise UserError("kernels 'flash' need a GPU, and this run is on cpu. Use --kernels torch.")


def check_kernels_dtype(kernels: str, device: str, dtype: str) -> None:
    """Check that an implementation computes in a model's element type.

    Raises:
        UserError: it does not.
    """
    if kernels == "flash" and dtype == "float32":
        raise UserError("kernels 'flash' compute in 16 bits. Use --dtype bfloat16, or --kernels torch.")
    if kernels == "triton" and device == "cpu" and dtype == "bfloat16":
        raise UserError("Triton's interpreter multiplies bfloat16 wrongly. Use --dtype float32, or --kernels torch.")


def _check_operations(request: Request, method: type[Method]) -> None:
    """Check that every operation of the method has the implementation: no other replaces it silently."""
    if REST.get(request.kernels, request.kernels) != "torch":
        used = find_ops(method)
        missing = [op for op, found in list_ops().items() if op in used and request.kernels not in found]
        if missing:
            raise UserError(
                f"kernels '{request.kernels}' are missing for operations of {request.method}: {', '.join(missing)}. "
                "Use --kernels torch."
            )


def _check_output(request: Request) -> None:
    for package in request.trackers:
        if importlib.util.find_spec(package) is None:
            raise UserError(f"--{package} needs the package {package}. Install it: pip install {package}")
    _check_folder("output folder", request.out, "--out")
    if request.chunk_store is not None:
        _check_folder("chunk store", Path(request.chunk_store).expanduser(), "--chunk-store")


def _check_folder(what: str, path: Path, option: str) -> None:
    folder = path.absolute()
    while not _is_there(folder):
        folder = folder.parent
    if not folder.is_dir():
        raise UserError(f"{what} '{path}' cannot be made: {folder} is a file. Give another {option}.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{what} '{path}' is not writable. Give another {option}.")


def _is_there(folder: Path) -> bool:
    """Whether a path exists, as far as this user may see."""
    try:
        return folder.exists()
    except PermissionError:  # of a folder above it
        return False


def check_model(name: str) -> None:
    """Refuse an unknown model name before the slow imports. The loader checks paths and hub ids.

    Raises:
        UserError: neither a bundled model, nor a folder, nor in the form of a path or a hub id.
    """
    source = name.removeprefix(RANDOM)
    if name != source and source in list_architectures():
        raise UserError(
            f"model '{name}' has no tokenizer: it is for `kvbench bench` and `kvbench plan`. For a task give random: "
            "before a local folder or a hub id."
        )
    refuse_missing(source)
    known = [*list_models(), *list_added()]
    if "/" not in source and source not in known and find_added(source) is None and not _is_local(source):
        raise unknown("model", name, known, "Or give a local folder or a hub id such as org/name.")


def _is_local(source: str) -> bool:
    """Whether a name is a folder, or a GGUF file."""
    path = Path(source).expanduser()
    return path.is_dir() or (path.suffix == ".gguf" and path.is_file())


def _resolve_budget(asked: Budget | None, method: Method) -> Budget | None:
    """The requested budget, or the default of the method's budget kind."""
    method.check_budget(asked)
    default = asked is None and method.budget_kind in (BudgetKind.STORED, BudgetKind.READ)
    return DEFAULT_BUDGET if default else asked
