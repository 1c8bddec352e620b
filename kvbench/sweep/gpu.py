"""How many cells run side by side on a GPU, by predicted memory. Cells that give times have a GPU to themselves."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvbench.errors import UserError
from kvbench.machine import GB
from kvbench.sweep.cell import group_cells

if TYPE_CHECKING:
    from kvbench.hf import ModelSize
    from kvbench.sweep.cell import SweepCell


def gives_times(group: Sequence[SweepCell]) -> bool:
    """Whether a process that runs these cells measures times: neither shared prefills nor a batch stands in the way."""
    return len(group) == 1 and group[0].request.batch in (None, "1")


def count_beside(group: Sequence[SweepCell], memory: int) -> int:
    """Processes with such cells that run side by side on a GPU of `memory` bytes; 1 for cells that give times."""
    if gives_times(group) or group[0].request.device != "cuda":
        return 1
    need = predict_group(group, memory)
    return 1 if need is None else max(1, memory // need)


def choose_workers(cells: Sequence[SweepCell], gpus: Sequence[int], cores: int, *, share: bool) -> int:
    """Workers of a local sweep that names no number: as many as fill the GPUs, at most one per core.

    One where a cell gives times, runs on a CPU or is spread over GPUs. gpus: bytes of each.
    """
    groups = group_cells(cells, 1, share=share)
    alone = [x for x in groups if x[0].request.device != "cuda" or x[0].request.device_map or gives_times(x)]
    if alone or not gpus:
        return 1
    beside = min(count_beside(x, min(gpus)) for x in groups)
    return min(beside * len(gpus), len(groups), cores)


def check_beside(groups: Sequence[Sequence[SweepCell]], workers: int, gpus: Sequence[int]) -> None:
    """Refuse workers that share a GPU with a cell that gives times, or that its memory is not predicted to hold.

    gpus: bytes of each.

    Raises:
        UserError: a cell gives times and would share its GPU, or the largest cells would not fit side by side.
    """
    started = min(workers, len(groups))
    groups = [x for x in groups if x[0].request.device == "cuda"]
    beside = min(-(-started // max(1, len(gpus))), len(groups))
    if beside <= 1 or not gpus:
        return
    if (timed := next((x[0] for x in groups if gives_times(x)), None)) is not None:
        raise UserError(
            f"--workers {workers} runs {beside} cells side by side on a GPU, and cell '{timed.name}' gives times, "
            f"which the others would change. Use --workers {len(gpus)}, or a batch above 1, which gives no times."
        )
    memory = min(gpus)
    needs = [(predict_group(x, memory) or 0, x[0].name) for x in groups]
    needs.sort(reverse=True)
    fit = max(x for x in range(beside + 1) if sum(need for need, _ in needs[:x]) <= memory or x <= 1)
    if fit < beside:
        need, name = needs[0]
        raise UserError(
            f"--workers {workers} runs {beside} cells side by side on a GPU of {memory / GB:.1f} GB, and cell '{name}' "
            f"alone needs about {need / GB:.1f} GB. Use --workers {fit * len(gpus)} or less."
        )


def list_gpus() -> list[int]:
    """Bytes of each visible GPU."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [int(torch.cuda.get_device_properties(x).total_memory) for x in range(count)]


def predict_group(group: Sequence[SweepCell], memory: int) -> int | None:
    """Predicted bytes of a process that runs these cells in turn; None where they cannot be predicted.

    memory: of the GPU. Shared prefills and the batch `auto` take a part of it.
    """
    from kvbench.engine.shared import SHARE_OF_MEMORY

    try:
        most = max(_predict(x, memory) for x in group)
    except UserError:  # the cell fails with this reason
        return None
    return most + (int(SHARE_OF_MEMORY * memory) if len(group) > 1 else 0)


def _predict(cell: SweepCell, memory: int) -> int:
    """Weights, the caches of a batch and those of the full cache it is compared with, and what CUDA takes itself."""
    from kvbench.bench.forecast import SPARE_BYTES, Need
    from kvbench.registry import find_method
    from kvbench.runs.batch import SHARE_OF_MEMORY
    from kvbench.runs.request import check, read_batch

    plan = check(cell.request)
    size = _measure(cell.request.model, cell.request.dtype, plan.length)
    full = Need(size, find_method("full")().fit(None, size.shape), cell.request.chunk)
    batch = read_batch(cell.request.batch)
    if size.kind == "diffusion":
        return full.peak(2, "prefill") + SPARE_BYTES
    if batch is None:
        caches = int(SHARE_OF_MEMORY * max(0, memory - size.weight_bytes))
    else:
        need = Need(size, plan.method.fit(plan.budget, size.shape), cell.request.chunk)
        caches = need.device_bytes(batch, "prefill")
    return full.peak(1, "prefill") + caches + SPARE_BYTES


@functools.cache
def _measure(model: str, dtype: str | None, length: int) -> ModelSize:
    """Sizes of a model, which take a second to find and are the same for many cells."""
    from kvbench.hf import predict_memory

    return predict_memory(model, dtype, length, "cuda")
