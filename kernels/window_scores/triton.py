"""Column sums of the last queries by query head; keys are read twice."""

from __future__ import annotations

from torch import Tensor

from kvbench.kernels.column_sums.triton import weigh


def window_scores(
    query: Tensor, keys: Tensor, *, scale: float, seen: int, window: int | None = None, positions: Tensor | None = None,
    softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:
    """Attention mass of each entry over the last w queries; see `torch.window_scores`."""
    return weigh(
        query, keys, scale=scale, seen=seen, window=window, positions=positions, softcap=softcap, sinks=sinks,
        by_head=True,
    )
