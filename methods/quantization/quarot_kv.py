"""QuaRot's cache: a Hadamard rotation spreads outliers of keys and values over all channels before quantization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Self

from kvbench.constraints import Gt, Le, Positive
from kvbench.errors import UserError
from kvbench.method import Budget, BudgetKind, Card, Shape, Upstream
from kvbench.methods.quantization.coded import CodedMethod
from kvbench.store.coders import Coder, HadamardCoder


@dataclass(frozen=True)
class QuaRotKV(CodedMethod):
    """Quantizes rotated keys and values in groups of channels, with a scale and a minimum each."""

    key_bits: Literal[2, 3, 4, 8] = 4
    value_bits: Literal[2, 3, 4, 8] = 4
    group: Positive = 128
    """Channels that share a scale and a minimum; a narrower vector is one group."""
    clip: Annotated[float, Gt(0), Le(1)] = 0.95
    """Share of a group's smallest and largest element that its range reaches."""

    card: ClassVar[Card] = Card(
        name="quarot-kv",
        title="QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs (its KV cache)",
        idea="Keys have outliers in few channels. After a Hadamard rotation every channel has a part of them, so one "
        "scale per token is enough; the rotation cancels in products with rotated queries.",
        arxiv="2404.00456",
        year=2024,
        family="quantization",
        stages=("compression",),
        budget=BudgetKind.BITS,
        heads="independent",
        upstream=Upstream(repo="spcl/QuaRot", commit="5008669", license="Apache-2.0"),
        deviations=(
            "Only the cache is quantized: weights and activations stay in the model's element type.",
            ("Outputs are rotated back once a step. The authors merge the rotation of values into the weights before "
            "and after attention, with the same result."),
            ("Where the width of a head is not a power of two, the rotation is in blocks of the largest power of two "
            "that divides it; the authors' simulation refuses such heads."),
            ("The context is stored exactly until its last chunk, so results do not depend on chunks; every later "
            "entry is quantized when it arrives."),
            ("Levels start at the smallest element of a group, as in the authors' 4-bit cache "
            "(quarot/transformers/kv_cache.py), which cuts off nothing. In their simulation (fake_quant), which clips, "
            "levels are whole multiples of the scale, and the range of a key always has zero in it."),
            "Scales are rounded up and minima down to float16.",
        ),
        limits=(
            ("A bias that all keys share is rotated over all coordinates, and the levels are spaced for it. On "
            "Qwen2.5-Coder-1.5B, where a channel of the first layer has a mean of 354, it answers no question of "
            "kv-short."),
            "In plain PyTorch on a CPU a step is slower than with the full cache: unpacking costs more than it saves.",
        ),
    )

    def fit(self, budget: Budget | None, shape: Shape) -> Self:
        """Refuse groups that do not divide a key or a value (`UserError`)."""
        for width in sorted({y for x in shape.layers for y in (x.key_dim, x.value_dim)}):
            if width % min(self.group, width):
                raise UserError(
                    f"quarot-kv: groups of {self.group} do not divide {width} channels. Set group to a divisor of "
                    f"{width}."
                )
        return super().fit(budget, shape)

    def coders(self, layer: int) -> tuple[Coder, Coder]:
        """Rotated groups of channels."""
        del layer
        keys, values = (HadamardCoder(x, self.group, self.clip) for x in (self.key_bits, self.value_bits))
        return keys, values
