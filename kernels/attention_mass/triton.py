"""Column sums for arbitrary queries; one pass over the keys if the log-sum-exp is given, otherwise two."""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.kernels.attention_mass.torch import joint_lse
from kvbench.kernels.column_sums.triton import weigh

__all__ = ["attention_mass", "joint_lse"]


def attention_mass(
    query: Tensor, keys: Tensor, at: Tensor, *, scale: float, lse: Tensor | None = None, window: int | None = None,
    logical: Tensor | None = None, positions: Tensor | None = None, softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention mass of each entry over the queries and heads of its group; see `torch.attention_mass`."""
    assert window is None or positions is None or logical is not None, "a window needs both positions"
    if not len(at):  # the first pass cannot start without queries
        return query.new_zeros(keys.shape[:3], dtype=torch.float32)
    return weigh(
        query, keys, scale=scale, seen=0, lse=lse, window=window, positions=positions, softcap=softcap, sinks=sinks,
        at=at, logical=logical,
    )
