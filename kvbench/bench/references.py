"""Compares every operation with its torch implementation before a method is timed, so that no wrong kernel is timed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import torch
from torch import Tensor

from kvbench.bench.state import Setting, open_context
from kvbench.engine.autoregressive import step_logits
from kvbench.kernels.choice import comparing
from kvbench.method import Method

BATCH, STEPS = 1, 3
ALLOWED = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Relative RMS difference by the model's data type. Wider than in the kernels' tests, because both sides round."""
DIFFERENT = 0.01
"""Allowed share of different codes or indices, which rounding can cause."""


class WrongKernelError(Exception):
    """An operation differs from its torch implementation."""


def compare_operations(setting: Setting, method: Method, length: int) -> None:
    """Run a context and a few decode steps, and compare every non-torch operation with the torch one on equal inputs.

    Raises:
        WrongKernelError: naming the first operation that differs.
    """
    allowed = ALLOWED[setting.model.module.dtype]

    def look(operation: str, ours: object, reference: object) -> None:
        for one, other in zip(_tensors(ours), _tensors(reference), strict=True):
            difference, most = measure(one, other), allowed if one.is_floating_point() else DIFFERENT
            if not difference <= most:
                raise WrongKernelError(
                    f"{operation} differs from its torch implementation by {difference:.2g}, allowed {most:g}: "
                    "not timed"
                )

    with comparing(look), open_context(setting, method, length, BATCH) as context:
        for token in setting.tokens(BATCH, STEPS, seed=2).split(1, dim=1):
            step_logits(context.session, token)


def measure(ours: Tensor, reference: Tensor) -> float:
    """Relative RMS difference of floats or share of different integers; infinity if shapes or finite places differ."""
    if ours.shape != reference.shape:
        return float("inf")
    if not ours.is_floating_point():
        return (ours != reference).double().mean().item() if ours.numel() else 0.0
    if not ours.isfinite().equal(reference.isfinite()) or ours.isnan().any():
        return float("inf")
    finite = reference.isfinite()
    one, other = ours[finite].double(), reference[finite].double()
    if not one.numel():
        return 0.0
    return ((one - other).square().mean().sqrt() / other.square().mean().sqrt().clamp_min(1e-12)).item()


def _tensors(result: object) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif is_dataclass(result):
        yield from (y for x in fields(result) for y in _tensors(getattr(result, x.name)))
    elif isinstance(result, dict):
        yield from (y for x in result.values() for y in _tensors(x))
    elif isinstance(result, list | tuple):
        yield from (y for x in result for y in _tensors(x))
