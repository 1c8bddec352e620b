"""From a request to a Job: load the model, resolve the spec, and check that the first sample fits."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from kvbench.errors import UserError
from kvbench.log import count, say, say_once
from kvbench.machine import GB, free_bytes, ram_bytes
from kvbench.runs.environment import find_git, find_versions
from kvbench.runs.examples import make_examples
from kvbench.runs.job import Job, cap_new_tokens, check_capacity, find_capacity
from kvbench.runs.options import Request
from kvbench.runs.pooling import warn_of_pooling
from kvbench.runs.provenance import find_sources, hash_own_code
from kvbench.runs.request import (
    GPU_KERNELS,
    ResolvedRequest,
    check,
    check_kernels_device,
    check_kernels_dtype,
    check_model,
    read_batch,
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
    describe_bound,
)
from kvbench.settings import jsonable_settings
from kvbench.task import encode, find_frame, prompt_tokens
from kvbench.text.template import Frame, find_bos, refuse_ending

if TYPE_CHECKING:
    from kvbench.hf import Model
    from kvbench.method import Method, ModelKind
    from kvbench.task import Encoded, Example



def prepare(request: Request, model: Model | None = None) -> Job:
    """Check a request and load its model. Writes nothing.

    Args:
        request: the options of the run.
        model: a loaded model to use instead of the one that the request names.

    Raises:
        UserError: bad input.
    """
    if model is None:
        check_model(request.model)
    resolved = check(request)
    device = model.device.type if model is not None else find_device(request)
    check_kernels_device(request.kernels, device)
    spread = request.device_map is not None or (model is not None and model.device_map is not None)
    if device == "cuda" and request.kernels == "torch" and not spread:
        say_once(f"note: {GPU_KERNELS}.")
    if request.kernels != "torch" and spread:
        raise UserError(f"kernels '{request.kernels}' run on one GPU. Use --kernels torch, or leave --device-map out.")
    model = model or _load(resolved, device)
    check_kernels_dtype(request.kernels, device, model.dtype)
    resolved = replace(resolved, generation=resolve_generation(resolved, model))
    tokenizer, frame = find_frame(resolved.task, model.tokenizer, resolved.template)
    refuse_ending(tokenizer, frame)
    loaded, model = model, replace(model, tokenizer=tokenizer)
    _check_length(resolved, model)
    spec = _resolve_spec(resolved, model, frame)
    folder = request.out / spec.run_id
    job = Job(
        spec, resolved.method, resolved.task, resolved.scorer, model, resolved.budget, frame, folder, loaded=loaded,
        chunks=None if request.chunk_store is None else Path(request.chunk_store).expanduser(),
    )
    return _try_first(job, request)


def find_device(request: Request) -> Literal["cpu", "cuda"]:
    """The kind of device that a run computes on; by default cuda if there is a GPU. Imports torch.

    Raises:
        UserError: an unknown or absent device, one GPU of several, or a device that contradicts the device map.
    """
    import torch

    from kvbench.hf import check_device

    name = request.device
    if name is not None:
        check_device(name, "CUDA_VISIBLE_DEVICES chooses one GPU of several")
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
        raise UserError(f"device '{name}' contradicts device map '{request.device_map}'. Leave one of them out.")
    return cast("Literal['cpu', 'cuda']", found)


def _load(resolved: ResolvedRequest, device: str) -> Model:
    from kvbench.hf import load_model, predict_memory

    request, length = resolved.request, resolved.length
    need = predict_memory(request.model, request.dtype, length, device)
    _check_kind(resolved, request.model, need.kind)
    _check_longest(length, request.model, need.max_length)
    free = free_bytes(device)
    where = f"{free / GB:.1f} GB free on {device}" if request.device_map is None else f"spread by {request.device_map}"
    say(
        f"{request.model}: {need.params / 1e6:,.1f} M parameters; predicted {need.weight_bytes / GB:.2f} GB of weights "
        f"and {need.stored_bytes / GB:.3f} GB of full cache at {length} tokens; {where}."
    )
    if request.device_map is not None:
        model = load_model(request.model, dtype=request.dtype, device_map=read_device_map(request.device_map))
        if model.device.type != device:
            raise UserError(
                f"device map '{request.device_map}' put the model on {model.device.type}, not on {device}. "
                "Give a .json file with the place of each part."
            )
        return model
    total = free if device == "cuda" else ram_bytes()
    if need.weight_bytes > total:
        raise UserError(
            f"model '{request.model}' needs {need.weight_bytes / GB:.1f} GB for its weights, and {device} has "
            f"{total / GB:.1f} GB. Use a smaller --dtype, a smaller model or a larger machine."
        )
    return load_model(request.model, device, request.dtype)


def _check_kind(resolved: ResolvedRequest, model: str, kind: ModelKind) -> None:
    """Check that method and generation settings are for this kind of model, autoregressive or diffusion."""
    wanted = resolved.method.card.models
    if wanted != kind:
        instead = "none" if kind == "diffusion" else "full"
        other = "--model mini-diffusion" if wanted == "diffusion" else "--model mini"
        raise UserError(
            f"{resolved.method.card.name} needs {'a diffusion' if wanted == 'diffusion' else 'an autoregressive'} "
            f"model; {model} is {'a diffusion model' if kind == 'diffusion' else 'autoregressive'}. "
            f"Use {other}, or another method (`kvbench list methods`); to run without a cache method use {instead}."
        )
    if kind == "autoregressive" and resolved.generation.denoising is not None:
        raise UserError(f"{model} is autoregressive: of the --gen settings it takes max_new_tokens only.")


def _check_longest(length: int, model: str, most: int) -> None:
    if length > most:
        raise UserError(
            f"length {length} is more than model {model} supports, {most} tokens. Use --length {most} or less."
        )


def resolve_generation(resolved: ResolvedRequest, model: Model) -> GenerationSpec:
    """The generation settings for this kind of model, autoregressive or diffusion.

    Raises:
        UserError: the method or a setting is for the other kind.
    """
    _check_kind(resolved, model.id, model.kind)
    generation = resolved.generation
    if model.masking is None:
        return generation
    at_once = min(model.masking.tokens_per_step, resolved.task.tokens_per_step or model.masking.tokens_per_step)
    denoising = (generation.denoising or DenoisingSpec()).model_copy(update={"tokens_per_step": at_once})
    return generation.model_copy(update={"decoding": "denoising", "denoising": denoising})


def _check_length(resolved: ResolvedRequest, model: Model) -> None:
    task, length, turns = resolved.task, resolved.length, resolved.protocol.turns
    least = task.minimum_length(turns, model.tokenizer)
    if length < least:
        raise UserError(
            f"length {length} is too short for {task.name} with {count(turns, 'turn')}: it needs "
            f"{least} tokens. Use --length {least} or more."
        )
    _check_longest(length, model.id, model.max_length)


def describe_method(method: Method) -> MethodSpec:
    """The identity of a method with its settings; the code of a user's own file is a part of it."""
    card = method.card
    return MethodSpec(
        name=card.name, version=card.version, family=card.family, settings=jsonable_settings(method),
        code=hash_own_code(type(method)),
    )


