"""KVQuant: keys per channel before rotation, levels at uneven distances, and outliers in a sparse list."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

import torch
from torch import Tensor

from kvbench.constraints import Ge, Le, Natural, Positive
from kvbench.errors import UserError
from kvbench.kernels.pack import look_up, pack, packed_width, unpack
from kvbench.method import Budget, BudgetKind, Card, Method, Shape, Step, Upstream, resolved
from kvbench.methods.quantization.coded import CodedMethod
from kvbench.selection import require_inverse_rotation
from kvbench.store import LayerKV
from kvbench.store.coded import CodedKV
from kvbench.store.coders import Coder, Parts, as_half
from kvbench.techniques.calibration import calibrate, calibrated
from kvbench.techniques.codebooks import count_on_grid, fit_levels, nearest_level

if TYPE_CHECKING:
    from kvbench.hf import Model

OUTLIER_BYTES = 3
"""The number in float16 and its channel in a byte."""
RANGE_BYTES = 4
NUMBER_BYTES = 4
MOST_CHANNELS = 256
STEP = 1e-3
"""Key elements closer than this, as a share of half of a range, are equally far: the first is the outlier. In the first
layer a token's key is the same everywhere, so the ends of ranges are elements of keys, and rounding would decide."""
TINY = 1e-8
"""The smallest range."""


@dataclass(frozen=True)
class KVQuant(CodedMethod):
    """Stores a code per element, by a codebook per layer, and the elements farthest from a vector's range exactly."""

    key_bits: Literal[2, 3, 4] = 4
    value_bits: Literal[2, 3, 4] = 4
    outliers: Annotated[float, Ge(0), Le(0.5)] = 0.01
    """Share of the elements of every key and value that are stored exactly, rounded up."""
    sinks: Natural = 1
    """First entries of the context, which stay exact."""
    tokens: Positive = 2048
    """Tokens of text on which ranges of channels and codebooks are made, before the run."""

    codebooks: str | None = resolved(by_bind=True)
    """SHA-256 of the ranges and levels of all layers."""

    card: ClassVar[Card] = Card(
        name="kvquant",
        title="KVQuant: Towards 10 Million Context Length LLM Inference with KV Cache Quantization",
        idea="Outliers of keys are in few channels, before rotary embeddings mix them, so each channel has a range "
        "that is known beforehand. Levels follow the distribution, and the few elements beyond are stored apart.",
        arxiv="2401.18079",
        year=2024,
        family="quantization",
        stages=("compression",),
        budget=BudgetKind.BITS,
        calibration="ranges of channels and codebooks, in one pass",
        heads="independent",
        upstream=Upstream(repo="SqueezeAILab/KVQuant", commit="57a2383", license=None),
        deviations=(
            ("Every key and value of a head has the same number of outliers, those farthest from the middle of its "
            "range, or from the value's mean, in slots of one size; the authors' list has every key element beyond the "
            "range of its channel, of any number, or with cap_outliers at most 42 of all heads of a token, and of "
            "values the largest and smallest half percent over all heads of a token."),
            ("A value's range is that of one head, after its outliers, in float16; the authors' is over all heads of a "
            "token."),
            ("Levels have the least squared error over the text. The authors weigh elements by the Fisher information, "
            "for which they need gradients; nor is their normalization for 2 bits (Q-Norm) built."),
            ("Ranges and levels are made on Python's manual when a run starts; the authors use 16 sequences of 2,048 "
            "tokens of Wikitext and leave the exact first tokens out of the levels."),
            ("Every later entry is encoded when it arrives; it is the authors' way too, and the context is exact until "
            "its last chunk."),
        ),
        unverified=("tokens: chosen so that calibration takes seconds.",),
        limits=(
            "It needs rotary embeddings that kvbench can invert.",
            ("A step decodes and rotates every key: in plain PyTorch it is many times slower than the full cache."),
            "The manual's text differs between versions of Python; the result records a hash of ranges and levels.",
        ),
    )

    def bind(self, model: Model) -> Self:
        """Make ranges and levels, once per process and model (`UserError` where rotations cannot be inverted)."""
        require_inverse_rotation(model, "kvquant")
        recorder = LevelRecorder(key_bits=self.key_bits, value_bits=self.value_bits, outliers=self.outliers)
        return replace(self, codebooks=calibrate(model, recorder, self.tokens, recorder.summarize))

    def fit(self, budget: Budget | None, shape: Shape) -> Self:
        """Refuse heads with more channels than a byte counts (`UserError`)."""
        width = max(max(x.key_dim, x.value_dim) for x in shape.layers)
        if width > MOST_CHANNELS:
            raise UserError(
                f"kvquant: a head of {width} channels has more than the {MOST_CHANNELS} that an outlier's byte counts. "
                "Use another method, such as kivi."
            )
        return super().fit(budget, shape)

    def coders(self, layer: int) -> tuple[Coder, Coder]:
        """A coder with ranges of channels for keys, and one with a range per value."""
        if self.codebooks is None:
            return KeyCoder(self.key_bits, self.outliers), ValueCoder(self.value_bits, self.outliers)
        keys, values = 2**self.key_bits, 2**self.value_bits
        made = calibrated(self.codebooks, layer)  # middles and reaches [2, H_kv * D], then the levels of both
        channels = (made.numel() - keys - values) // 2
        middle, reach, key_levels, value_levels = (x.clone() for x in made.split([channels, channels, keys, values]))
        return (
            KeyCoder(self.key_bits, self.outliers, key_levels, middle, reach),
            ValueCoder(self.value_bits, self.outliers, value_levels),
        )

    def layer(self, index: int) -> CodedKV:
        """A store of keys before rotation, with exact first entries."""
        keys, values = self.coders(index)
        return CodedKV(key_coder=keys, value_coder=values, plain=True, sinks=self.sinks)

    def shared_bytes(self, shape: Shape) -> int:
        """Bytes of ranges and levels, which all sequences use."""
        return self.tensor_bytes(shape)


