"""End-to-end timing: wall time, including the work that is queued on the device."""

from __future__ import annotations

import time

import torch


def now(device: torch.device) -> float:
    """Seconds of a monotonic clock, after the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
