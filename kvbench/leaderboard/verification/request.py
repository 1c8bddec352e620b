"""Checks that a spec is one that `kvbench run` writes, by the rules of its own options."""

from __future__ import annotations

from collections.abc import Iterator

from kvbench.leaderboard.submission.outcome import RefusedError, quote, refusing_errors
from kvbench.runs.command import write_request
from kvbench.runs.request import ResolvedRequest, check_kernels_device, check_kernels_dtype, resolve
from kvbench.runs.spec import DenoisingSpec, RunSpec


def check_spec(spec: RunSpec) -> None:
    """Check that a request exists whose spec is this one. Its method and its task must be registered.

    Raises:
        RefusedError: `kvbench run` does not take it, or writes it otherwise, which would give one run two ids.
    """
    with refusing_errors("spec", "kvbench run does not make this run"):
        found = resolve(write_request(spec))
        if spec.kernels != "triton":  # an environment variable may allow it without a GPU
            check_kernels_device(spec.kernels, spec.device)
        check_kernels_dtype(spec.kernels, spec.device, spec.model.dtype)
    for name, stated, written in _list_written(spec, found):
        if stated != written:
            raise RefusedError("spec", f"its {name} is {quote(stated)}, kvbench run writes {quote(written)}")


def _list_written(spec: RunSpec, found: ResolvedRequest) -> Iterator[tuple[str, object, object]]:
    """Name, stated value, and the value that `kvbench run` writes."""
    for name, value in found.protocol:
        yield name, getattr(spec, name), value
    yield "budget", spec.budget, None if found.budget is None else str(found.budget)
    generation = found.generation
    if spec.model.kind == "diffusion":
        at_once = 1 if spec.generation.denoising is None else spec.generation.denoising.tokens_per_step  # the model's
        denoising = (generation.denoising or DenoisingSpec()).model_copy(update={"tokens_per_step": at_once})
        generation = generation.model_copy(update={"decoding": "denoising", "denoising": denoising})
    else:
        generation = generation.model_copy(update={"denoising": None})
    yield from ((f"generation.{name}", getattr(spec.generation, name), value) for name, value in generation)
    yield "weights_sha256", spec.weights_sha256, None  # a method whose settings name a file is not known here
    yield "task.stop", spec.task.stop, tuple(sorted(set(spec.task.stop)))
