"""From a request to a Job: the model loaded, the spec resolved, and the first sample tried, before any work."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from kvbench import __version__
from kvbench.budget import Budget
from kvbench.errors import UserError, unknown
from kvbench.log import say
from kvbench.machine import find_version, free_bytes, ram_bytes
from kvbench.method import Method
from kvbench.runs.examples import make_examples
from kvbench.runs.options import Request
from kvbench.runs.provenance import find_sources, hash_own_code
from kvbench.runs.request import (
    ResolvedRequest,
    check,
    check_kernels_device,
    check_kernels_dtype,
    check_model,
    read_device_map,
)
from kvbench.runs.spec import (
    DenoisingSpec,
    GenerationSpec,
    Implementation,
    MethodSpec,
    ModelSpec,
    RunSpec,
    TaskSpec,
    Versions,
)
from kvbench.settings import jsonable_settings
from kvbench.task import Encoded, EncodedTurn, Mode, Scorer, Task, find_frame, prompt_tokens
from kvbench.template import Frame

if TYPE_CHECKING:
    from kvbench.hf import Model

GB = 1e9


@dataclass(frozen=True)
class Job:
    """A run that can start: the spec, and the objects it names."""

    spec: RunSpec
    method: Method
    task: Task
    scorer: Scorer
    model: Model
    """Its tokenizer has no chat template where the run asks for none."""
    budget: Budget | None
    frame: Frame
    folder: Path
    loaded: Model
    """The model as loaded, for other runs."""
    resolution: dict[str, object] = field(default_factory=dict)
    """What the budget comes to on the first sample."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end an answer: the model's and the task's."""
        return frozenset(self.spec.task.stop)


def prepare(request: Request, model: Model | None = None) -> Job:
    """Check everything and load the model; nothing is written.

    Args:
        request: what was asked for.
        model: one that is loaded already, in place of the one the request names.

    Raises:
        UserError: whatever is wrong with the request.
    """
    if model is None:
        check_model(request.model)
    plan = check(request)
    device = model.device.type if model is not None else find_device(request)
    check_kernels_device(request.kernels, device)
    if request.kernels != "torch" and request.device_map is not None:
        raise UserError(f"kernels '{request.kernels}' run on one GPU. Use --kernels torch, or leave --device-map out.")
    model = model or _load(request, device, plan.length)
    check_kernels_dtype(request.kernels, device, model.dtype)
    plan = replace(plan, generation=resolve_generation(plan, model))
    tokenizer, frame = find_frame(plan.task, model.tokenizer, plan.template)
    loaded, model = model, replace(model, tokenizer=tokenizer)
    _check_length(plan, model)
    spec = _resolve_spec(plan, model, frame)
    folder = request.out / spec.run_id
    return _try_first(Job(spec, plan.method, plan.task, plan.scorer, model, plan.budget, frame, folder, loaded))


def find_device(request: Request) -> Literal["cpu", "cuda"]:
    """The kind of device of this machine that a run will compute on: cuda where there is one. This waits for torch.

    Raises:
        UserError: a device that is unknown or absent, one GPU of several, or two that contradict each other.
    """
    import torch

    from kvbench.hf import check_device

    name = request.device
    if name is not None:
        check_device(name)
        if ":" in name:
            raise UserError(f"device '{name}' names one GPU. Use --device cuda, and choose with CUDA_VISIBLE_DEVICES.")
    places = None if request.device_map is None else read_device_map(request.device_map)
    if isinstance(places, dict):
        gpus = {f"cuda:{x}" if isinstance(x, int) else x for x in places.values()} - {"cpu", "disk"}
        for gpu in gpus:
            check_device(gpu)
        found = "cuda" if gpus else "cpu"
    else:
        found = "cuda" if torch.cuda.is_available() and (places or name != "cpu") else "cpu"
    if name not in (None, found):
        raise UserError(f"device '{name}' is not where device map '{request.device_map}' leads. Leave one of them out.")
    return cast("Literal['cpu', 'cuda']", found)


