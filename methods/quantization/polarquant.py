"""PolarQuant: after a random rotation blocks of coordinates become a radius and angles of known distributions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Self

import torch
from torch import Tensor

from kvbench.constraints import Ge, Le
from kvbench.errors import UserError
from kvbench.kernels.pack import look_up, pack, packed_width, unpack
from kvbench.method import Budget, BudgetKind, Card, Shape
from kvbench.methods.quantization.coded import CodedMethod
from kvbench.store.coders import NORM_BYTES, Coder, Parts, as_half
from kvbench.store.rotation import random_rotation
from kvbench.techniques.codebooks import angle_levels, nearest_level

ROTATION = 0
"""Seed."""


@dataclass(frozen=True)
class PolarQuant(CodedMethod):
    """Stores a radius for each block of rotated coordinates, and the angles of a tree of pairs."""

    levels: Annotated[int, Ge(1), Le(6)] = 4
    """Levels of the tree: a block has 2 ** levels coordinates."""
    first_bits: Literal[2, 3, 4] = 4
    """Bits of an angle between two coordinates, in the whole circle."""
    bits: Literal[1, 2, 3, 4] = 2
    """Bits of an angle between two radii, in a quarter of the circle."""

    card: ClassVar[Card] = Card(
        name="polarquant",
        title="PolarQuant: Quantizing KV Caches with Polar Transformation",
        idea="After a random rotation, pairs of coordinates, then pairs of their radii, have angles of a distribution "
        "that is known and, at higher levels, narrow. Few bits per angle and one radius per block need no scales.",
        arxiv="2502.02617",
        year=2025,
        family="quantization",
        stages=("compression",),
        budget=BudgetKind.BITS,
        heads="independent",
        upstream=None,
        deviations=(
            "Codebooks are those of the known densities (the paper's offline variant), not k-means of the prompt.",
            ("The context is stored exactly until its last chunk; every later entry is encoded when it arrives. The "
            "paper keeps generated entries exact."),
            "Products with queries are computed in the rotated coordinates, and outputs are rotated back once a step.",
        ),
        limits=(
            ("A bias that all keys share is rotated over all coordinates, and the levels are spaced for it. On "
            "Qwen2.5-Coder-1.5B, where a channel of the first layer has a mean of 354, it answers no question of "
            "kv-short."),
            ("The rotation is generated from a seed. All layers and conversations share it, so it does not count as "
            "stored bytes."),
            "In plain PyTorch a step is slower than with the full cache: entries are decoded block by block.",
            "Another paper of this name (2502.00527) pairs the channels that rotary embeddings turn together.",
        ),
    )

    def fit(self, budget: Budget | None, shape: Shape) -> Self:
        """Refuse blocks that do not divide a key or a value (`UserError`)."""
        for width in sorted({y for x in shape.layers for y in (x.key_dim, x.value_dim)}):
            if width % 2**self.levels:
                raise UserError(
                    f"polarquant: blocks of {2**self.levels} coordinates do not divide {width} channels. Set levels "
                    "lower."
                )
        return super().fit(budget, shape)

    def coders(self, layer: int) -> tuple[Coder, Coder]:
        """The same coder for keys and values."""
        del layer
        coder = PolarCoder((self.first_bits, *[self.bits] * (self.levels - 1)))
        return coder, coder


@dataclass(frozen=True)
class PolarCoder(Coder):
    """Angles by level, and a radius per block."""

    bits: tuple[int, ...]
    """Bits of an angle by level."""

    def encode(self, x: Tensor) -> Parts:
        """Pair neighbors, level by level; a level's angles are codes and its radii are paired next."""
        radii = x.float() @ random_rotation(x.shape[3], ROTATION, x.device).mT
        parts = {}
        for level, bits in enumerate(self.bits, start=1):
            a, b = radii[..., 0::2], radii[..., 1::2]
            angle = torch.atan2(b, a).remainder(2 * torch.pi)
            parts[f"angle{level}"] = pack(nearest_level(angle, angle_levels(level, bits, x.device)), bits)
            radii = torch.hypot(a, b)
        return {**parts, "radius": as_half(radii)}

    def decode(self, parts: Parts, width: int) -> Tensor:
        """Rotated coordinates, from the radii of the blocks down."""
        radii = parts["radius"].float()
        for level, bits in reversed(list(enumerate(self.bits, start=1))):
            codes = unpack(parts[f"angle{level}"], bits, width >> level)
            angles = angle_levels(level, bits, radii.device)
            units = look_up(torch.polar(torch.ones_like(angles), angles), codes)
            radii = torch.view_as_real(units.mul_(radii)).flatten(-2)  # [..., width >> (level - 1)]
        return radii

    def turn(self, query: Tensor) -> Tensor:
        """Rotate."""
        return query @ random_rotation(query.shape[3], ROTATION, query.device).mT

    def back(self, output: Tensor) -> Tensor:
        """Rotate back."""
        return output @ random_rotation(output.shape[3], ROTATION, output.device)

    def entry_bytes(self, width: int) -> int:
        """Angles by level, and radii."""
        angles = sum(packed_width(width >> level, bits) for level, bits in enumerate(self.bits, start=1))
        return angles + (width >> len(self.bits)) * NORM_BYTES
