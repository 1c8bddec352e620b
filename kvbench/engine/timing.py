"""End-to-end timing: wall time, including the work that is queued on the device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeVar

import torch

T = TypeVar("T")


def now(device: torch.device) -> float:
    """Seconds of a monotonic clock, after the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def rotate(items: Sequence[T], by: int) -> list[T]:
    """The items in an order rotated by so many places: in rounds, first-run costs fall on each in turn."""
    first = by % len(items)
    return [*items[first:], *items[:first]]
