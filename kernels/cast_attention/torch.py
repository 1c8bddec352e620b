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
    length: Tensor | None = None,
) -> Partial:
    """Partial attention over adjacent entries that all precede the queries.

    query: [B, H_q, T, D]. keys, values: [B, H_kv, n, D], the bytes of e4m3 numbers. key_scale, value_scale: the factor
    of every number, [1] or [H_kv] float32; None: 1. start: the position of the first entry. length: how many of the
    entries count, on the device, the last of them a single query's own; None: all.
    """
    assert length is None or query.shape[2] == 1, "a length on the device is for a single query"
    single = query.shape[2] == 1 and (window is None or length is not None)
    batch, kv_heads, count = keys.shape[:3]
    size = kv_heads if single and keys.numel() <= BLOCK_ELEMENTS else 1
    at = None if window is None else torch.arange(start, start + count, device=keys.device)
    outputs = []
    for h in range(0, kv_heads, size):
        heads = slice(h, h + size)
        grouped = query.unflatten(1, (kv_heads, -1))[:, heads].flatten(1, 2)
        key, value = (
            (from_e4m3(x[:, heads]) * _of_heads(factor, heads)).to(query.dtype)
            for x, factor in ((keys, key_scale), (values, value_scale))
        )
        if single:
            outputs.append(dense_partial(
                grouped, key, value, scale=scale, seen=seen, window=window, softcap=softcap, length=length
            ))
        else:
            outputs.append(ragged_partial(
                grouped, key.flatten(0, 2), value.flatten(0, 2), query.new_empty(0), [count] * batch, scale=scale,
                seen=seen, window=window, positions=None if at is None else at.repeat(batch), softcap=softcap,
            ))
    return Partial(torch.cat([x.output for x in outputs], 1), torch.cat([x.lse for x in outputs], 1))


def from_e4m3(x: Tensor) -> Tensor:
    """The numbers of bytes. float32"""
    return look_up(_every_e4m3(x.device), x)


@functools.lru_cache(maxsize=64)
def _every_e4m3(device: torch.device) -> Tensor:
    """The number of every byte: torch converts an array of them on a CPU five times slower than it looks them up."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().to(device)


def _of_heads(factor: Tensor | None, heads: slice) -> Tensor | float:
    """The factor of some KV heads' numbers. [1, 1, 1] or [H, 1, 1]"""
    if factor is None:
        return 1.0
    return (factor if len(factor) == 1 else factor[heads])[:, None, None]
