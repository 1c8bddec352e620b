"""What becomes of a cell that does not come to a time: an outcome and its reason, never a crash."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from kvbench.bench.decode import WrongStepError
from kvbench.bench.records import Outcome
from kvbench.bench.twins import WrongKernelError
from kvbench.errors import UserError
from kvbench.log import say

T = TypeVar("T")
TOLD = (WrongStepError, WrongKernelError)
"""Failures whose message says all."""


@dataclass(frozen=True)
class Failure:
    """Why there is no time."""

    outcome: Outcome
    reason: str


def attempt(make: Callable[[], T]) -> T | Failure:
    """What a call returns, or what it failed with; memory that it held is free again."""
    failure = None
    try:
        return make()
    except torch.OutOfMemoryError as error:
        failure = Failure("out of memory", _first_line(error))
    except (UserError, NotImplementedError) as error:
        failure = Failure("refused", _first_line(error))
    except Exception as error:  # noqa: BLE001  # somebody's method may raise anything
        if not isinstance(error, TOLD):
            say(traceback.format_exc())
        failure = Failure("failed", _first_line(error))
    gc.collect()  # after the exception: its frames held what the call had
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return failure


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
