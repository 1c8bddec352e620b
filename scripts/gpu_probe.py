"""Facts about a GPU machine, before anything is timed: `python scripts/gpu_probe.py FILE`.

Versions, memory, copy bandwidth, whether flash attention takes a chunk of queries with grouped heads, and whether a
CUDA graph can be captured after a capture that failed. On a machine without a GPU: the versions only.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from kvbench.bench import timing
from kvbench.kernels.dense_attention.torch import attend_by_flash
from kvbench.machine import cpu_name, find_version, free_bytes
from kvbench.runs.environment import find_git


def probe() -> dict[str, Any]:
    """Everything that can be found out in half a minute."""
    git = find_git()
    found: dict[str, Any] = {
        "python": sys.version.split()[0], **{x: find_version(x) for x in ("torch", "triton", "transformers")},
        "cpu": cpu_name(), "host_memory_bytes": free_bytes("cpu"), "git": None if git is None else git.model_dump(),
        "gpu": None,
    }
    if not torch.cuda.is_available():
        return found
    device = torch.device("cuda")
    properties = torch.cuda.get_device_properties(device)
    return found | {
        "gpu": properties.name, "processors": properties.multi_processor_count, "l2_bytes": properties.L2_cache_size,
        "free_bytes": free_bytes("cuda"), "copy_bandwidth": timing.measure_copy(device),
        "flash_on_a_chunk": _try(lambda: _attend_a_chunk(device)),
        "capture_after_a_failed_one": _try(lambda: _capture_twice(device)),
        "empty_graph_s": _try(lambda: _time_a_small_graph(device)),
    }


def _try(check: Any) -> Any:
    try:
        return check()
    except Exception as error:  # noqa: BLE001  # a finding
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def _attend_a_chunk(device: torch.device) -> bool:
    query, keys, values = (
        torch.randn(1, heads, n, 128, dtype=torch.bfloat16, device=device)
        for heads, n in ((32, 200), (8, 1500), (8, 1500))
    )
    return bool(attend_by_flash(query, keys, values, scale=0.1, causal=True).isfinite().all())


def _capture_twice(device: torch.device) -> str:
    """Captures a call that synchronizes, unnoticed before, and then one that works."""
    x = torch.ones(8, device=device)
    with mock.patch.object(timing, "_try_alone"):
        _, reason = timing.capture(lambda: _use(x.sum().item()), device)
    torch.cuda.empty_cache()
    _, other = timing.capture(lambda: _use(x + 1), device)
    return "works" if reason is not None and other is None else f"first: {reason}; second: {other}"


def _time_a_small_graph(device: torch.device) -> float:
    """Seconds of a graph with one small kernel: above 10 us, event times include the launch."""
    x = torch.ones(8, device=device)
    call, reason = timing.capture(lambda: _use(x.add_(1)), device)
    if reason is not None:
        raise RuntimeError(reason)
    return timing.time_calls(device, call, 100, timing.make_cold(device))


def _use(value: object) -> None:
    del value


def main() -> None:
    """Write the facts to the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.parse_args().file.write_text(json.dumps(probe(), indent=1) + "\n")


if __name__ == "__main__":
    main()
