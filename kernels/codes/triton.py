"""Reading packed entries in kernels: bytes are unpacked to codes and dequantized in registers."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.pack.torch import Codes


class PackedEntries(NamedTuple):
    """Codes as arguments of a kernel: as words of four bytes if the width of a vector allows it."""

    packed: Tensor
    scale: Tensor
    minimum: Tensor
    batch: int  # strides of `packed`
    head: int
    scale_batch: int
    scale_head: int
    tokens: int


def as_entries(codes: Codes, kv_heads: int) -> PackedEntries:
    """The kernel arguments for codes of [B, H_kv, n] vectors, whose parameters may be shared by all heads."""
    packed, scale = codes.packed, codes.scale.expand(-1, kv_heads, -1, -1)
    minimum = codes.minimum.expand(-1, kv_heads, -1, -1)
    assert packed.shape[2] < 2 or (
        packed.stride()[2:] == (packed.shape[3], 1) and scale.stride() == minimum.stride()
        and (scale.shape[2] < 2 or scale.stride(2) == scale.shape[3])
    ), "entries and their parameters must be contiguous"
    packed = packed.view(torch.int32 if whole_words(codes.width) else torch.uint8)
    return PackedEntries(
        packed, scale, minimum, packed.stride(0), packed.stride(1), scale.stride(0), scale.stride(1), codes.tokens
    )


def whole_words(width: int) -> bool:
    """Whether every part of a vector's codes is a power of two of words, for any number of bits."""
    return width >= 32 and width == triton.next_power_of_2(width)


def span_of(codes: Codes, block: int) -> int:
    """Entries of a block that share parameters, if blocks and groups are aligned; 0 if they are not."""
    if codes.tokens % block == 0:
        return block
    return codes.tokens if block % codes.tokens == 0 else 0


