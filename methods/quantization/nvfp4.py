"""NVFP4: every entry as 4-bit floating point numbers in blocks of 16, each with an 8-bit scale."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from kvbench.errors import UserError
from kvbench.kernels.cast_attention.torch import from_e4m3
from kvbench.kernels.level_attention import Levels, decode_levels
from kvbench.kernels.pack import pack, packed_width
from kvbench.method import Budget, BudgetKind, Card, Shape
from kvbench.methods.quantization.casts import E4M3_MAX, CastMethod, ScaledCoder, to_e4m3
from kvbench.store.coders import Coder, Parts
from kvbench.techniques.codebooks import midpoints

BITS = 4
BLOCK = 16
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers of 2 exponent bits and 1 mantissa bit, without sign."""
SIGN = 8


@dataclass(frozen=True)
class Nvfp4(CastMethod):
    """Casts keys and values to numbers of 2 exponent bits and 1 mantissa bit (e2m1) with scales of blocks (e4m3)."""

    scale: Literal["one", "tensor"] = "one"
    """one: blocks alone have scales; tensor: also a calibrated scale per layer for keys and one for values."""

    card: ClassVar[Card] = Card(
        name="nvfp4",
        title="NVFP4 KV cache (e2m1 in blocks of 16)",
        idea="Blocks of 16 channels share an 8-bit scale, so 4-bit numbers follow the range of every token. "
        "Blackwell GPUs multiply such numbers, and TensorRT-LLM stores caches in them.",
        arxiv=None,
        year=None,
        family="quantization",
        stages=("compression",),
        budget=BudgetKind.BITS,
        heads="independent",
        upstream=None,
        deviations=(
            ("The context is stored exactly until its last chunk, so results do not depend on chunks; engines cast "
            "every chunk before the next one attends to it."),
            "Queries and attention stay in the model's element type; engines compute attention in 8 bits.",
            ("With scale=tensor, the scale is calibrated on Python's manual: the largest magnitude becomes 6 times "
            "448. Engines take it from a checkpoint that was calibrated on a data set."),
        ),
        unverified=(
            "The default of engines without calibrated scales was not read for this format; 1 is that of FP8.",
        ),
        limits=(
            ("A channel whose keys are all large makes the rest of its block zero. On Qwen2.5-Coder-1.5B, where a "
            "channel of the first layer has a mean of 354, it answers nothing, and with skip_layers=2 59 of 60 "
            "questions of niah_multikey_1."),
            "A block whose largest magnitude is below 0.006 times the scale becomes zero: its own scale does.",
            ("The numbers are 2 apart below the largest, so a key may be off by a sixth of its block's largest "
            "channel; with 15 even levels it is a fourteenth. On normal numbers the mean squared error is 0.91 % of "
            "the mean square, 0.73 % with even levels and 0.07 % with fp8. The bundled model is sure of nearly every "
            "token, so an error rarely matters and then costs much: on niah_multikey_1 at 1,024 tokens (20 contexts), "
            "3 of 100 answer tokens changed, by 17 nats each, and keys alone did it."),
            "With scale=one, numbers beyond 2,688 become 2,688.",
            "In plain PyTorch a step is slower than with the full cache: all numbers are converted in every step.",
        ),
    )

    graphable: ClassVar[str | None] = None  # `stepwise` all the same, as in `fp8`

    def fit(self, budget: Budget | None, shape: Shape) -> Self:
        """Refuse vectors that do not divide into blocks (`UserError`)."""
        for width in sorted({y for x in shape.layers for y in (x.key_dim, x.value_dim)}):
            if width % BLOCK:
                raise UserError(f"nvfp4: {width} channels do not divide into blocks of {BLOCK}. Use fp8 or kivi.")
        return super().fit(budget, shape)

    def coders(self, layer: int) -> tuple[Coder, Coder]:
        """A cast of keys and one of values."""
        limit = E4M3_MAX * MAGNITUDES[-1]
        keys, values = (Nvfp4Coder.reaching(self.scale, x, limit) for x in self.largest_magnitudes(layer))
        return keys, values


@dataclass(frozen=True)
class Nvfp4Coder(ScaledCoder):
    """Half a byte per element, and a byte per block for its scale."""

    def encode(self, x: Tensor) -> Parts:
        """The scale that makes a block's largest magnitude 6, rounded; then the nearest numbers."""
        scaled = (x.float() / self.scale_of(x)).unflatten(-1, (-1, BLOCK))  # [B, H_kv, n, D / 16, 16]
        block = to_e4m3(scaled.abs().amax(-1) / MAGNITUDES[-1])
        unit = from_e4m3(block)[..., None]
        numbers = scaled / unit.masked_fill(unit == 0, 1.0)
        codes = round_to_e2m1(torch.where(unit == 0, 0.0, numbers))
        return {"packed": pack(codes.flatten(-2), BITS), "block": block}

    def level_codes(self, parts: Parts, width: int) -> tuple[Levels, ...]:
        """The numbers by their codes, and the scales of blocks."""
        numbers = _numbers(parts["packed"].device)
        if self.scale is not None:
            numbers = numbers * self.scale.to(numbers.device)
        return (Levels(parts["packed"], parts["block"], numbers, BITS, width),)

    def decode(self, parts: Parts, width: int) -> Tensor:
        """The numbers, times the scales of their blocks and of the tensor."""
        return decode_levels(self.level_codes(parts, width))

    def entry_bytes(self, width: int) -> int:
        """Numbers, and scales of blocks."""
        return packed_width(width, BITS) + width // BLOCK


@functools.lru_cache(maxsize=64)
def _numbers(device: torch.device) -> Tensor:
    """Every number by its code, once per device. [16]"""
    return torch.tensor([*MAGNITUDES, *(-x for x in MAGNITUDES)], device=device)


def round_to_e2m1(x: Tensor) -> Tensor:
    """The nearest number, of two the one with an even code; beyond 6, 6. As codes, with the sign at 8. uint8"""
    edges = midpoints(_numbers(x.device)[: len(MAGNITUDES)])
    below, above = torch.bucketize(x.abs(), edges), torch.bucketize(x.abs(), edges, right=True)
    code = torch.where(below % 2 == 0, below, above)
    signed: Tensor = code + SIGN * (x < 0)
    return signed.to(torch.uint8)
