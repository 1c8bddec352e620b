"""TurboQuant: after a random rotation every coordinate has one known distribution, and one codebook fits all."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, Self

import torch
from torch import Tensor

from kvbench.constraints import Ge, Le
from kvbench.errors import UserError
from kvbench.kernels.level_attention import Levels, decode_levels
from kvbench.kernels.pack import look_up, pack, packed_width
from kvbench.method import Budget, BudgetKind, Card, Shape
from kvbench.methods.quantization.coded import CodedMethod
from kvbench.store.coders import NORM_BYTES, Coder, Parts, SplitCoder, as_half, decode_signs, order_signs
from kvbench.store.rotation import gaussian_projection, random_rotation
from kvbench.techniques.codebooks import nearest_level, sphere_levels

ROTATION, PROJECTION = 0, 1
"""Seeds."""
MOST_BITS = 4
LEAST_CHANNELS = 3
"""Coordinates of narrower vectors have no density with a maximum."""


@dataclass(frozen=True)
class TurboQuant(CodedMethod):
    """Stores the norm of every key and value, and a few bits for each coordinate after a random rotation."""

    key_bits: Literal[1, 2, 3, 4] = 3
    """Bits per coordinate of a key; one more for outlier channels."""
    value_bits: Literal[1, 2, 3, 4] = 3
    variant: Literal["mse", "prod"] = "mse"
    """mse: all bits go into the codebook; prod: one bit of a key is for the sign of a projection of the residual, which
    makes the product with a query unbiased."""
    outliers: Annotated[float, Ge(0), Le(0.5)] = 0.25
    """Share of the channels, those of the largest norm in the context, that are encoded apart with one bit more."""

    card: ClassVar[Card] = Card(
        name="turboquant",
        version="2",
        title="TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate",
        idea="A random rotation makes the coordinates of any unit vector nearly normal and nearly independent. One "
        "codebook, known beforehand, is then close to the best for every entry, without scales of groups.",
        arxiv="2504.19874",
        year=2025,
        family="quantization",
        stages=("compression",),
        budget=BudgetKind.BITS,
        heads="independent",
        upstream=None,
        deviations=(
            ("The context is stored exactly until its last chunk, so that results do not depend on chunks; every later "
            "entry is encoded when it arrives, without a window of exact entries."),
            ("Codebooks are those of the distribution of a coordinate at the model's width; the paper's numbers are of "
            "the normal distribution, its limit."),
            "Products with queries are computed in the rotated coordinates, and outputs are rotated back once a step.",
        ),
        unverified=(
            ("There was no released code to read. outliers: the paper's 2.5 bits have 32 of 128 channels with one bit "
            "more than the others, which is 2.25 bits by our count, without the norms; for 3.5 bits it names another "
            "ratio without its value. It does not say how it finds them. Here they are the channels of the largest "
            "norm in the context, per KV head; the code of QJL, by two of its authors, takes those of each group of "
            "tokens."),
        ),
        limits=(
            ("A bias that all keys share is rotated over all coordinates, and the levels are spaced for it. On "
            "Qwen2.5-Coder-1.5B, where a channel of the first layer has a mean of 354, it answers no question of "
            "kv-short."),
            ("Rotation and projection are generated from a seed. All layers and conversations share them, so they do "
            "not count as stored bytes: without outliers each has 64 KiB at 128 channels."),
            ("The sign of the residual's projection (variant=prod) has no bias and more variance; softmax attention "
            "often does better without it."),
            ("In plain PyTorch a step is slower than with the full cache: all entries are decoded in every step. With "
            "variant=prod they are on a GPU, too, because the kernel reads no signs."),
        ),
    )

    graphable: ClassVar[str | None] = None  # `stepwise` all the same, as in `fp8`

    def __post_init__(self) -> None:
        """Refuse more bits than codes may have, and no bit for the codebook (`UserError`)."""
        super().__post_init__()
        for name in ("key_bits", "value_bits"):
            if getattr(self, name) == MOST_BITS and self.outliers:
                raise UserError(
                    f"turboquant: {name} of {MOST_BITS} leaves no bit more for outlier channels. Set outliers to 0, or "
                    f"{name} to {MOST_BITS - 1} or less."
                )
        if self.variant == "prod" and self.key_bits == 1:
            raise UserError("turboquant: variant=prod takes one bit of a key for a sign: set key_bits to 2 or more.")

    def fit(self, budget: Budget | None, shape: Shape) -> Self:
        """Refuse a share of outliers that is too few channels to have a known distribution (`UserError`)."""
        width = min(min(x.key_dim, x.value_dim) for x in shape.layers)
        if self.outliers and int(self.outliers * width) < LEAST_CHANNELS:
            raise UserError(
                f"turboquant: a share of {self.outliers} of {width} channels is below {LEAST_CHANNELS} channels, which "
                "cannot be rotated apart. Set outliers to 0, or to a larger share."
            )
        return super().fit(budget, shape)

    def coders(self, layer: int) -> tuple[Coder, Coder]:
        """A coder for keys and one for values; each two, if outlier channels are encoded apart."""
        del layer
        keys = RotatedCoder(self.key_bits, sign=self.variant == "prod")
        return self._split(keys), self._split(RotatedCoder(self.value_bits))

    def _split(self, coder: RotatedCoder) -> Coder:
        if not self.outliers:
            return coder
        return SplitCoder(self.outliers, replace(coder, bits=coder.bits + 1), coder)


@dataclass(frozen=True)
class RotatedCoder(Coder):
    """A norm, and the nearest level of each coordinate after rotation; with `sign`, one bit less and the residual."""

    bits: int
    sign: bool = False

    @property
    def level_bits(self) -> int:
        """Bits of a coordinate's level."""
        return self.bits - 1 if self.sign else self.bits

    def encode(self, x: Tensor) -> Parts:
        """Levels and the norm; with `sign`, also signs and norm of the projected residual."""
        width, device = x.shape[3], x.device
        norm = x.float().norm(dim=-1, keepdim=True)
        unit = x.float() / norm.masked_fill(norm == 0, 1.0) @ random_rotation(width, ROTATION, device).mT
        levels = sphere_levels(width, self.level_bits, device)
        codes = nearest_level(unit * math.sqrt(width), levels)
        parts = {"packed": pack(codes, self.level_bits), "norm": as_half(norm)}
        if self.sign:
            residual = unit - look_up(levels, codes) / math.sqrt(width)
            signs = residual @ gaussian_projection(width, PROJECTION, device).mT >= 0
            parts["signs"] = pack(signs.byte(), 1)
            parts["residual"] = as_half(norm * residual.norm(dim=-1, keepdim=True))
        return parts

    def decode(self, parts: Parts, width: int) -> Tensor:
        """Rotated coordinates; with `sign`, also the signs, scaled for the product with a projected query."""
        found = decode_levels((self._rotated(parts, width),))
        if not self.sign:
            return found
        signs = decode_signs(parts["signs"])
        return torch.cat([found, signs * (parts["residual"].float() * (math.sqrt(math.pi / 2) / width))], dim=3)

    def level_codes(self, parts: Parts, width: int) -> tuple[Levels] | None:
        """Levels of a unit vector, and norms; not with `sign`."""
        return None if self.sign else (self._rotated(parts, width),)

    def _rotated(self, parts: Parts, width: int) -> Levels:
        table = sphere_levels(width, self.level_bits, parts["packed"].device) / math.sqrt(width)
        return Levels(parts["packed"], parts["norm"], table, self.level_bits, width)

    def turn(self, query: Tensor) -> Tensor:
        """Rotate; with `sign`, also project what was rotated."""
        rotated = query @ random_rotation(query.shape[3], ROTATION, query.device).mT
        if not self.sign:
            return rotated
        projected = rotated @ gaussian_projection(query.shape[3], PROJECTION, query.device).mT
        return torch.cat([rotated, order_signs(projected)], dim=3)

    def back(self, output: Tensor) -> Tensor:
        """Rotate back."""
        return output @ random_rotation(output.shape[3], ROTATION, output.device)

    def entry_bytes(self, width: int) -> int:
        """Levels and the norm; with `sign`, signs and a second norm."""
        signs = packed_width(width, 1) + NORM_BYTES if self.sign else 0
        return packed_width(width, self.level_bits) + NORM_BYTES + signs