@triton.jit
def load_codes(
    entries, batch, head, entry, inside, bits: tl.constexpr, width: tl.constexpr, signed: tl.constexpr,
    dtype: tl.constexpr, assembly: tl.constexpr, block_d: tl.constexpr,
):
    """Load the codes of a block of entries; zero for entries not `inside` and for channels from `width` on."""
    part: tl.constexpr = 2 if bits == 3 else bits  # of 3-bit codes, the high bits follow the low bits of all codes
    packed = entries.packed + batch * entries.batch + head * entries.head
    if width == block_d and width >= 32 and bits > 1:
        packed += entry.to(tl.int64)[:, None] * (width * bits // 32)
        code = load_words(packed, inside, part, False, width, signed, dtype, assembly)
        if bits == 3:
            code += load_words(packed + width // 16, inside, part, True, width, signed, dtype, assembly)
    else:
        high: tl.constexpr = (width * part + 7) // 8
        packed += entry.to(tl.int64)[:, None] * (high + (width + 7) // 8 if bits == 3 else high)
        d = tl.arange(0, block_d)
        code = gather_codes(packed, inside, part, width, d, signed)
        if bits == 3:
            code += gather_codes(packed + high, inside, 1, width, d, signed) * 4
        code = code.to(dtype)
    return code


@triton.jit
def bring_back(
    code, entries, batch, head, start, stop, width: tl.constexpr, span: tl.constexpr, channels: tl.constexpr,
    signed: tl.constexpr,
):
    """Dequantize the codes of a block of entries."""
    block_n: tl.constexpr = code.shape[0]
    block_d: tl.constexpr = code.shape[1]
    scale = entries.scale + batch * entries.scale_batch + head * entries.scale_head
    minimum = entries.minimum + batch * entries.scale_batch + head * entries.scale_head
    groups: tl.constexpr = width // channels
    if span > 0 and width == block_d and groups * channels == width and groups & (groups - 1) == 0:
        every, each = start // entries.tokens + tl.arange(0, block_n // span), tl.arange(0, groups)
        at = every.to(tl.int64)[:, None] * groups + each[None, :]
        held = (every * entries.tokens < stop)[:, None]
        code *= spread(tl.load(scale + at, mask=held, other=0.0), span, channels).to(code.dtype)
        if not signed:
            code += spread(tl.load(minimum + at, mask=held, other=0.0), span, channels).to(code.dtype)
    else:
        entry, d = start + tl.arange(0, block_n), tl.arange(0, block_d)
        at = (entry // entries.tokens).to(tl.int64)[:, None] * groups + (d // channels)[None, :]
        held = (entry < stop)[:, None] & (d < width)[None, :]
        code *= tl.load(scale + at, mask=held, other=0.0).to(code.dtype)
        if not signed:
            code += tl.load(minimum + at, mask=held, other=0.0).to(code.dtype)
    return code


@triton.jit
def spread(x, span: tl.constexpr, channels: tl.constexpr):
    """Repeat the parameters of groups for each of their elements. [n, g] -> [n * span, g * channels]"""
    wide = tl.broadcast_to(x[:, None, :, None], [x.shape[0], span, x.shape[1], channels])
    return wide.reshape([x.shape[0] * span, x.shape[1] * channels])


@triton.jit
def load_words(
    packed, inside, bits: tl.constexpr, high: tl.constexpr, width: tl.constexpr, signed: tl.constexpr,
    dtype: tl.constexpr, assembly: tl.constexpr,
):
    """Codes of `bits` bits, or four times the `high` bits of 3-bit codes, plane by plane (see `pack`). [n, width]"""
    words: tl.constexpr = width * bits // 32
    j = tl.arange(0, words)[None, :]
    if high:  # half as wide: the planes of even bits are next to those of odd bits
        word = tl.load(packed + j % (words // 2), mask=inside[:, None], other=0) >> j // (words // 2)
    else:
        word = tl.load(packed + j, mask=inside[:, None], other=0)
    even = tl.join(word.to(tl.uint8), (word >> 16).to(tl.uint8))
    odd = tl.join((word >> 8).to(tl.uint8), (word >> 24).to(tl.uint8))
    byte = tl.join(even, odd).reshape([word.shape[0], words * 4])  # all bytes, in order
    x = take_plane(byte, 0, bits, high, signed, dtype, assembly)
    if bits == 4:
        x = tl.join(x, take_plane(byte, 4, bits, high, signed, dtype, assembly)).permute(0, 2, 1)
    if bits == 2:
        x = tl.join(x, take_plane(byte, 2, bits, high, signed, dtype, assembly))
        third = take_plane(byte, 4, bits, high, signed, dtype, assembly)
        last = tl.join(third, take_plane(byte, 6, bits, high, signed, dtype, assembly))
        x = tl.join(x, last).permute(0, 3, 2, 1)
    return x.reshape([word.shape[0], width])


@triton.jit
def take_plane(
    byte, place: tl.constexpr, bits: tl.constexpr, high: tl.constexpr, signed: tl.constexpr, dtype: tl.constexpr,
    assembly: tl.constexpr,
):
    """The codes at one bit offset of all bytes; for `high`, one bit times four.

    For float16, four bytes are converted at a time: the bytes 0x64 and b are the float16 number 1024 + b. One exact
    multiplication and one exact subtraction then give the code for any bit offset.
    """
    keep: tl.constexpr = 128 if signed else (1 if high else 2**bits - 1) << place  # mask; if signed, bit to flip
    if assembly and dtype == tl.float16:
        exponent: tl.constexpr = (2 if high else 0) - place
        factor: tl.constexpr = (15 + exponent) * 0x04000400  # of two float16s, 2 ** exponent
        less: tl.constexpr = (32 + 25 + exponent) * 0x04000400 + (0x00800080 if signed else 0)  # -1024 times that
        x = tl.inline_asm_elementwise(
            f"{{ .reg .b32 t, f, o; {'xor' if signed else 'and'}.b32 t, $2, {keep * 0x01010101}; "
            f"mov.b32 f, {factor}; mov.b32 o, {less}; "
            "prmt.b32 $0, t, 0x64646464, 0x4140; prmt.b32 $1, t, 0x64646464, 0x4342; "
            "fma.rn.f16x2 $0, $0, f, o; fma.rn.f16x2 $1, $1, f, o; }",
            "=r,=r,r", [byte], tl.float16, is_pure=True, pack=4,
        )
    elif signed:
        x = byte.to(tl.int8, bitcast=True).to(dtype)
    else:
        x = ((byte & keep) >> place).to(dtype) * (4 if high else 1)
    return x


@triton.jit
def gather_codes(packed, inside, bits: tl.constexpr, width: tl.constexpr, d, signed: tl.constexpr):
    """Load codes of vectors of any width, byte by byte; zero from `width` on. [n, block_d]"""
    per_entry: tl.constexpr = (width * bits + 7) // 8
    byte = tl.load(packed + (d % per_entry)[None, :], mask=inside[:, None] & (d < width)[None, :], other=0)
    if signed:
        code = byte.to(tl.int8, bitcast=True)
    else:
        code = (byte >> (d // per_entry * bits).to(tl.uint8)[None, :]) & (2**bits - 1)
    return code
