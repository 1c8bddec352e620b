"""No speed of an operation that computes something else: each is compared with its torch twin before it is timed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import torch
from torch import Tensor

from kvbench.bench.state import Setting, open_stand
from kvbench.engine.autoregressive import step_logits
from kvbench.kernels.choice import comparing
from kvbench.method import Method

BATCH, STEPS = 1, 3
ALLOWED = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Relative RMS difference by the model's type: more than the kernels' tests allow, as both sides round."""
DIFFERENT = 0.01
"""Share of codes or indices that rounding may decide otherwise."""


class WrongKernelError(Exception):
    """An operation differs from its torch twin."""


def check_twins(setting: Setting, method: Method, length: int) -> None:
    """Run a context and a few steps; everything that runs as another implementation than torch's is compared with it.

    Raises:
        WrongKernelError: with the first operation that differs.
    """
    allowed = ALLOWED[setting.model.module.dtype]

    def look(operation: str, ours: object, twin: object) -> None:
        for one, other in zip(_tensors(ours), _tensors(twin), strict=True):
            difference, most = measure(one, other), allowed if one.is_floating_point() else DIFFERENT
            if not difference <= most:
                raise WrongKernelError(
                    f"{operation} differs from its torch twin by {difference:.2g}, allowed {most:g}: not timed"
                )

    with comparing(look), open_stand(setting, method, length, BATCH) as stand:
        for token in setting.tokens(BATCH, STEPS, seed=2).split(1, dim=1):
            step_logits(stand.session, token)


def measure(ours: Tensor, twin: Tensor) -> float:
    """Relative RMS difference of numbers, or the share of codes that differ; infinity where shapes or holes do."""
    if ours.shape != twin.shape:
        return float("inf")
    if not ours.is_floating_point():
        return (ours != twin).double().mean().item() if ours.numel() else 0.0
    if not ours.isfinite().equal(twin.isfinite()) or ours.isnan().any():
        return float("inf")
    held = twin.isfinite()
    one, other = ours[held].double(), twin[held].double()
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
