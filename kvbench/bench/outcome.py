"""Outcomes of cells without a time: every error becomes an outcome with a reason, never a crash of the job."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import torch

from kvbench.bench.decode import WrongStepError
from kvbench.bench.records import Outcome
from kvbench.bench.references import WrongKernelError
from kvbench.errors import UserError, describe_error, first_line
from kvbench.log import say
from kvbench.machine import is_device_lost

T = TypeVar("T")
EXPLAINED = (WrongStepError, WrongKernelError)
"""Errors whose message suffices; no traceback is printed."""


@dataclass(frozen=True)
class Failure:
    """The reason for a missing time."""

    outcome: Outcome
    reason: str
    device_lost: bool = False
    """True if the CUDA context is unusable, so that nothing more can be timed in this process."""


def attempt(make: Callable[[], T]) -> T | Failure:
    """Return the result of a call, or its failure. After a failure, the call's memory is freed."""
    failure = None
    try:
        return make()
    except (UserError, NotImplementedError) as error:
        failure = Failure("refused", first_line(error))
    except Exception as error:  # noqa: BLE001  # a third-party method may raise anything
        if is_out_of_memory(error):
            failure = Failure("out of memory", first_line(error))
        else:
            reason = first_line(error)
            if not isinstance(error, EXPLAINED):
                say(traceback.format_exc())
                reason = describe_error(error)
            failure = Failure("failed", reason, device_lost=is_device_lost())
    gc.collect()  # outside the except block, whose traceback would keep the call's tensors alive
    if torch.cuda.is_available() and not failure.device_lost:
        free_device_memory()
    return failure


def is_out_of_memory(error: Exception) -> bool:
    """True for device and pinned host memory; the latter raises torch.AcceleratorError or a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "out of memory" in str(error).lower()
    )


def free_device_memory() -> None:
    """Return cached blocks of the GPU and of pinned host memory to the system."""
    with suppress(RuntimeError):  # raised by torch 2.11 after a failed capture, and after some errors of CUDA
        torch.cuda.empty_cache()
    with suppress(RuntimeError, AttributeError):  # an internal function of torch
        torch._C._host_emptyCache()  # noqa: SLF001
