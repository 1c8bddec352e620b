"""Int8 attention by the kernel of `packed_attention`, for 8-bit codes without minima; and quantization to int8."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.dense_attention.triton import padded
from kvbench.kernels.pack.torch import Codes
from kvbench.kernels.pack.triton import divide, round_even
from kvbench.kernels.packed_attention.triton import attend

ENTRIES = 16
"""Entries that a program quantizes."""


def int8_attention(
    query: Tensor, key: Tensor, value: Tensor, key_scale: Tensor, value_scale: Tensor, *, scale: float,
    window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None, length: Tensor | None = None,
) -> Tensor:
    """Attention of the last T tokens over all N entries; see `torch.int8_attention`. [B, H_q, T, D_v]"""
    keys, values = (
        Codes(codes, scales[..., None], scales[..., None], 8, codes.shape[3])  # minima are not read
        for codes, scales in ((key, key_scale), (value, value_scale))
    )
    return attend(
        query, keys, values, before=key.shape[2] - query.shape[2], scale=scale, window=window, softcap=softcap,
        sinks=sinks, length=length, causal=True, signed=True, dtype=query.dtype,
    )[0]


def quantize_rows(key: Tensor, value: Tensor) -> dict[str, Tensor]:
    """Codes and scales of new entries; see `torch.quantize_rows`. One pass over keys and one over values."""
    entries: dict[str, Tensor] = {}
    for name, x in (("key", key), ("value", value)):
        batch, heads, count, width = x.shape
        entries[name] = x.new_empty(x.shape, dtype=torch.int8)
        entries[f"{name}_scale"] = x.new_empty(x.shape[:3], dtype=torch.float16)
        if count:
            code_entries[(triton.cdiv(count, ENTRIES), batch * heads)](
                x, entries[name], entries[f"{name}_scale"], count, heads, *x.stride(), width=width, block_n=ENTRIES,
                block_d=padded(width), num_warps=4,
            )
    return entries


@triton.jit(do_not_specialize=["count"])
def code_entries(
    x, codes, scales, count, heads, x_batch, x_head, x_entry, x_element, width: tl.constexpr, block_n: tl.constexpr,
    block_d: tl.constexpr,
):
    """Quantize a block of entries of one head."""
    head = tl.program_id(1).to(tl.int64)
    entry, d = tl.program_id(0) * block_n + tl.arange(0, block_n), tl.arange(0, block_d)
    inside = (entry < count)[:, None] & (d < width)[None, :]
    entries = x + head // heads * x_batch + head % heads * x_head + entry.to(tl.int64)[:, None] * x_entry
    exact = tl.load(entries + d[None, :] * x_element, mask=inside, other=0.0).to(tl.float32)
    scale = divide(tl.max(tl.abs(exact), 1), 127.0).to(tl.float16)
    divisor = tl.where(scale == 0.0, 1.0, scale.to(tl.float32))  # entries of zeros stay zeros
    code = tl.clamp(round_even(divide(exact, divisor[:, None])), -127.0, 127.0)
    at = head * count + entry
    tl.store(scales + at, scale, mask=entry < count)
    tl.store(codes + at[:, None] * width + d[None, :], code.to(tl.int8), mask=inside)
