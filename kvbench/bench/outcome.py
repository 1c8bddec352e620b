"""Outcomes of cells without a time: every error becomes an outcome with a reason, never a crash of the job."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from kvbench.bench.decode import WrongStepError
from kvbench.bench.records import Outcome
from kvbench.bench.references import WrongKernelError
from kvbench.errors import UserError
from kvbench.log import say

T = TypeVar("T")
EXPLAINED = (WrongStepError, WrongKernelError)
"""Errors whose message suffices; no traceback is printed."""


@dataclass(frozen=True)
class Failure:
    """The reason for a missing time."""

    outcome: Outcome
    reason: str


def attempt(make: Callable[[], T]) -> T | Failure:
    """Return the result of a call, or its failure. After a failure, the call's memory is freed."""
    failure = None
    try:
        return make()
    except torch.OutOfMemoryError as error:
        failure = Failure("out of memory", _first_line(error))
    except (UserError, NotImplementedError) as error:
        failure = Failure("refused", _first_line(error))
    except Exception as error:  # noqa: BLE001  # a third-party method may raise anything
        if not isinstance(error, EXPLAINED):
            say(traceback.format_exc())
        failure = Failure("failed", _first_line(error))
    gc.collect()  # outside the except block, whose traceback would keep the call's tensors alive
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return failure


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