def reach(encoded: Encoded, spec: RunSpec, limits: list[int]) -> int:
    """The most tokens that a conversation can come to, generation included."""
    turns = list(zip(encoded.turns, limits, strict=True))
    if spec.mode is Mode.MULTI_REQUEST:
        return len(encoded.context) + max(len(turn.first) + most_new(turn, limit) for turn, limit in turns)
    position, most = len(encoded.context), 0
    for index, (turn, limit) in enumerate(turns):
        position += len(turn.later if index else turn.first)
        most = max(most, position + most_new(turn, limit))
        position += most_new(turn, limit) if spec.history == "own" else len(turn.answer)
    return most


def check_reach(job: Job, most: int) -> None:
    """Refuse a conversation that can come to more tokens than the model was made for.

    Raises:
        UserError: it can.
    """
    if most > job.model.max_length:
        turns = f"{job.spec.turns} turn{'s' if job.spec.turns > 1 else ''}"
        raise UserError(
            f"length {job.spec.task.length} with {turns} comes to {most} tokens, beyond what model {job.model.id} was "
            f"made for, {job.model.max_length}. Use a smaller --length or fewer --turns, or leave long rows out."
        )


def most_new(turn: EncodedTurn, limit: int) -> int:
    """The most tokens that can stand after a question: those generated, or those of its longest choice."""
    return max([limit, *map(len, turn.choices)])


def limit_of(asked: int, generation: GenerationSpec) -> int:
    """New tokens allowed in a turn: the task's limit, or the cap where that is less."""
    return asked if generation.max_new_tokens is None else min(asked, generation.max_new_tokens)


def _load(request: Request, device: str, length: int) -> Model:
    from kvbench.hf import DTYPES, load_model, predict_memory

    if request.dtype is not None and request.dtype not in DTYPES:
        raise unknown("dtype", request.dtype, DTYPES)
    need = predict_memory(request.model, request.dtype, length)
    free = free_bytes(device)
    where = f"{free / GB:.1f} GB free on {device}" if request.device_map is None else f"spread by {request.device_map}"
    say(
        f"{request.model}: {need.params / 1e6:,.1f} M parameters; predicted {need.weight_bytes / GB:.2f} GB of weights "
        f"and {need.stored_bytes / GB:.3f} GB of dense cache at {length} tokens; {where}."
    )
    if request.device_map is not None:
        model = load_model(request.model, dtype=request.dtype, device_map=read_device_map(request.device_map))
        if model.device.type != device:
            raise UserError(
                f"device map '{request.device_map}' put the model on {model.device.type}, not on {device}. "
                "Say where each part goes in a .json file."
            )
        return model
    total = free if device == "cuda" else ram_bytes()
    if need.weight_bytes > total:
        raise UserError(
            f"model '{request.model}' needs {need.weight_bytes / GB:.1f} GB for its weights alone, and {device} has "
            f"{total / GB:.1f} GB. Use a smaller --dtype, a smaller model or a larger machine."
        )
    return load_model(request.model, device, request.dtype)


def resolve_generation(plan: ResolvedRequest, model: Model) -> GenerationSpec:
    """How this kind of model makes answers, from what was asked.

    Raises:
        UserError: the method or a setting is for the other kind.
    """
    wanted, generation = plan.method.card.models, plan.generation
    if wanted != model.kind:
        instead = "none" if model.kind == "diffusion" else "full"
        raise UserError(
            f"{plan.method.card.name} needs {'a diffusion' if wanted == 'diffusion' else 'an autoregressive'} model; "
            f"{model.id} is {'a diffusion model' if model.kind == 'diffusion' else 'autoregressive'}. "
            f"`kvbench list methods` shows what works on which; without a cache method use {instead}."
        )
    if model.masking is None:
        if generation.denoising is not None:
            raise UserError(f"{model.id} is autoregressive: of the --gen settings it takes max_new_tokens only.")
        return generation
    at_once = min(model.masking.tokens_per_step, plan.task.tokens_per_step or model.masking.tokens_per_step)
    denoising = (generation.denoising or DenoisingSpec()).model_copy(update={"tokens_per_step": at_once})
    return generation.model_copy(update={"decoding": "denoising", "denoising": denoising})


