"""FP8: every entry as 8-bit floating point numbers, without a scale or with calibrated ones, as engines store it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvbench.kernels.cast_attention.torch import from_e4m3
from kvbench.method import BudgetKind, Card
from kvbench.methods.quantization.casts import E4M3_MAX, CastMethod, ScaledCoder, Scaling, to_e4m3
from kvbench.store.coders import Coder, Parts


@dataclass(frozen=True)
class Fp8(CastMethod):
    """Casts keys and values to numbers of 4 exponent and 3 mantissa bits (e4m3)."""

    scale: Scaling = "one"
    """one: no scale, the engines' default; tensor: a calibrated scale per layer for keys and one for values; head: one
    per KV head."""

    card: ClassVar[Card] = Card(
        name="fp8",
        title="FP8 KV cache (e4m3)",
        idea="Eight bits with an exponent cover the range of most keys and values without a scale. "
        "It halves a cache of 16 bits, and it is what vLLM and TensorRT-LLM offer.",
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
            "Queries stay in the model's element type; with FlashAttention 3, vLLM casts them too.",
            ("With scale=tensor or head, scales are calibrated on Python's manual: the largest magnitude becomes 448. "
            "vLLM takes scales from a checkpoint that was calibrated on a data set."),
            "Numbers beyond the largest one become the largest one.",
        ),
        limits=(
            ("A channel whose keys are all large loses the differences between tokens: numbers above 256 are 32 apart. "
            "On Qwen2.5-Coder-1.5B, where a channel of the first layer has a mean of 354, it answers half of the "
            "questions of niah_multikey_1, and with skip_layers=2 all of them."),
            "In plain PyTorch a step is slower than with the full cache: all numbers are converted in every step.",
        ),
    )

    graphable: ClassVar[str | None] = None  # `stepwise` all the same: codes round apart what differs in the last bit

    def coders(self, layer: int) -> tuple[Coder, Coder]:
        """A cast of keys and one of values."""
        keys, values = (Fp8Coder.reaching(self.scale, x, E4M3_MAX) for x in self.largest_magnitudes(layer))
        return keys, values


@dataclass(frozen=True)
class Fp8Coder(ScaledCoder):
    """A byte per element."""

    def encode(self, x: Tensor) -> Parts:
        """Divide by the scale and cast."""
        return {"byte": to_e4m3(x.float() / self.scale_of(x))}

    def decode(self, parts: Parts, width: int) -> Tensor:
        """The numbers, times the scale."""
        del width
        return from_e4m3(parts["byte"]) * self.scale_of(parts["byte"])

    def casts(self, parts: Parts) -> tuple[Tensor, Tensor | None]:
        """The numbers and the scale."""
        return parts["byte"], None if self.scale is None else self.scale.to(parts["byte"].device)

    def entry_bytes(self, width: int) -> int:
        """A byte per element."""
        return width
