"""Quantization in one pass, and dequantization. `pack` and `unpack`, which only checks and tests use, are torch's."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.codes.triton import as_entries, bring_back, load_codes, span_of
from kvbench.kernels.dense_attention.triton import padded
from kvbench.kernels.pack.torch import Codes, pack, packed_width, parameters, refusal, unpack

__all__ = ["dequantize", "pack", "quantize", "unpack"]

ELEMENTS = 4096
"""Elements that a program quantizes. Not tuned on a GPU."""
LONGEST = 16384
"""Most elements of a group of tokens, over all channels, whose parameters a program computes itself."""
ENTRIES = 32
"""Vectors that a program dequantizes."""


def quantize(x: Tensor, bits: int, *, tokens: int = 1, channels: int = 1) -> Codes:
    """Round to the nearest code of each group; the codes equal those of `torch.quantize` bit for bit.

    Values beyond float16 are detected on the device, so that no step waits for the host: on a GPU, the next
    synchronizing call fails.
    """
    held = x[(None,) * (4 - x.dim())]
    _, second, n_entries, width = held.shape
    assert n_entries % tokens == 0 and width % channels == 0, "whole groups"
    codes = Codes(
        x.new_empty((*x.shape[:-1], packed_width(width, bits)), dtype=torch.uint8),
        x.new_empty((*x.shape[:-2], n_entries // tokens, width // channels), dtype=torch.float16),
        x.new_empty((*x.shape[:-2], n_entries // tokens, width // channels), dtype=torch.float16), bits, width,
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
    every = max(1, ELEMENTS // padded(width) // (block_t if within else 1))  # groups of tokens, or vectors
    entries = every * tokens if within else every
    blocks = triton.cdiv(n_entries, entries)
    code_groups[(blocks * held.shape[0] * second,)](
        held, *_tensors(codes), blocks, entries, n_entries, second, tokens, *held.stride(), bits=bits, width=width,
        channels=channels, within=within, block_g=every, block_t=block_t, block_r=int(triton.next_power_of_2(entries)),
        block_d=int(triton.next_power_of_2(width // channels)), block_c=int(triton.next_power_of_2(channels)),
        num_warps=4,
    )
    whole = (codes.scale.isfinite() & codes.minimum.isfinite()).all()
    torch._assert_async(whole, refusal(bits))  # noqa: SLF001  # there is no public function
    return codes


def dequantize(codes: Codes) -> Tensor:
    """Dequantize codes. [..., n, D] float32"""
    packed, scale, minimum = (x[(None,) * (4 - x.dim())] for x in _tensors(codes))
    first, second, n_entries = packed.shape[:3]
    exact = packed.new_empty((first, second, n_entries, codes.width), dtype=torch.float32)
    if exact.numel():
        entries = as_entries(Codes(packed, scale, minimum, codes.bits, codes.width), second)
        blocks = triton.cdiv(n_entries, ENTRIES)
        write_entries[(blocks * first * second,)](
            entries, exact, blocks, n_entries, second, bits=codes.bits, width=codes.width, channels=codes.channels,
            span=span_of(codes, ENTRIES), block_n=ENTRIES, block_d=padded(codes.width), num_warps=4,
        )
    return exact.view(*codes.packed.shape[:-1], codes.width)


def _tensors(codes: Codes) -> tuple[Tensor, Tensor, Tensor]:
    return codes.packed, codes.scale, codes.minimum


@triton.jit(do_not_specialize=["blocks", "n_entries"])
def code_groups(
    x, packed, scale, minimum, blocks, entries, n_entries, second, tokens, x_first, x_second, x_entry, x_element,
    bits: tl.constexpr, width: tl.constexpr, channels: tl.constexpr, within: tl.constexpr, block_g: tl.constexpr,
    block_t: tl.constexpr, block_r: tl.constexpr, block_d: tl.constexpr, block_c: tl.constexpr,
):
    """Quantize some groups of tokens; with `within`, also compute their parameters."""
    lead, first = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * entries
    groups: tl.constexpr = width // channels
    x += lead // second * x_first + lead % second * x_second
    scale += lead * (n_entries // tokens) * groups
    minimum += lead * (n_entries // tokens) * groups
    if within:
        group = first // tokens + tl.arange(0, block_g)[:, None, None, None]
        t, g = tl.arange(0, block_t)[None, :, None, None], tl.arange(0, block_d)[None, None, :, None]
        c = tl.arange(0, block_c)[None, None, None, :]
        entry = group * tokens + t
        inside = (t < tokens) & (entry < n_entries) & (g < groups) & (c < channels)
        exact = tl.load(x + entry.to(tl.int64) * x_entry + (g * channels + c) * x_element, mask=inside, other=0.0)
        exact = exact.to(tl.float32)
        low = tl.min(tl.min(tl.where(inside, exact, float("inf")), 3), 1)
        high = tl.max(tl.max(tl.where(inside, exact, float("-inf")), 3), 1)
        low += tl.sum(tl.sum(exact * 0.0, 3), 1)  # keep NaN
        floor = round_down(low)
        step = -round_down(divide(floor.to(tl.float32) - high, (1 << bits) - 1))
        group = first // tokens + tl.arange(0, block_g)[:, None]
        at = group.to(tl.int64) * groups + tl.arange(0, block_d)[None, :]
        inside = (group * tokens < n_entries) & (tl.arange(0, block_d) < groups)[None, :]
        tl.store(minimum + at, floor, mask=inside)
        tl.store(scale + at, step, mask=inside)
        tl.debug_barrier()  # other threads read the parameters
    per_entry: tl.constexpr = (width * 2 + 7) // 8 + (width + 7) // 8 if bits == 3 else (width * bits + 7) // 8
    r = tl.arange(0, block_r)
    real, entry = (r < entries) & (first + r < n_entries), first + r
    packed += (lead * n_entries + entry)[:, None] * per_entry
    if bits == 3:
        store_part(packed, x, scale, minimum, real, entry, tokens, x_entry, x_element, 3, 2, 0, width, channels)
        packed += (width * 2 + 7) // 8
        store_part(packed, x, scale, minimum, real, entry, tokens, x_entry, x_element, 3, 1, 2, width, channels)
    else:
        store_part(packed, x, scale, minimum, real, entry, tokens, x_entry, x_element, bits, bits, 0, width, channels)


@triton.jit
def store_part(
    packed, x, scale, minimum, real, entry, tokens, x_entry, x_element, bits: tl.constexpr, part: tl.constexpr,
    below: tl.constexpr, width: tl.constexpr, channels: tl.constexpr,
):
    """Store the bytes of `part` bits of each code of a block of vectors, from bit `below` on; see `pack`."""
    per_entry: tl.constexpr = (width * part + 7) // 8
    levels: tl.constexpr = (1 << bits) - 1
    j = tl.arange(0, triton.next_power_of_2(per_entry))[None, :]
    group = (entry // tokens).to(tl.int64)[:, None] * (width // channels)
    byte = tl.zeros([entry.shape[0], j.shape[1]], tl.int32)
    for p in tl.static_range(8 // part):
        channel = p * per_entry + j
        inside = real[:, None] & (j < per_entry) & (channel < width)
        exact = tl.load(x + entry.to(tl.int64)[:, None] * x_entry + channel * x_element, mask=inside, other=0.0)
        step = tl.load(scale + group + channel // channels, mask=inside, other=0.0).to(tl.float32)
        floor = tl.load(minimum + group + channel // channels, mask=inside, other=0.0).to(tl.float32)
        code = round_even(divide(exact.to(tl.float32) - floor, tl.where(step == 0.0, 1.0, step)))
        code = tl.minimum(tl.maximum(code, 0.0), levels).to(tl.int32)
        byte |= (code >> below & ((1 << part) - 1)) << (p * part)
    tl.store(packed + j, byte.to(tl.uint8), mask=real[:, None] & (j < per_entry))


@triton.jit
def divide(x, y):
    """The quotient rounded to nearest, as in torch; Triton's own division is not exact."""
    return tl.div_rn(x, tl.zeros_like(x) + y)