@dataclass(frozen=True)
class UnevenCoder(Coder):
    """Codes by a codebook in [-1, 1], and the exact outliers of every vector."""

    bits: int
    outliers: float
    levels: Tensor | None = None
    """[2 ** bits] float32, ascending; None: not made yet."""

    def count(self, width: int) -> int:
        """Outliers of a vector."""
        return math.ceil(self.outliers * width)

    def encode_unit(self, x: Tensor, unit: Tensor, far: Tensor) -> Parts:
        """Codes of vectors scaled to [-1, 1], and the outliers: the first of `far`. far: [B, H_kv, n, k]"""
        assert self.levels is not None, "call bind first: levels are made on the model"
        codes = nearest_level(unit.clamp(-1, 1), self.levels.to(x.device))
        return {
            "packed": pack(codes, self.bits), "outlier": as_half(x.gather(3, far)), "channel": far.to(torch.uint8)
        }

    def decode_unit(self, parts: Parts, width: int) -> Tensor:
        """The levels of the codes."""
        assert self.levels is not None, "call bind first: levels are made on the model"
        codes = unpack(parts["packed"], self.bits, width)
        return look_up(self.levels.to(codes.device), codes)

    def entry_bytes(self, width: int) -> int:
        """Codes and outliers."""
        return packed_width(width, self.bits) + self.count(width) * OUTLIER_BYTES

    def fixed_bytes(self, width: int, heads: int) -> int:
        """The levels."""
        del width, heads
        return (1 << self.bits) * NUMBER_BYTES

    def tensors(self) -> list[Tensor]:
        """The levels."""
        return [] if self.levels is None else [self.levels]