def _resolve_spec(resolved: ResolvedRequest, model: Model, frame: Frame) -> RunSpec:
    request, task, method, protocol = resolved.request, resolved.task, resolved.method, resolved.protocol
    budget = resolved.budget
    find_git()  # now: the checkout may change before the result is written
    return RunSpec(
        suite=request.suite,
        method=describe_method(method),
        task=TaskSpec(
            name=task.name, version=task.version, suite=task.suite, settings=jsonable_settings(task),
            length=resolved.length, scorer=resolved.scorer.id, dataset_revision=task.dataset_revision,
            prompt_id=task.prompt_id, chat_template_sha=frame.sha, bos=find_bos(model.tokenizer, frame),
            truncation=task.truncation, stop=tuple(sorted(model.stop_ids | task.stop_ids(model.tokenizer))),
            code=hash_own_code(type(task)),
        ),
        model=ModelSpec.of(model),
        mode=protocol.mode, visibility=protocol.visibility, history=protocol.history, recompress=protocol.recompress,
        budget=None if budget is None else str(budget), split=cast("Literal['dev', 'test']", request.split),
        seed=request.seed, samples=request.samples, turns=protocol.turns, parts=request.parts,
        chunk=request.chunk,
        kernels=cast("Implementation", request.kernels),
        device=cast("Literal['cpu', 'cuda']", model.device.type), generation=resolved.generation,
        versions=find_versions(), sources=find_sources(type(method), type(task)),
    )