@triton.jit
def round_even(x):
    """The nearest integer, ties to even, for numbers far below 2 ** 22."""
    return x + 12582912.0 - 12582912.0  # 1.5 * 2 ** 23, where float32 has no fractional digits


@triton.jit
def round_down(x):
    """The largest float16 that is not above x."""
    near = x.to(tl.float16)
    bits = near.to(tl.int16, bitcast=True)
    less = tl.where(bits > 0, bits - 1, tl.where(bits == 0, -32767, bits + 1))
    return tl.where(near.to(tl.float32) > x, less.to(tl.int16).to(tl.float16, bitcast=True), near)


@triton.jit(do_not_specialize=["blocks", "n_entries"])
def write_entries(
    entries, exact, blocks, n_entries, second, bits: tl.constexpr, width: tl.constexpr, channels: tl.constexpr,
    span: tl.constexpr, block_n: tl.constexpr, block_d: tl.constexpr,
):
    """Dequantize a block of vectors."""
    lead, start = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * block_n
    batch, head = lead // second, lead % second
    entry, d = start + tl.arange(0, block_n), tl.arange(0, block_d)
    x = load_codes(entries, batch, head, entry, entry < n_entries, bits, width, False, tl.float32, False, block_d)
    x = bring_back(x, entries, batch, head, start, n_entries, width, span, channels, False)
    at = (lead * n_entries + entry)[:, None] * width + d[None, :]
    tl.store(exact + at, x, mask=(entry < n_entries)[:, None] & (d < width)[None, :])
