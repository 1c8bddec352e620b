"""Packed rows of 8 bits with a scale each and no minima: the packed operation's kernel, causal; and rows to codes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.dense_attention.triton import padded
from kvbench.kernels.pack.torch import Codes
from kvbench.kernels.pack.triton import divide, round_even
from kvbench.kernels.packed_attention.triton import attend

ROWS = 16
"""Rows of a program that quantizes."""


def int8_attention(
    query: Tensor, key: Tensor, value: Tensor, key_scale: Tensor, value_scale: Tensor, *, scale: float,
    window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None, length: Tensor | None = None,
) -> Tensor:
    """Attention of the last T rows over all N rows of codes; see `torch.int8_attention`. [B, H_q, T, D_v]"""
    keys, values = (
        Codes(codes, scales[..., None], scales[..., None], 8, codes.shape[3])  # minima are not read
        for codes, scales in ((key, key_scale), (value, value_scale))
    )
    return attend(
        query, keys, values, before=key.shape[2] - query.shape[2], scale=scale, window=window, softcap=softcap,
        sinks=sinks, length=length, causal=True, signed=True, dtype=query.dtype,
    )[0]


def quantize_rows(key: Tensor, value: Tensor) -> dict[str, Tensor]:
    """Codes and scales of new rows, see `torch.quantize_rows`, key and value in one pass each."""
    rows: dict[str, Tensor] = {}
    for name, x in (("key", key), ("value", value)):
        batch, heads, count, width = x.shape
        rows[name] = x.new_empty(x.shape, dtype=torch.int8)
        rows[f"{name}_scale"] = x.new_empty(x.shape[:3], dtype=torch.float16)
        if count:
            code_rows[(triton.cdiv(count, ROWS), batch * heads)](
                x, rows[name], rows[f"{name}_scale"], count, heads, *x.stride(), width=width, block_n=ROWS,
                block_d=padded(width), num_warps=4,
            )
    return rows


@triton.jit(do_not_specialize=["count"])
def code_rows(
    x, codes, scales, count, heads, x_batch, x_head, x_row, x_element, width: tl.constexpr, block_n: tl.constexpr,
    block_d: tl.constexpr,
):
    """A block of rows of one head."""
    head = tl.program_id(1).to(tl.int64)
    row, d = tl.program_id(0) * block_n + tl.arange(0, block_n), tl.arange(0, block_d)
    inside = (row < count)[:, None] & (d < width)[None, :]
    rows = x + head // heads * x_batch + head % heads * x_head + row.to(tl.int64)[:, None] * x_row
    exact = tl.load(rows + d[None, :] * x_element, mask=inside, other=0.0).to(tl.float32)
    scale = divide(tl.max(tl.abs(exact), 1), 127.0).to(tl.float16)
    divisor = tl.where(scale == 0.0, 1.0, scale.to(tl.float32))  # rows of zeros stay zeros
    code = tl.clamp(round_even(divide(exact, divisor[:, None])), -127.0, 127.0)
    at = head * count + row
    tl.store(scales + at, scale, mask=row < count)
    tl.store(codes + at[:, None] * width + d[None, :], code.to(tl.int8), mask=inside)
