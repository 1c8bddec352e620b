"""Reference implementation: single bits in Python integers, and arithmetic in float64, one group at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

PARTS = {1: [1], 2: [2], 3: [2, 1], 4: [4], 8: [8]}


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes along the last axis; see `torch.pack`. [..., n] -> [..., bytes] uint8"""
    entries = [_pack_entry(entry, bits) for entry in codes.reshape(-1, codes.shape[-1]).tolist()]
    return torch.tensor(entries, dtype=torch.uint8).view(*codes.shape[:-1], -1)


def _pack_entry(entry: list[int], bits: int) -> list[int]:
    packed = []
    for part, below in zip(PARTS[bits], (0, 2), strict=False):
        width = math.ceil(len(entry) / (8 // part))
        packed_part = [0] * width
        for i, code in enumerate(entry):
            packed_part[i % width] |= (code >> below) % 2**part << i // width * part
        packed += packed_part
    return packed


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` codes of every vector. [..., bytes] -> [..., count] uint8"""
    entries = []
    for entry in packed.reshape(-1, packed.shape[-1]).tolist():
        codes = [0] * count
        for part, below in zip(PARTS[bits], (0, 2), strict=False):
            width = math.ceil(count / (8 // part))
            for i in range(count):
                codes[i] |= (entry[i % width] >> i // width * part) % 2**part << below
            entry[:width] = []
        entries.append(codes)
    return torch.tensor(entries, dtype=torch.uint8).view(*packed.shape[:-1], count)


def dequantize(
    packed: Tensor, scale: Tensor, minimum: Tensor, bits: int, width: int, *, tokens: int = 1, channels: int = 1
) -> Tensor:
    """Dequantize codes. [..., n, bytes] -> [..., n, width] float64"""
    exact = unpack(packed, bits, width).double()
    for entry in range(exact.shape[-2]):
        for channel in range(width):
            group = (..., entry // tokens, channel // channels)
            exact[..., entry, channel] = exact[..., entry, channel] * scale[group].double() + minimum[group].double()
    return exact
