"""Partial attention over codes of uneven levels, decoded one head at a time, or a whole sequence if they are few."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.kernels.cast_attention.torch import decoded_partial, from_e4m3
from kvbench.kernels.pack.torch import look_up, unpack
from kvbench.kernels.ragged_attention.torch import Partial


@dataclass(frozen=True)
class Levels:
    """A part of packed vectors: x = table[code] * factor, with one factor per group of adjacent channels."""

    packed: Tensor  # [B, H_kv, n, packed_width(width, bits)] uint8
    factor: Tensor  # [B, H_kv, n, width / channels] float16, or the bytes of e4m3 numbers
    table: Tensor  # [2 ** bits] float32
    bits: int
    width: int
    """Elements of this part of a vector."""

    @property
    def channels(self) -> int:
        """Elements of a vector that share a factor."""
        return self.width // self.factor.shape[-1]

    def __getitem__(self, at: tuple[slice, slice]) -> Levels:
        """The codes of some sequences and heads."""
        return Levels(self.packed[at], self.factor[at], self.table, self.bits, self.width)


def decode_levels(parts: tuple[Levels, ...]) -> Tensor:
    """Vectors of which each part is coded by itself. [B, H_kv, n, D] float32"""
    decoded = [_decode(x) for x in parts]
    return decoded[0] if len(decoded) == 1 else torch.cat(decoded, dim=-1)


def _decode(part: Levels) -> Tensor:
    factor = from_e4m3(part.factor) if part.factor.dtype == torch.uint8 else part.factor.float()
    numbers = look_up(part.table, unpack(part.packed, part.bits, part.width))
    decoded: Tensor = (numbers.unflatten(-1, (-1, part.channels)) * factor[..., None]).flatten(-2)
    return decoded


def level_partial(
    query: Tensor, keys: tuple[Levels, ...], values: tuple[Levels, ...], *,
    scale: float, seen: int, start: int = 0, window: int | None = None, softcap: float | None = None,
    length: Tensor | None = None,
) -> Partial:
    """Partial attention over adjacent entries that all precede the queries.

    query: [B, H_q, T, D]. keys, values: one or two parts, side by side. start: the position of the first entry.
    length: how many of the entries count, on the device, the last of them a single query's own; None: all.
    """

    def decode(at: tuple[slice, slice]) -> tuple[Tensor, Tensor]:
        decoded_keys, decoded_values = (
            decode_levels(tuple(x[at] for x in parts)).to(query.dtype) for parts in (keys, values)
        )
        return decoded_keys, decoded_values

    return decoded_partial(
        query, decode, *keys[0].packed.shape[1:3], scale=scale, seen=seen, start=start, window=window, softcap=softcap,
        length=length,
    )
