"""Rows to codes in one pass over them, and back. `pack` and `unpack` are torch's: evidence and tests use them alone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.codes.triton import as_rows, bring_back, load_codes, span_of
from kvbench.kernels.dense_attention.triton import padded
from kvbench.kernels.pack.torch import Codes, pack, packed_width, parameters, refusal, unpack

__all__ = ["dequantize", "pack", "quantize", "unpack"]

ELEMENTS = 4096
"""Of a program that quantizes. Not measured yet."""
LONGEST = 16384
"""Elements of a group of tokens, all channels, that a program looks through by itself."""
ROWS = 32
"""Of a program that brings rows back."""


def quantize(x: Tensor, bits: int, *, tokens: int = 1, channels: int = 1) -> Codes:
    """Round to the nearest code of each group; see `torch.quantize`, whose codes these are, bit for bit.

    What float16 cannot hold is found on the device, so that no step waits for the host: on a GPU the next call that
    does wait fails.
    """
    held = x[(None,) * (4 - x.dim())]
    _, second, n_rows, width = held.shape
    assert n_rows % tokens == 0 and width % channels == 0, "whole groups"
    codes = Codes(
        x.new_empty((*x.shape[:-1], packed_width(width, bits)), dtype=torch.uint8),
        x.new_empty((*x.shape[:-2], n_rows // tokens, width // channels), dtype=torch.float16),
        x.new_empty((*x.shape[:-2], n_rows // tokens, width // channels), dtype=torch.float16), bits, width,
    )
    if x.numel() == 0:
        return codes
    block_t = int(triton.next_power_of_2(tokens))
    within = block_t * padded(width) <= LONGEST
    if not within:
        grouped = x.unflatten(-1, (-1, channels)).unflatten(-3, (-1, tokens))  # [..., n/t, t, D/c, c]
        found = parameters(grouped.amin((-3, -1)).float(), grouped.amax((-3, -1)).float(), 2**bits - 1)
        codes.scale.copy_(found[0])
        codes.minimum.copy_(found[1])
    every = max(1, ELEMENTS // padded(width) // (block_t if within else 1))  # groups of tokens, or rows
    rows = every * tokens if within else every
    blocks = triton.cdiv(n_rows, rows)
    code_groups[(blocks * held.shape[0] * second,)](
        held, *_tensors(codes), blocks, rows, n_rows, second, tokens, *held.stride(), bits=bits, width=width,
        channels=channels, within=within, block_g=every, block_t=block_t, block_r=int(triton.next_power_of_2(rows)),
        block_d=int(triton.next_power_of_2(width // channels)), block_c=int(triton.next_power_of_2(channels)),
        num_warps=4,
    )
    whole = (codes.scale.isfinite() & codes.minimum.isfinite()).all()
    torch._assert_async(whole, refusal(bits))  # noqa: SLF001  # there is no public one
    return codes


def dequantize(codes: Codes) -> Tensor:
    """What the codes stand for. [..., n, D] float32"""
    packed, scale, minimum = (x[(None,) * (4 - x.dim())] for x in _tensors(codes))
    first, second, n_rows = packed.shape[:3]
    exact = packed.new_empty((first, second, n_rows, codes.width), dtype=torch.float32)
    if exact.numel():
        rows = as_rows(Codes(packed, scale, minimum, codes.bits, codes.width), second)
        blocks = triton.cdiv(n_rows, ROWS)
        write_rows[(blocks * first * second,)](
            rows, exact, blocks, n_rows, second, bits=codes.bits, width=codes.width, channels=codes.channels,
            span=span_of(codes, ROWS), block_n=ROWS, block_d=padded(codes.width), num_warps=4,
        )
    return exact.view(*codes.packed.shape[:-1], codes.width)


def _tensors(codes: Codes) -> tuple[Tensor, Tensor, Tensor]:
    return codes.packed, codes.scale, codes.minimum


@triton.jit(do_not_specialize=["blocks", "n_rows"])
def code_groups(
    x, packed, scale, minimum, blocks, rows, n_rows, second, tokens, x_first, x_second, x_row, x_element,
    bits: tl.constexpr, width: tl.constexpr, channels: tl.constexpr, within: tl.constexpr, block_g: tl.constexpr,
    block_t: tl.constexpr, block_r: tl.constexpr, block_d: tl.constexpr, block_c: tl.constexpr,
):
    """Some groups of tokens, `rows` rows: parameters, where they are not there yet, and codes with them."""
    lead, first = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * rows
    groups: tl.constexpr = width // channels
    x += lead // second * x_first + lead % second * x_second
    scale += lead * (n_rows // tokens) * groups
    minimum += lead * (n_rows // tokens) * groups
    if within:
        group = first // tokens + tl.arange(0, block_g)[:, None, None, None]
        t, g = tl.arange(0, block_t)[None, :, None, None], tl.arange(0, block_d)[None, None, :, None]
        c = tl.arange(0, block_c)[None, None, None, :]
        row = group * tokens + t
        inside = (t < tokens) & (row < n_rows) & (g < groups) & (c < channels)
        exact = tl.load(x + row.to(tl.int64) * x_row + (g * channels + c) * x_element, mask=inside, other=0.0)
        exact = exact.to(tl.float32)
        low = tl.min(tl.min(tl.where(inside, exact, float("inf")), 3), 1)
        high = tl.max(tl.max(tl.where(inside, exact, float("-inf")), 3), 1)
        low += tl.sum(tl.sum(exact * 0.0, 3), 1)  # what is no number stays none
        floor = round_down(low)
        step = -round_down(divide(floor.to(tl.float32) - high, (1 << bits) - 1))
        group = first // tokens + tl.arange(0, block_g)[:, None]
        at = group.to(tl.int64) * groups + tl.arange(0, block_d)[None, :]
        inside = (group * tokens < n_rows) & (tl.arange(0, block_d) < groups)[None, :]
        tl.store(minimum + at, floor, mask=inside)
        tl.store(scale + at, step, mask=inside)
        tl.debug_barrier()  # other threads read them
    in_row: tl.constexpr = (width * 2 + 7) // 8 + (width + 7) // 8 if bits == 3 else (width * bits + 7) // 8
    r = tl.arange(0, block_r)
    real, row = (r < rows) & (first + r < n_rows), first + r
    packed += (lead * n_rows + row)[:, None] * in_row
    if bits == 3:
        store_part(packed, x, scale, minimum, real, row, tokens, x_row, x_element, 3, 2, 0, width, channels)
        packed += (width * 2 + 7) // 8
        store_part(packed, x, scale, minimum, real, row, tokens, x_row, x_element, 3, 1, 2, width, channels)
    else:
        store_part(packed, x, scale, minimum, real, row, tokens, x_row, x_element, bits, bits, 0, width, channels)


@triton.jit
def store_part(
    packed, x, scale, minimum, real, row, tokens, x_row, x_element, bits: tl.constexpr, part: tl.constexpr,
    below: tl.constexpr, width: tl.constexpr, channels: tl.constexpr,
):
    """The bytes of `part` bits of each code of a block of rows, from its bit `below` on: see `pack`."""
    in_row: tl.constexpr = (width * part + 7) // 8
    levels: tl.constexpr = (1 << bits) - 1
    j = tl.arange(0, triton.next_power_of_2(in_row))[None, :]
    group = (row // tokens).to(tl.int64)[:, None] * (width // channels)
    byte = tl.zeros([row.shape[0], j.shape[1]], tl.int32)
    for p in tl.static_range(8 // part):
        channel = p * in_row + j
        inside = real[:, None] & (j < in_row) & (channel < width)
        exact = tl.load(x + row.to(tl.int64)[:, None] * x_row + channel * x_element, mask=inside, other=0.0)
        step = tl.load(scale + group + channel // channels, mask=inside, other=0.0).to(tl.float32)
        floor = tl.load(minimum + group + channel // channels, mask=inside, other=0.0).to(tl.float32)
        code = round_even(divide(exact.to(tl.float32) - floor, tl.where(step == 0.0, 1.0, step)))
        code = tl.minimum(tl.maximum(code, 0.0), levels).to(tl.int32)
        byte |= (code >> below & ((1 << part) - 1)) << (p * part)
    tl.store(packed + j, byte.to(tl.uint8), mask=real[:, None] & (j < in_row))


@triton.jit
def divide(x, y):
    """The quotient, rounded to nearest, as torch's is; Triton's own division is off by a little."""
    return tl.div_rn(x, tl.zeros_like(x) + y)


@triton.jit
def round_even(x):
    """The nearest integer, of two the even one, for numbers far below 2 ** 22."""
    return x + 12582912.0 - 12582912.0  # 1.5 * 2 ** 23, where float32's digits end


@triton.jit
def round_down(x):
    """The next float16 that is not above x."""
    near = x.to(tl.float16)
    bits = near.to(tl.int16, bitcast=True)
    less = tl.where(bits > 0, bits - 1, tl.where(bits == 0, -32767, bits + 1))
    return tl.where(near.to(tl.float32) > x, less.to(tl.int16).to(tl.float16, bitcast=True), near)


@triton.jit(do_not_specialize=["blocks", "n_rows"])
def write_rows(
    rows, exact, blocks, n_rows, second, bits: tl.constexpr, width: tl.constexpr, channels: tl.constexpr,
    span: tl.constexpr, block_n: tl.constexpr, block_d: tl.constexpr,
):
    """A block of rows, brought back."""
    lead, start = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * block_n
    batch, head = lead // second, lead % second
    row, d = start + tl.arange(0, block_n), tl.arange(0, block_d)
    x = load_codes(rows, batch, head, row, row < n_rows, bits, width, False, tl.float32, False, block_d)
    x = bring_back(x, rows, batch, head, start, n_rows, width, span, channels, False)
    at = (lead * n_rows + row)[:, None] * width + d[None, :]
    tl.store(exact + at, x, mask=(row < n_rows)[:, None] & (d < width)[None, :])
