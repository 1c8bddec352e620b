"""Asymmetric quantization with rounding to nearest, and packing along the last axis.

A vector of n codes of b bits takes w = ceil(n * b / 8) bytes. Byte j has the codes j, j + w, j + 2w, ... of the vector,
the first in the lowest bits, so shifting all bytes gives w adjacent codes at once, a plane. A vector of 3-bit codes is
stored as a vector of the two low bits followed by a vector of the high bits, so 8 codes take 3 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

BITS = (2, 3, 4, 8)
PARTS = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 8: (8,)}
"""Bits of the vectors that a vector of codes is split into, lowest bits first."""
PARAMETER_BYTES = 4
"""A scale and a minimum in float16."""


@dataclass(frozen=True)
class Codes:
    """Packed vectors: x = code * scale + minimum, with one scale and minimum per group of tokens or channels."""

    packed: Tensor  # [..., n, packed_width(width, bits)] uint8
    scale: Tensor  # [..., n / tokens, width / channels] float16
    minimum: Tensor  # as scale
    bits: int
    width: int
    """Elements of a vector."""

    @property
    def tokens(self) -> int:
        """Tokens of a group."""
        return self.packed.shape[-2] // self.scale.shape[-2] if self.scale.shape[-2] else 1

    @property
    def channels(self) -> int:
        """Elements of a vector that are in one group."""
        return self.width // self.scale.shape[-1]

    def slice(self, start: int, stop: int) -> Codes:
        """The vectors from `start` to `stop`, as views: whole groups, or a part of one."""
        assert start // self.tokens == (stop - 1) // self.tokens or not (start % self.tokens or stop % self.tokens)
        groups = slice(start // self.tokens, -(-stop // self.tokens))
        return replace(
            self, packed=self.packed[..., start:stop, :], scale=self.scale[..., groups, :],
            minimum=self.minimum[..., groups, :],
        )


def packed_width(count: int, bits: int) -> int:
    """Bytes of a vector of `count` codes."""
    return sum(_part_width(count, part) for part in PARTS[bits])


def _part_width(count: int, part: int) -> int:
    return -(-count * part // 8)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes along the last axis. [..., n] uint8, each below 2 ** bits -> [..., packed_width(n, bits)] uint8"""
    entries, below = [], 0
    for part in PARTS[bits]:
        shifts = _shifts(part, codes.device)
        width = _part_width(codes.shape[-1], part)
        here = (codes >> below) & (2**part - 1)
        here = F.pad(here, (0, width * len(shifts) - codes.shape[-1])).unflatten(-1, (len(shifts), width))
        entries.append((here << shifts[:, None]).sum(-2, dtype=torch.uint8))
        below += part
    return torch.cat(entries, dim=-1)


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` codes of every vector. [..., packed_width(count, bits)] -> [..., count] uint8"""
    parts = [
        planes.movedim(0, -2).flatten(-2)[..., :count] << below for below, planes in code_planes(packed, bits, count)
    ]
    return sum(parts[1:], start=parts[0])


def look_up(levels: Tensor, codes: Tensor) -> Tensor:
    """The level of every code, four times as fast on a CPU as indexing.

    levels: [N, ...]; codes: uint8 of any shape. Returns [codes' shape, ...].
    """
    return levels.index_select(0, codes.flatten().int()).view(*codes.shape, *levels.shape[1:])


def code_planes(packed: Tensor, bits: int, count: int) -> list[tuple[int, Tensor]]:
    """Codes in the order of memory: a code is the sum over the parts (below, planes) of its element of planes << below.

    Element i of a vector is at i % w of plane i // w in [planes, ..., w]; the last planes may go beyond `count`.
    """
    parts, start, below = [], 0, 0
    for part in PARTS[bits]:
        width = _part_width(count, part)
        entry = packed if len(PARTS[bits]) == 1 else packed[..., start : start + width].contiguous()
        shifts = _shifts(part, packed.device).view(-1, *[1] * packed.dim())
        parts.append((below, (entry >> shifts).bitwise_and_(2**part - 1) if part < 8 else entry[None]))
        start, below = start + width, below + part
    return parts


def _shifts(bits: int, device: torch.device) -> Tensor:
    return torch.arange(0, 8, bits, dtype=torch.uint8, device=device)


def quantize(x: Tensor, bits: int, *, tokens: int = 1, channels: int = 1) -> Codes:
    """Round to the nearest code, in groups of `tokens` vectors x `channels` elements. x: [..., n, D]

    The minimum is rounded down and the scale up to float16 before the codes are computed with them. The codes therefore
    cover the range of a group, and the error is at most scale / 2 (up to float32 rounding). A group of equal values
    that float16 can represent is exact, with scale 0.

    Raises:
        ValueError: a minimum or a scale exceeds float16's 65504, or is not a number.
    """
    levels = 2**bits - 1
    grouped = x.float().unflatten(-1, (-1, channels)).unflatten(-3, (-1, tokens))  # [..., n/t, t, D/c, c]
    scale, minimum = parameters(grouped.amin((-3, -1), keepdim=True), grouped.amax((-3, -1), keepdim=True), levels)
    if not (minimum.isfinite() & scale.isfinite()).all():
        raise ValueError(f"{refusal(bits)} They go from {x.amin().item():.4g} to {x.amax().item():.4g}.")
    codes = (grouped - minimum.float()) / scale.float().masked_fill(scale == 0, 1.0)
    # The range is covered, so clamping changes nothing; a larger code would overwrite the bits of others.
    codes = codes.round_().clamp_(0, levels).to(torch.uint8).flatten(-2).flatten(-3, -2)
    return Codes(
        pack(codes, bits), scale.squeeze(-1).squeeze(-2), minimum.squeeze(-1).squeeze(-2), bits, x.shape[-1]
    )


def parameters(low: Tensor, high: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Scales and minima of groups in float16, from their smallest and largest elements."""
    minimum = _round_down(low)
    # A tensor on the device, because CUDA multiplies by the reciprocal of a Python number instead of dividing.
    return -_round_down((minimum.float() - high) / high.new_full((), levels)), minimum


def refusal(bits: int) -> str:
    """The error message for entries that cannot be quantized."""
    return (
        f"entries with values beyond {torch.finfo(torch.float16).max:.0f}, the limit of float16 scales and minima: "
        f"they cannot be stored in {bits} bits."
    )


def _round_down(x: Tensor) -> Tensor:
    """The largest float16 that is not above x."""
    near = x.to(torch.float16)
    return torch.where(near.float() > x, torch.nextafter(near, near.new_full((), -torch.inf)), near)


def dequantize(codes: Codes) -> Tensor:
    """Dequantize codes. [..., n, D] float32"""
    shape = codes.packed.shape[:-1]
    grouped = unpack(codes.packed, codes.bits, codes.width).float()
    grouped = grouped.unflatten(-1, (-1, codes.channels)).unflatten(-3, (-1, codes.tokens))  # [..., n/t, t, D/c, c]
    exact: Tensor = grouped * codes.scale.float()[..., None, :, None] + codes.minimum.float()[..., None, :, None]
    return exact.reshape(*shape, codes.width)