def _find_most_tokens(job: Job, example: Example, encoded: Encoded) -> int:
    """The most tokens that a conversation on an autoregressive model can have."""
    most = [cap_new_tokens(x.max_new_tokens, job.spec.generation) for x in example.turns]
    return find_capacity(encoded, job.spec, most, compares=job.compares)


def _may_exceed(job: Job) -> bool:
    """Whether a record of a data set may exceed the model if its first prompt has the most tokens of the length."""
    spec, tokenizer = job.spec, job.model.tokenizer
    outlines = job.task.outlines(
        seed=spec.seed, n=spec.samples, turns=spec.turns, mode=spec.mode, tokenizer=tokenizer
    )
    for outline in outlines:
        encoded = encode(job.task, outline, tokenizer, job.frame)
        context = spec.task.length - outline.turns[0].max_new_tokens - prompt_tokens(encoded)
        if context + _find_most_tokens(job, outline, encoded) > job.model.max_length:
            return True
    return False


def _find_weights(bound: Method) -> str | None:
    """SHA-256 of the weights in the file that the setting `weights` names: the path says nothing of its contents."""
    return getattr(bound, "part", None) if bound.settings.get("weights") else None


def _check_first_sample(job: Job, example: Example, encoded: Encoded) -> None:
    """Refuse a first sample without what the protocol or the method needs, and a model whose entries cannot be reused.

    Raises:
        UserError: with the reason.
    """
    spec = job.spec
    if spec.visibility == "hidden" and not encoded.turns[0].first:
        raise UserError(
            f"{spec.task.name} does not separate its question from its context, so the question cannot be hidden. "
            "Leave --visibility out."
        )
    if spec.parts is not None and example.parts:
        raise UserError(f"{spec.task.name} names the parts of its contexts. Leave --parts out.")
    if job.method.reads_parts and not encoded.parts:
        raise UserError(
            f"{spec.method.name} reuses the parts of a prompt, and {spec.task.name} names none. Cut its contexts "
            "with --parts, or use a task of the group reuse (`kvbench list tasks`), or your own with `parts`."
        )
    behind = len(encoded.context) - sum(map(len, encoded.parts))  # tokens of the context after its last part
    if job.method.reads_question and spec.visibility == "hidden" and not behind:
        raise UserError(
            f"{spec.method.name} reads the question in the prompt, and here it comes later. Use mode single or "
            "multi-turn, and leave --visibility out."
        )
    if job.method.reads_parts:
        from kvbench.engine.reuse import refuse_unfit  # imports torch; requests are checked first

        refuse_unfit(job.model)


def _try_first(job: Job, request: Request) -> Job:
    """Generate the first sample, bind the method, fit the budget, check the model's capacity, and choose the batch.

    On a diffusion model all samples are generated: the denoising settings must fit every answer. So they are where a
    record of a data set may exceed the model.

    Raises:
        UserError: one of these fails.
    """
    spec = job.spec
    made = make_examples(job, range(spec.samples))
    _, example, encoded = next(made)
    _check_first_sample(job, example, encoded)
    if (warning := warn_of_pooling(spec, example, encoded)) is not None:
        say_once(f"warning: {warning}")
    context = len(encoded.context) if spec.visibility == "hidden" else prompt_tokens(encoded)
    bound = job.method.bind(job.model)  # some budgets are resolved per head
    fitted = bound.fit(job.budget, job.model.shape(context))
    if job.model.masking is None:
        capacity = _find_most_tokens(job, example, encoded)
        if _may_exceed(job):
            check_capacity(job, max([capacity, *(_find_most_tokens(job, one, ids) for _, one, ids in made)]))
    else:
        from kvbench.diffusion.sample import plan_turn  # imports torch; requests are checked first

        whole = chain([(0, example, encoded)], made)  # one set of denoising settings must fit every answer
        ready = replace(job, method=bound)  # a policy may check what it has found on the model
        capacity = max(find_capacity(ids, spec, [plan_turn(ready, x)[0] for x in one.turns]) for _, one, ids in whole)
    check_capacity(job, capacity)
    from kvbench.runs.batch import resolve_batch  # imports torch, too

    batch = resolve_batch(read_batch(request.batch), job, fitted, job.model.shape(context), capacity)
    spec = spec.model_copy(update={
        "batch": batch, "weights_sha256": _find_weights(bound), "bound": describe_bound(bound.resolution),
    })
    return replace(
        job, spec=spec, folder=request.out / spec.run_id, method=bound, resolution=dict(fitted.resolution)
    )