def _check_length(plan: ResolvedRequest, model: Model) -> None:
    task, length, turns = plan.task, plan.length, plan.protocol.turns
    least = task.minimum_length(turns, model.tokenizer)
    if length < least:
        raise UserError(
            f"length {length} is too short for {task.name} with {turns} turn{'s' if turns > 1 else ''}: it needs "
            f"{least} tokens. Use --length {least} or more."
        )
    if length > model.max_length:
        raise UserError(
            f"length {length} is beyond what model {model.id} was made for, {model.max_length} tokens. "
            f"Use --length {model.max_length} or less."
        )


def _resolve_spec(plan: ResolvedRequest, model: Model, frame: Frame) -> RunSpec:
    import torch

    request, task, method, protocol, budget = plan.request, plan.task, plan.method, plan.protocol, plan.budget
    card = method.card
    return RunSpec(
        suite=request.suite,
        method=MethodSpec(
            name=card.name, version=card.version, family=card.family, settings=jsonable_settings(method),
            code=hash_own_code(type(method)),
        ),
        task=TaskSpec(
            name=task.name, version=task.version, suite=task.suite, settings=jsonable_settings(task),
            length=plan.length, scorer=plan.scorer.id, dataset_revision=task.dataset_revision, prompt_id=task.prompt_id,
            chat_template_sha=frame.sha, bos=_bos(model, frame), truncation=task.truncation,
            stop=tuple(sorted(model.stop_ids | task.stop_ids(model.tokenizer))), code=hash_own_code(type(task)),
        ),
        model=ModelSpec(
            id=model.id, revision=model.revision, kind=model.kind, dtype=model.dtype, params=model.params,
            sha256=model.sha256, tokenizer_sha256=model.tokenizer_sha256,
        ),
        mode=protocol.mode, visibility=protocol.visibility, history=protocol.history, recompress=protocol.recompress,
        budget=None if budget is None else str(budget), split=cast("Literal['dev', 'test']", request.split),
        seed=request.seed, samples=request.samples, turns=protocol.turns, chunk=request.chunk,
        kernels=cast("Implementation", request.kernels),
        device=cast("Literal['cpu', 'cuda']", model.device.type), generation=plan.generation,
        versions=Versions(
            kvbench=__version__, torch=torch.__version__, transformers=find_version("transformers") or "unknown"
        ),
        sources=find_sources(type(method), type(task)),
    )


def _bos(model: Model, frame: Frame) -> Literal["tokenizer", "template", "none"]:
    token = model.tokenizer.bos_token_id
    if token is None:
        return "none"
    ids = model.tokenizer(f"{frame.head}x", add_special_tokens=frame.special).input_ids
    return "none" if ids[:1] != [token] else "tokenizer" if frame.special else "template"


def _try_first(job: Job) -> Job:
    """Make the first sample, bind the method, fit the budget, and see that the model can hold it.

    On a diffusion model all samples are made: every answer must fit how the run makes them.

    Raises:
        UserError: one of these cannot be.
    """
    spec = job.spec
    made = make_examples(job, range(spec.samples))
    _, example, encoded = next(made)
    if spec.visibility == "hidden" and not encoded.turns[0].first:
        raise UserError(
            f"{spec.task.name} does not tell its question from its context: nothing can be hidden. "
            "Leave --visibility out."
        )
    context = len(encoded.context) if spec.visibility == "hidden" else prompt_tokens(encoded)
    bound = job.method.bind(job.model)  # a budget may come to something else for each head
    fitted = bound.fit(job.budget, job.model.shape(context))
    if job.model.masking is None:
        most = reach(encoded, spec, [limit_of(x.max_new_tokens, spec.generation) for x in example.turns])
    else:
        from kvbench.diffusion.sample import plan_turn  # it imports this module

        whole = chain([(0, example, encoded)], made)  # the regime is the run's: it must fit every answer
        most = max(reach(ids, spec, [plan_turn(job, x)[0] for x in one.turns]) for _, one, ids in whole)
    check_reach(job, most)
    return replace(job, method=bound, resolution=dict(fitted.resolution))
