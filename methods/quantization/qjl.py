"""QJL: keys become signs of random projections, whose products with exact projections of queries are unbiased."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, Self

import torch
from torch import Tensor

from kvbench.constraints import Ge, Le, Natural, Positive
from kvbench.errors import UserError
from kvbench.kernels.pack import pack, packed_width
from kvbench.method import Budget, BudgetKind, Card, Shape, Upstream, resolved
from kvbench.methods.quantization.coded import CodedMethod
from kvbench.store import LayerKV
from kvbench.store.coded import CodedKV
from kvbench.store.coders import (
    NORM_BYTES,
    Coder,
    GroupCoder,
    Parts,
    SplitCoder,
    as_half,
    decode_signs,
    order_signs,
)
from kvbench.store.rotation import mean_component, orthogonal_projection

PROJECTION = 2
"""Seed."""
LAYERS = 32
"""Layers of the authors' models, of which `first_layers` are the first."""


@dataclass(frozen=True)
class QJL(CodedMethod):
    """Stores signs of projections and the norm of every key, and values in groups of channels."""

    key_bits: Positive = 2
    """Signs per channel of a key."""
    first_layers: Natural = 15
    """Layers, the first ones of 32, that have other signs; in proportion to the model's depth."""
    first_bits: Positive = 4
    """Signs per channel of a key in the first layers."""
    outliers: Annotated[float, Ge(0), Le(0.5)] = 1 / 16
    """Share of the channels of a key, those of the largest norm in the context, that are projected apart."""
    outlier_bits: Positive = 32
    """Signs per outlier channel."""
    first_outlier_bits: Positive = 16
    """Signs per outlier channel in the first layers."""
    value_bits: Literal[2, 3, 4, 8] = 2
    group: Positive = 32
    """Channels of a value that share a scale and a minimum; a narrower value is one group."""
    residual: Natural = 128
    """Entries per encoded block: those since the last whole block stay exact; 0: none does."""

    layers: int | None = resolved()
    """The model's number of layers; None: that of the authors' models."""

    card: ClassVar[Card] = Card(
        name="qjl",
        version="3",
        title="QJL: 1-Bit Quantized JL Transform for KV Cache Quantization with Zero Overhead",
        idea="The sign of a random projection of a key, times the projection of a query, has the mean of their "
        "product. Many signs and the key's norm give scores without any scale or minimum.",
        arxiv="2406.03482",
        year=2024,
        family="quantization",
        stages=("compression",),
        budget=BudgetKind.BITS,
        heads="independent",
        upstream=Upstream(repo="amirzandieh/QJL", commit="421d61c", license="Apache-2.0"),
        deviations=(
            ("Keys and values since the last multiple of 128 entries stay exact, and a later turn's are encoded at its "
            "end. The authors encode keys in the same blocks and keep the last 128 values exact. After a prompt their "
            "code for Llama 2 encodes the oldest of these at every step, their code for Llama 3 no value."),
            "The first layers are 15 of 32, in proportion to the model's depth; the authors' are 15 in every model.",
            ("Outlier channels are those of the largest norm over the whole context, per KV head; the authors choose 8 "
            "of 128 channels for every 32 tokens."),
            ("Outlier channels and the others have projections of their own and of their own number of signs per "
            "channel; the authors project both with one matrix, with zeros for the channels of the other."),
            ("Estimates are divided by the exact mean of a component of a random direction; the authors divide by that "
            "of a normal number, which is 3 % too small for 8 channels."),
            "Scales of values are rounded up and minima down to float16.",
        ),
        limits=(
            "kvbench check runs contexts shorter than a block, which stay exact: check it with residual=32.",
            ("Projections are generated from a seed. All layers and conversations share them, so they do not count as "
            "stored bytes."),
            "Up to 127 entries stay exact, so short contexts take more than the bits say.",
            "A step multiplies every sign by a float: in plain PyTorch it is many times slower than the full cache.",
        ),
    )

    def fit(self, budget: Budget | None, shape: Shape) -> Self:
        """Take the number of layers; refuse groups that do not divide and outliers below a channel (`UserError`)."""
        for layer in shape.layers:
            if layer.value_dim % min(self.group, layer.value_dim):
                raise UserError(
                    f"qjl: groups of {self.group} do not divide values of {layer.value_dim} channels. Set group to a "
                    f"divisor of {layer.value_dim}."
                )
            if self.outliers and not int(self.outliers * layer.key_dim):
                raise UserError(
                    f"qjl: a share of {self.outliers:g} of {layer.key_dim} channels is less than one. Set outliers to "
                    "0, or to a larger share."
                )
        return replace(super().fit(budget, shape), layers=len(shape.layers))

    def identity(self, shape: Shape) -> bool:
        """Whether the context is too short for an encoded block."""
        return max(shape.entries(x) for x in shape.layers) < self.residual

    def later_bytes(self, shape: Shape, tokens: int) -> int:
        """Upper bound of the room for later tokens: codes, and exact entries that wait for a block or come at once."""
        exact = self.residual + max(self.residual, tokens) if self.residual else 0
        codes = -(-(tokens + self.residual) * self.declared_bytes(shape) // shape.length)
        return super().later_bytes(shape, exact) + codes

    def layer(self, index: int) -> LayerKV:
        """A store that encodes whole blocks."""
        keys, values = self.coders(index)
        return CodedKV(key_coder=keys, value_coder=values, residual=self.residual)

    def coders(self, layer: int) -> tuple[Coder, Coder]:
        """Signs for keys, groups for values."""
        first = layer * LAYERS // (self.layers or LAYERS) < self.first_layers
        keys: Coder = SketchCoder(self.first_bits if first else self.key_bits)
        if self.outliers:
            keys = SplitCoder(
                self.outliers, SketchCoder(self.first_outlier_bits if first else self.outlier_bits), keys
            )
        return keys, GroupCoder(self.value_bits, self.group)


@dataclass(frozen=True)
class SketchCoder(Coder):
    """The signs of a key's projections, and its norm."""

    bits: int
    """Signs per channel."""

    def encode(self, x: Tensor) -> Parts:
        """Signs and the norm."""
        projected = x.float() @ self._projection(x.shape[3], x.device).mT
        return {"signs": pack((projected >= 0).byte(), 1), "norm": as_half(x.float().norm(dim=-1, keepdim=True))}

    def decode(self, parts: Parts, width: int) -> Tensor:
        """Signs in the order of their bytes, scaled for the product with a projected query."""
        signs = decode_signs(parts["signs"])
        return signs.mul_(parts["norm"].float() / (self.bits * width * mean_component(width)))

    def turn(self, query: Tensor) -> Tensor:
        """Project, and put the products in the order of the signs."""
        return order_signs(query @ self._projection(query.shape[3], query.device).mT)

    def _projection(self, width: int, device: torch.device) -> Tensor:
        return orthogonal_projection(width, self.bits * width, PROJECTION, device)

    def entry_bytes(self, width: int) -> int:
        """Signs and the norm."""
        return packed_width(self.bits * width, 1) + NORM_BYTES
