"""Coders of keys and values: each vector is encoded by itself, possibly in coordinates of the coder's own."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.kernels.level_attention import Levels
from kvbench.kernels.pack import PARAMETER_BYTES, Codes, dequantize, look_up, packed_width, quantize
from kvbench.store.rotation import hadamard

CHANNEL_BYTES = NORM_BYTES = 2

Parts = dict[str, Tensor]
"""An encoded block by name, each tensor [B, H_kv, n, ...]."""


class Coder(ABC):
    """Encodes keys or values. Decoded vectors may be in other coordinates, into which queries are turned once a step.

    turn(q) . decode(encode(k)) is about q . k, and back(sum of weights times decode(encode(v))) about that of v.
    """

    @abstractmethod
    def encode(self, x: Tensor) -> Parts:
        """Encode vectors. x: [B, H_kv, n, D]"""

    @abstractmethod
    def decode(self, parts: Parts, width: int) -> Tensor:
        """Decode vectors of `width` elements, in the coder's own coordinates. [B, H_kv, n, W] float32"""

    @abstractmethod
    def entry_bytes(self, width: int) -> int:
        """Bytes of an encoded vector of `width` elements."""

    def fit(self, x: Tensor) -> Self:
        """The coder with what it takes from the context. x: [B, H_kv, n, D]"""
        del x
        return self

    def turn(self, query: Tensor) -> Tensor:
        """Queries in the coder's own coordinates. [B, H_q, T, D] -> [B, H_q, T, W]"""
        return query

    def back(self, output: Tensor) -> Tensor:
        """Outputs out of the coder's own coordinates. [B, H_q, T, W] -> [B, H_q, T, D]"""
        return output

    def codes(self, parts: Parts, width: int) -> Codes | None:
        """The block as the codes that `packed_attention` reads; None: it cannot."""
        del parts, width
        return None

    def casts(self, parts: Parts) -> tuple[Tensor, Tensor | None] | None:
        """The block as the e4m3 numbers that `cast_attention` reads, and their factor; None: it cannot."""
        del parts
        return None

    def level_codes(self, parts: Parts, width: int) -> tuple[Levels, ...] | None:
        """The block as the codes that `level_attention` reads, one or two parts of a vector; None: it cannot."""
        del parts, width
        return None

    def fixed_bytes(self, width: int, heads: int) -> int:
        """Bytes of `tensors`, for this many KV heads."""
        del width, heads
        return 0

    def tensors(self) -> list[Tensor]:
        """Tensors of the coder that count as stored: what depends on the context or on the model."""
        return []


def decode_signs(packed: Tensor) -> Tensor:
    """Packed bits as -1 and 1, in the order of their bytes. [..., w] uint8 -> [..., 8 w] float32"""
    return look_up(_signs_by_byte(packed.device), packed).flatten(-2)


def order_signs(x: Tensor) -> Tensor:
    """Products in the order of `decode_signs`: sign i is in byte i % w; zeros where none is. [..., n] -> [..., 8 w]"""
    width = packed_width(x.shape[-1], 1)
    planes: Tensor = F.pad(x, (0, 8 * width - x.shape[-1])).unflatten(-1, (8, width))
    return planes.mT.flatten(-2)


@functools.lru_cache(maxsize=64)
def _signs_by_byte(device: torch.device) -> Tensor:
    """The signs in every byte, once per device. [256, 8]"""
    return (torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device) & 1) * 2.0 - 1


def as_half(x: Tensor) -> Tensor:
    """Numbers in float16.

    Raises:
        ValueError: a number is beyond float16's 65504, or is none.
    """
    half = x.to(torch.float16)
    limit = "cannot be stored in float16, whose limit is 65504."
    try:  # a GPU fails at its next synchronizing call, so that no step waits for it
        torch._assert_async(half.isfinite().all(), f"numbers that {limit}")  # noqa: SLF001  # there is no public one
    except RuntimeError as error:
        raise ValueError(f"numbers up to {x.abs().amax().item():.4g} {limit}") from error
    return half


@dataclass(frozen=True)
class GroupCoder(Coder):
    """Uniform levels between the smallest and the largest element of each group of channels of one vector."""

    bits: int
    group: int | None
    """Channels of a group; None, or more than a vector has: all of them."""

    def channels(self, width: int) -> int:
        """Channels of a group."""
        return width if self.group is None else min(self.group, width)

    def encode(self, x: Tensor) -> Parts:
        """Codes, scales and minima."""
        codes = quantize(x, self.bits, channels=self.channels(x.shape[3]))
        return {"packed": codes.packed, "scale": codes.scale, "minimum": codes.minimum}

    def codes(self, parts: Parts, width: int) -> Codes:
        """The block as codes."""
        return Codes(**parts, bits=self.bits, width=width)

    def decode(self, parts: Parts, width: int) -> Tensor:
        """Decode vectors."""
        return dequantize(self.codes(parts, width))

    def entry_bytes(self, width: int) -> int:
        """Codes, and a scale and a minimum per group."""
        return packed_width(width, self.bits) + width // self.channels(width) * PARAMETER_BYTES


