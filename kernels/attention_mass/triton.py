"""Column sums of queries that may be any; where their log-sum-exp is given, one pass over the keys."""

from __future__ import annotations

from torch import Tensor

from kvbench.kernels.attention_mass.torch import joint_lse
from kvbench.kernels.column_sums.triton import weigh

__all__ = ["attention_mass", "joint_lse"]


def attention_mass(
    query: Tensor, keys: Tensor, at: Tensor, *, scale: float, lse: Tensor | None = None, window: int | None = None,
    logical: Tensor | None = None, positions: Tensor | None = None, softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention mass of each row over the queries and the heads of its group; see `torch.attention_mass`."""
    assert window is None or positions is None or logical is not None, "a window over holes needs both positions"
    return weigh(
        query, keys, scale=scale, seen=0, lse=lse, window=window, positions=positions, softcap=softcap, sinks=sinks,
        at=at, logical=logical,
    )
