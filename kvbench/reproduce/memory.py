"""Judges printed bytes, batches and lengths by `kvbench plan`, which computes them from shapes; nothing runs.

Predicted bytes of a method are those that it declares. `kvbench check` compares the declared bytes with the stores.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from kvbench.bench.forecast import GPUS, SPARE_BYTES, Gpu, Need, read_budget
from kvbench.errors import UserError, unknown
from kvbench.hf import ModelSize, predict_memory
from kvbench.registry import find_method
from kvbench.reproduce.claims import Claim
from kvbench.reproduce.plan import BytesRequest
from kvbench.reproduce.verdict import Judgment, Number, list_doubts
from kvbench.settings import configure

TOLERANCE = 0.1
"""Largest relative difference of a reproduced number: papers round, and do not state what else a GPU holds."""
CHUNK = 2048
"""Prompt tokens per forward pass in a prediction of the longest context."""
LONGEST = 1 << 24
"""Longest context that is tried, in tokens."""
NO_RUN = "predicted from shapes: no prompt was run"


def judge_bytes(claim: Claim, request: BytesRequest) -> Judgment:
    """The verdict on a number that follows from shapes.

    Raises:
        UserError: `kvbench plan` does not know the GPU, the model, the budget or a setting, or the full cache does not
            fit the GPU.
    """
    found = predict(request, factor=claim.table.measure == "times") * claim.table.scale
    close = abs(found - claim.value) <= max(claim.rounding, TOLERANCE * claim.value)
    return Judgment(
        claim, "reproduced (bytes)" if close else "not reproduced (bytes)", Number(found, (found, found)),
        differs=(NO_RUN, *list_doubts(claim), *claim.protocol.differs), regime=f"kvbench plan: {_describe(request)}",
    )


@functools.cache  # no run changes it, and every build of the site asks
def predict(request: BytesRequest, *, factor: bool) -> float:
    """The predicted quantity; `factor`: by how much it is better than the full cache's."""
    outline = _outline(request.model)
    quantity = request.predicts
    if quantity in ("largest batch", "longest context"):
        ours = _count(request, outline, request.method)
        if not factor:
            return ours
        if not (whole := _count(request, outline, "full")):
            raise UserError(
                f"one full cache of {request.model} with {request.length:,} tokens does not fit {_gpu(request).title}, "
                "so no batch is a multiple of its batch. Give a smaller length or another gpu in the claims file."
            )
        return ours / whole
    length = request.length or _longest(request, outline, "full")
    need, full = (_need(request, outline, x, length) for x in (request.method, "full"))
    if quantity == "peak bytes":
        batch = 1 if request.length is None else _batch(request, full)
        share = (outline.weight_bytes + batch * need.decode) / (outline.weight_bytes + batch * full.decode)
    else:
        host = need.method.declared_host_bytes(need.model.shape) if quantity == "stored bytes" else 0
        share = (need.cache + host) / full.cache
    return 1 / share if factor else share


def _count(request: BytesRequest, outline: ModelSize, method: str) -> int:
    """Sequences of one length, or tokens of one sequence, that the GPU holds."""
    if request.predicts == "longest context":
        return _longest(request, outline, method)
    assert request.length is not None, "the largest batch is of one length"
    return _batch(request, _need(request, outline, method, request.length))


def _batch(request: BytesRequest, need: Need) -> int:
    """Sequences that decode together; each prompt was run and compressed alone."""
    return max(0, (_room(request) - need.model.weight_bytes) // need.decode)


def _room(request: BytesRequest) -> int:
    """Bytes of the GPU for weights, caches and work space."""
    memory = _gpu(request).memory_bytes
    return memory - min(SPARE_BYTES, memory // 20)


def _gpu(request: BytesRequest) -> Gpu:
    assert request.gpu is not None, "the table names the GPU"
    if request.gpu not in GPUS:
        raise unknown("gpu", request.gpu, GPUS)
    return GPUS[request.gpu]


def _longest(request: BytesRequest, outline: ModelSize, method: str) -> int:
    """The longest prompt, in multiples of CHUNK, that the GPU can prefill."""
    low, high = 1, LONGEST // CHUNK
    while low < high:
        middle = (low + high + 1) // 2
        if _need(request, outline, method, middle * CHUNK).peak(1, "prefill") <= _room(request):
            low = middle
        else:
            high = middle - 1
    return low * CHUNK


def _need(request: BytesRequest, outline: ModelSize, method: str, length: int) -> Need:
    sized = replace(outline, shape=replace(outline.shape, length=length))
    made = configure(find_method(method), dict(request.settings) if method == request.method else {}, "set", method)
    budget = read_budget(request.budget if method == request.method else None, made)
    return Need(sized, made.fit(budget, sized.shape), CHUNK, later=0)


def _describe(request: BytesRequest) -> str:
    length = "the full cache's longest context" if request.length is None else f"{request.length:,} tokens"
    place = "" if request.gpu is None else f" on {_gpu(request).title}"
    return f"{request.predicts} of {request.method}, {request.model}{place}" + (
        "" if request.predicts == "longest context" else f", {length}"
    )


@functools.cache
def _outline(model: str) -> ModelSize:
    return predict_memory(model, "bfloat16")
