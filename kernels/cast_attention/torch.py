"""Partial attention over e4m3 numbers, which are converted one head at a time, or all at once if they are few."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from kvbench.kernels.blocks import BLOCK_ELEMENTS
from kvbench.kernels.pack.torch import look_up
from kvbench.kernels.ragged_attention.torch import Partial, dense_partial, ragged_partial


def cast_partial(
    query: Tensor, keys: Tensor, values: Tensor, key_scale: Tensor | None, value_scale: Tensor | None, *,
    scale: float, seen: int, start: int = 0, window: int | None = None, softcap: float | None = None,
) -> Partial:
    """Partial attention over adjacent entries that all precede the queries.

    query: [B, H_q, T, D]. keys, values: [B, H_kv, n, D], the bytes of e4m3 numbers. key_scale, value_scale: the factor
    of every number, [1] or [H_kv] float32; None: 1. start: the position of the first entry.
    """
    kv_heads, count = keys.shape[1:3]
    if query.shape[2] == 1 and window is None and keys.numel() <= BLOCK_ELEMENTS:  # one product for all heads
        key, value = ((from_e4m3(x) * (1.0 if factor is None else factor[:, None, None])).to(query.dtype)
                      for x, factor in ((keys, key_scale), (values, value_scale)))
        return dense_partial(query, key, value, scale=scale, seen=seen, softcap=softcap)
    at = None if window is None else torch.arange(start, start + count, device=keys.device)
    parts = []
    for b, queries in enumerate(query[:, None]):  # [1, H_q, T, D]
        for h, grouped in enumerate(queries.chunk(kv_heads, 1)):
            key, value = ((from_e4m3(x[b, h]) * _of_head(factor, h)).to(query.dtype)
                          for x, factor in ((keys, key_scale), (values, value_scale)))
            parts.append(ragged_partial(
                grouped, key, value, query.new_empty(0), [count], scale=scale, seen=seen, window=window, positions=at,
                softcap=softcap,
            ))
    batch, heads = query.shape[:2]
    output, lse = torch.cat([x.output for x in parts], 1), torch.cat([x.lse for x in parts], 1)
    return Partial(output.view(batch, heads, *output.shape[2:]), lse.view(batch, heads, -1))


def from_e4m3(x: Tensor) -> Tensor:
    """The numbers of bytes. float32"""
    return look_up(_every_e4m3(x.device), x)


@functools.lru_cache(maxsize=64)
def _every_e4m3(device: torch.device) -> Tensor:
    """The number of every byte: torch converts an array of them on a CPU five times slower than it looks them up."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().to(device)


def _of_head(factor: Tensor | None, head: int) -> Tensor | float:
    """The factor of one KV head's numbers."""
    return 1.0 if factor is None else factor[min(head, len(factor) - 1)]
