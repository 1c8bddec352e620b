"""The user's clock: wall time of what was asked for, with the device's work done."""

from __future__ import annotations

import time

import torch


def now(device: torch.device) -> float:
    """Seconds, after everything queued on the device has happened."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
