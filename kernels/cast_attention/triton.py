"""Attention over e4m3 numbers by the dense kernel, which converts them in registers."""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.kernels.dense_attention.triton import UNIT, attend
from kvbench.kernels.ragged_attention.torch import Partial


def cast_partial(
    query: Tensor, keys: Tensor, values: Tensor, key_scale: Tensor | None, value_scale: Tensor | None, *,
    scale: float, seen: int, start: int = 0, window: int | None = None, softcap: float | None = None,
    length: Tensor | None = None,
) -> Partial:
    """Partial attention over adjacent entries that all precede the queries; see `torch.cast_partial`.

    The factors of keys go to the queries, and those of values to the output.
    """
    group = query.shape[1] // keys.shape[1]
    if key_scale is not None:
        query = (query.float() * _by_head(key_scale, group)).to(query.dtype)
    own = None  # the last entries
    if length is None:
        own = seen - query.shape[2] - start + torch.arange(query.shape[2], device=query.device)
    output, lse = attend(
        query, keys, values, keys.shape[1], scale=scale * UNIT.value, seen=seen, window=window, softcap=softcap,
        length=length, causal=False, at=own,
    )
    factor = UNIT.value if value_scale is None else UNIT.value * _by_head(value_scale, group)
    return Partial(output * factor, lse)


def _by_head(factor: Tensor, group: int) -> Tensor:
    """A factor for every query head. [1] or [H_kv] -> [1, 1, 1] or [H_q, 1, 1]"""
    return (factor if len(factor) == 1 else factor.repeat_interleave(group))[:, None, None]
