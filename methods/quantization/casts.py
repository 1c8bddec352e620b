"""Casts to 8 and 4 bits as inference engines serve them, with scales of one or calibrated when a run starts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Self

import torch
from torch import Tensor

from kvbench.constraints import Natural, Positive
from kvbench.errors import UserError
from kvbench.method import Budget, Method, Shape, Step, resolved
from kvbench.methods.quantization.coded import CodedMethod
from kvbench.store import LayerKV
from kvbench.store.coders import Coder
from kvbench.techniques.calibration import calibrate, calibrated

if TYPE_CHECKING:
    from kvbench.hf import Model

SCALE_BYTES = 4
E4M3_MAX = 448.0
Scaling = Literal["one", "tensor", "head"]


@dataclass(frozen=True)
class CastMethod(CodedMethod):
    """Casts every entry; keys and values of a layer each have a scale."""

    tokens: Positive = 2048
    """Tokens of text on which scales are calibrated, before the run."""

    skip_layers: Natural = 0
    """How many first layers stay exact. vLLM's --kv-cache-dtype-skip-layers names any layers."""

    largest: str | None = resolved(by_bind=True)
    """SHA-256 of the largest magnitudes of keys and values that calibration found."""

    scale: Scaling = "one"

    def fit(self, budget: Budget | None, shape: Shape) -> Self:
        """Refuse to skip every layer (`UserError`)."""
        layers = len(shape.layers)
        if self.skip_layers >= layers:
            raise UserError(
                f"{self.card.name}: skip_layers={self.skip_layers} leaves none of the model's {layers} layers to cast. "
                f"Use 0 to {layers - 1}."
            )
        return super().fit(budget, shape)

    @property
    def calibration(self) -> str | None:
        """The largest magnitudes, unless scales are one."""
        return None if self.scale == "one" else "the largest magnitudes, in one pass"

    def bind(self, model: Model) -> Self:
        """Find the largest magnitudes, once per process and model, unless scales are one."""
        if self.scale == "one":
            return self
        return replace(self, largest=calibrate(model, Largest(), self.tokens, lambda state, _: state["largest"]))

    def require_bound(self) -> None:
        """Scales of one need no model."""
        if self.scale != "one":
            super().require_bound()

    def layer(self, index: int) -> LayerKV:
        """A store of exact entries, which are cast at the end of the context but in the first layers."""
        return LayerKV() if index < self.skip_layers else super().layer(index)

    def evict(self, kv: LayerKV, step: Step) -> None:
        """Cast the entries at the end of the context."""
        if step.layer >= self.skip_layers:
            super().evict(kv, step)

    def tensor_bytes(self, shape: Shape) -> int:
        """Bytes of the scales of all layers that are cast."""
        return super().tensor_bytes(replace(shape, layers=shape.layers[self.skip_layers :]))

    def shared_bytes(self, shape: Shape) -> int:
        """Bytes of the scales, which all sequences use."""
        return self.tensor_bytes(shape)

    def largest_magnitudes(self, layer: int) -> tuple[Tensor | None, Tensor | None]:
        """The largest magnitudes of a layer's keys and of its values. [H_kv] each; None: not calibrated."""
        if self.largest is None:
            return None, None
        keys, values = calibrated(self.largest, layer)
        return keys, values


@dataclass(frozen=True)
class Largest(Method):
    """The full cache; keeps the largest magnitude of keys and of values, per KV head. [2, H_kv]"""

    def attend(self, kv: LayerKV, step: Step) -> Tensor:
        """Attention over every entry. [B, H_q, T, D_v]"""
        here = torch.stack([x.float().abs().amax((0, 2, 3)) for x in (step.key, step.value)])
        kv.state["largest"] = torch.maximum(kv.state["largest"], here) if "largest" in kv.state else here
        return kv.attend(step)


@dataclass(frozen=True)
class ScaledCoder(Coder):
    """A cast of entries divided by a scale that is known beforehand."""

    scaling: Scaling
    scale: Tensor | None = None
    """One scale, or one per KV head. [1] or [H_kv] float32; None: 1."""

    @classmethod
    def reaching(cls, scaling: Scaling, largest: Tensor | None, limit: float) -> Self:
        """The coder whose largest number is the largest magnitude. largest: [H_kv]. limit: of the format."""
        if scaling == "one" or largest is None:
            return cls(scaling)
        reach = largest if scaling == "head" else largest.amax(0, keepdim=True)
        return cls(scaling, (reach / limit).clamp_min(torch.finfo(torch.float32).tiny))

    def scale_of(self, x: Tensor) -> Tensor:
        """The scale of every head, on the device of `x`. [1] or [H_kv, 1, 1]"""
        if self.scaling == "one":
            return torch.ones(1, device=x.device)
        assert self.scale is not None, "call bind first: scales are calibrated on the model"
        return self.scale.to(x.device)[:, None, None]

    def fixed_bytes(self, width: int, heads: int) -> int:
        """The scales."""
        del width
        return {"one": 0, "tensor": SCALE_BYTES, "head": heads * SCALE_BYTES}[self.scaling]

    def tensors(self) -> list[Tensor]:
        """The scales."""
        return [] if self.scale is None else [self.scale]


def to_e4m3(x: Tensor) -> Tensor:
    """Round to the nearest 8-bit number of 4 exponent and 3 mantissa bits; beyond 448, to 448. As bytes, uint8"""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