@dataclass(frozen=True)
class HadamardCoder(GroupCoder):
    """Uniform levels after a Hadamard rotation, with a part of every group's range cut off."""

    clip: float = 1.0
    """Share of a group's smallest and largest element that is kept."""

    def encode(self, x: Tensor) -> Parts:
        """Rotate, clip and encode."""
        rotated = hadamard(x.float())
        groups = rotated.unflatten(-1, (-1, self.channels(x.shape[3])))
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        return super().encode(groups.clamp(low * self.clip, high * self.clip).flatten(-2))

    def turn(self, query: Tensor) -> Tensor:
        """Rotate."""
        return hadamard(query)

    def back(self, output: Tensor) -> Tensor:
        """Rotate back: the rotation is its own inverse."""
        return hadamard(output)


@dataclass(frozen=True)
class SplitCoder(Coder):
    """Two coders: one for the channels of the largest norm in the context, per KV head, and one for the others."""

    share: float
    """Share of the channels for the first coder, rounded down to whole channels."""
    large: Coder
    small: Coder
    order: Tensor | None = None
    """The channels of `large`, then those of `small`, each by number: no code depends on a tie. [B, H_kv, D] int16"""

    def count(self, width: int) -> tuple[int, int]:
        """Channels of both coders."""
        first = int(self.share * width)
        return first, width - first

    def fit(self, x: Tensor) -> Self:
        """Find the channels."""
        norms = x.float().square().sum(2)
        order = norms.argsort(dim=-1, descending=True, stable=True).to(torch.int16)
        parts = order.split(self.count(x.shape[3]), dim=-1)
        return replace(self, order=torch.cat([part.sort(dim=-1).values for part in parts], dim=-1))

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The channels of both coders, of keys, values or queries. [B, H, n, D]"""
        large, small = x.gather(3, self._channels(x)).split(self.count(x.shape[3]), dim=3)
        return large, small

    def _channels(self, x: Tensor) -> Tensor:
        assert self.order is not None, "fit it to a context first"
        order = self.order.long().repeat_interleave(x.shape[1] // self.order.shape[1], dim=1)
        return order[:, :, None].expand(-1, -1, x.shape[2], -1)

    def encode(self, x: Tensor) -> Parts:
        """The parts of both coders."""
        large, small = self._split(x)
        coded = {"large": self.large.encode(large), "small": self.small.encode(small)}
        return {f"{which}_{name}": x for which, parts in coded.items() for name, x in parts.items()}

    def decode(self, parts: Parts, width: int) -> Tensor:
        """The coordinates of the first coder, then those of the second."""
        (large, first), (small, rest) = self._own(parts, width)
        return torch.cat([self.large.decode(large, first), self.small.decode(small, rest)], dim=3)

    def level_codes(self, parts: Parts, width: int) -> tuple[Levels, ...] | None:
        """The codes of the first coder, then those of the second."""
        (large, first), (small, rest) = self._own(parts, width)
        of_large, of_small = self.large.level_codes(large, first), self.small.level_codes(small, rest)
        return None if of_large is None or of_small is None else of_large + of_small

    def _own(self, parts: Parts, width: int) -> list[tuple[Parts, int]]:
        """The parts of both coders, and how many channels each has."""
        return [
            ({name.removeprefix(which): x for name, x in parts.items() if name.startswith(which)}, count)
            for which, count in zip(("large_", "small_"), self.count(width), strict=True)
        ]

    def turn(self, query: Tensor) -> Tensor:
        """Queries by channels, in the coordinates of both coders."""
        large, small = self._split(query)
        return torch.cat([self.large.turn(large), self.small.turn(small)], dim=3)

    def back(self, output: Tensor) -> Tensor:
        """Outputs, every channel in its place."""
        large, small = output.split(self.count(output.shape[3]), dim=3)
        found = torch.cat([self.large.back(large), self.small.back(small)], dim=3)
        return torch.empty_like(found).scatter_(3, self._channels(found), found)

    def entry_bytes(self, width: int) -> int:
        """Bytes of both coders."""
        first, rest = self.count(width)
        return self.large.entry_bytes(first) + self.small.entry_bytes(rest)

    def fixed_bytes(self, width: int, heads: int) -> int:
        """The order of channels."""
        return heads * width * CHANNEL_BYTES

    def tensors(self) -> list[Tensor]:
        """The order of channels."""
        return [] if self.order is None else [self.order]
