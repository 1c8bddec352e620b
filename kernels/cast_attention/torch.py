"""Partial attention over e4m3 numbers, converted one head at a time, or a whole sequence at once if they are few."""

from __future__ import annotations

import functools
from collections.abc import Callable

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

    def decode(at: tuple[slice, slice]) -> tuple[Tensor, Tensor]:
        key, value = (
            (from_e4m3(x[at]) * _of_heads(factor, at[1])).to(query.dtype)
            for x, factor in ((keys, key_scale), (values, value_scale))
        )
        return key, value

    return decoded_partial(
        query, decode, *keys.shape[1:3], scale=scale, seen=seen, start=start, window=window, softcap=softcap,
        length=length,
    )


def decoded_partial(
    query: Tensor, decode: Callable[[tuple[slice, slice]], tuple[Tensor, Tensor]], kv_heads: int, count: int, *,
    scale: float, seen: int, start: int, window: int | None, softcap: float | None, length: Tensor | None,
) -> Partial:
    """Partial attention over entries that are decoded one head at a time, or a whole sequence if they are few.

    decode: the keys and values of some sequences and KV heads. count: entries of a head.
    """
    assert length is None or query.shape[2] == 1, "a length on the device is for a single query"
    single = query.shape[2] == 1 and (window is None or length is not None)
    size = kv_heads if single and kv_heads * count * query.shape[3] <= BLOCK_ELEMENTS else 1
    at = None if window is None else torch.arange(start, start + count, device=query.device)
    parts = []
    for b, queries in enumerate(query[:, None]):  # [1, H_q, T, D]; a sequence gives the same bits alone
        for h, grouped in zip(range(0, kv_heads, size), queries.chunk(kv_heads // size, 1), strict=True):
            key, value = decode((slice(b, b + 1), slice(h, h + size)))
            if single:
                parts.append(dense_partial(
                    grouped, key, value, scale=scale, seen=seen, window=window, softcap=softcap, length=length
                ))
            else:
                parts.append(ragged_partial(
                    grouped, key[0, 0], value[0, 0], query.new_empty(0), [count], scale=scale, seen=seen,
                    window=window, positions=at, softcap=softcap,
                ))
    output, lse = torch.cat([x.output for x in parts], 1), torch.cat([x.lse for x in parts], 1)
    shape = query.shape[:2]
    return Partial(output.view(*shape, *output.shape[2:]), lse.view(*shape, -1))


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