@dataclass(frozen=True)
class KeyCoder(UnevenCoder):
    """Each channel has a range that is known beforehand."""

    middle: Tensor | None = None
    """[H_kv * D] float32"""
    reach: Tensor | None = None
    """Half of the range. [H_kv * D] float32"""

    def _range(self, heads: int, device: torch.device) -> tuple[Tensor, Tensor]:
        assert self.middle is not None and self.reach is not None, "call bind first: ranges are made on the model"
        middle, reach = (x.view(heads, 1, -1).to(device) for x in (self.middle, self.reach))
        return middle, reach

    def encode(self, x: Tensor) -> Parts:
        """Scale channels to their ranges; those farthest from the middle are outliers."""
        middle, reach = self._range(x.shape[1], x.device)
        unit = (x.float() - middle) / reach
        steps = (unit.abs() / STEP).round()
        far = steps.argsort(dim=3, descending=True, stable=True)[..., : self.count(x.shape[3])]
        return self.encode_unit(x, unit, far)

    def decode(self, parts: Parts, width: int) -> Tensor:
        """Levels in the ranges of channels, and outliers in their places."""
        middle, reach = self._range(parts["packed"].shape[1], parts["packed"].device)
        found = self.decode_unit(parts, width) * reach + middle
        return found.scatter(3, parts["channel"].long(), parts["outlier"].float())

    def fixed_bytes(self, width: int, heads: int) -> int:
        """Levels, middles and reaches."""
        return super().fixed_bytes(width, heads) + 2 * heads * width * NUMBER_BYTES

    def tensors(self) -> list[Tensor]:
        """Levels, middles and reaches."""
        return [x for x in (self.levels, self.middle, self.reach) if x is not None]


@dataclass(frozen=True)
class ValueCoder(UnevenCoder):
    """Each value has a range of its own, that of its elements without the outliers."""

    def encode(self, x: Tensor) -> Parts:
        """Scale every value to its range."""
        far, low, high = find_range(x, self.count(x.shape[3]))
        middle, reach = as_half((low + high) / 2), as_half((high - low) / 2)
        unit = (x.float() - middle.float()) / reach.float().clamp_min(TINY)
        return {**self.encode_unit(x, unit, far), "middle": middle, "reach": reach}

    def decode(self, parts: Parts, width: int) -> Tensor:
        """Levels in the range of each value, and outliers in their places."""
        found = self.decode_unit(parts, width) * parts["reach"].float() + parts["middle"].float()
        return found.scatter(3, parts["channel"].long(), parts["outlier"].float())

    def entry_bytes(self, width: int) -> int:
        """Codes, outliers and the range."""
        return super().entry_bytes(width) + RANGE_BYTES


def find_range(x: Tensor, outliers: int) -> tuple[Tensor, Tensor, Tensor]:
    """The channels farthest from a vector's mean, and the ends of the others. [..., k], [..., 1], [..., 1]"""
    exact = x.float()
    far = (exact - exact.mean(-1, keepdim=True)).abs().topk(outliers, dim=-1).indices
    low, high = (exact.scatter(-1, far, end) for end in (torch.inf, -torch.inf))
    return far, low.amin(-1, keepdim=True), high.amax(-1, keepdim=True)


@dataclass(frozen=True)
class LevelRecorder(Method):
    """The full cache; keeps keys before rotation, and values."""

    key_bits: int = 4
    value_bits: int = 4
    outliers: float = 0.01

    def attend(self, kv: LayerKV, step: Step) -> Tensor:
        """Attention over every entry. [B, H_q, T, D_v]"""
        key = step.rope.rotate(step.key.float(), step.positions, inverse=True)[0]
        for name, x in (("key", key), ("value", step.value[0].float())):
            kv.state[name] = torch.cat([kv.state[name], x], dim=1) if name in kv.state else x
        return kv.attend(step)

    def summarize(self, state: dict[str, Tensor], tokens: int) -> Tensor:
        """Middles and reaches of the channels of keys, then the levels of keys and of values, in one vector."""
        del tokens
        ends = torch.tensor([self.outliers / 2, 1 - self.outliers / 2], device=state["key"].device)
        low, high = state["key"].quantile(ends, dim=1)  # [H_kv, D]
        middle, reach = (low + high) / 2, ((high - low) / 2).clamp_min(TINY)
        units = (state["key"] - middle[:, None]) / reach[:, None]
        far, least, most = find_range(state["value"], math.ceil(self.outliers * state["value"].shape[2]))
        plain = torch.ones_like(state["value"], dtype=torch.bool).scatter_(-1, far, False)
        values = (state["value"] - (least + most) / 2) / ((most - least) / 2).clamp_min(TINY)
        levels = [
            fit_levels(*count_on_grid(x), 2**bits)
            for x, bits in ((units[units.abs() <= 1], self.key_bits), (values[plain], self.value_bits))
        ]
        return torch.cat([middle.flatten(), reach.flatten(), *(x.float() for x in levels)])
