"""Codes of 8 bits in two halves: the upper 4 bits are a cache of their own, which drafts (QuantSpec)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.budget import LayerShape, Shape
from kvbench.kernels.dense_attention import dense_attention
from kvbench.kernels.pack import PARAMETER_BYTES, Codes, dequantize, pack, packed_width, quantize
from kvbench.step import Step
from kvbench.store.blocks import AppendedBlock
from kvbench.store.facts import Fact
from kvbench.store.layer import LayerKV
from kvbench.store.verified import VerifiedKV

HALF = 4
"""Bits of each half."""


@dataclass
class HierarchicalKV(LayerKV):
    """Codes of the older entries, keys in groups of tokens and values in groups of channels, and exact newer ones.

    The exact entries are one group at least and two at most, and leave from the front a whole group at a time, so that
    an entry that may still be forgotten is never coded.
    """

    bounded: bool = True
    group: int = 32

    blocks: ClassVar[tuple[str, ...]] = ("tokens", "groups")
    tokens: AppendedBlock | None = field(default=None, init=False)
    """By entry: both halves of keys and values, and the parameters of values."""
    groups: AppendedBlock | None = field(default=None, init=False)
    """By group: the parameters of keys. [B, H_kv, n / group, D]"""

    def bytes_for(self, layer: LayerShape, shape: Shape, entries: int) -> int:
        """Codes, parameters of keys by group and of values by entry, and exact entries."""
        coded = self._coded(entries)
        channels = layer.value_dim // min(self.group, layer.value_dim)
        head = coded * 2 * (packed_width(layer.key_dim, HALF) + packed_width(layer.value_dim, HALF))
        head += (coded // self.group * layer.key_dim + coded * channels) * PARAMETER_BYTES
        return layer.kv_heads * (head + (entries - coded) * (layer.key_dim + layer.value_dim) * shape.itemsize)

    def upper_bytes_for(self, layer: LayerShape, shape: Shape, entries: int) -> int:
        """Bytes that a draft step reads: everything but the lower halves."""
        lower = packed_width(layer.key_dim, HALF) + packed_width(layer.value_dim, HALF)
        return self.bytes_for(layer, shape, entries) - layer.kv_heads * self._coded(entries) * lower

    def _coded(self, entries: int) -> int:
        """How many of these entries are codes."""
        return max(0, entries // self.group - 1) * self.group

    @property
    def coded(self) -> int:
        """Entries per KV head that are codes."""
        return 0 if self.tokens is None else self.tokens.n

    def flush(self) -> None:
        """Code the oldest exact entries, as long as two groups are exact."""
        count = self._coded(self.n)
        if not count:
            return
        held = self._held()
        tokens, groups = self._encode(held["key"][:, :, :count], held["value"][:, :, :count])
        if self.tokens is None or self.groups is None:
            room = self.n + self.remaining
            self.tokens = AppendedBlock(tokens, room)
            self.groups = AppendedBlock(groups, room // self.group)
            self.slack = 2 * self.group
            self._replace({name: x[:, :, count:].clone() for name, x in held.items()}, 2 * self.slack)
            return
        self.tokens.append(tokens)
        self.groups.append(groups)
        assert self._buffer is not None
        self._buffer.write(0, {name: x[:, :, count:].clone() for name, x in held.items()})
        self.n -= count

    def reserve(self, tokens: int, forward: int) -> None:
        """Make room for `tokens` more tokens, at most `forward` at a time, as exact entries and as codes."""
        super().reserve(tokens, forward)
        if self.tokens is not None and self.groups is not None:
            coded = self._coded(self.n + tokens)
            self.tokens.reserve(coded)
            self.groups.reserve(coded // self.group)

    def _encode(self, key: Tensor, value: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        keys = quantize(key, HALF, tokens=self.group)
        values = quantize(value, HALF, channels=min(self.group, value.shape[3]))
        tokens = {
            "key_upper": keys.packed, "key_lower": lower_half(key, keys), "value_upper": values.packed,
            "value_lower": lower_half(value, values), "value_scale": values.scale, "value_minimum": values.minimum,
        }
        return tokens, {"key_scale": keys.scale, "key_minimum": keys.minimum}

    def expand(self, *, whole: bool, later: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values of all entries; of codes the upper half, or both. [B, H_kv, n, D], [B, H_kv, n, D_v]

        later: keys and values of another store, which follow.
        """
        exact = {"key": [self.keys], "value": [self.values]}  # entries after the codes
        for some, more in zip(exact.values(), later or (), strict=False):
            some.append(more)
        if self.tokens is None or self.groups is None:
            keys, values = (torch.cat(x, dim=2) if later else x[0] for x in exact.values())
            return keys, values
        held = {**self.tokens.held(), **self.groups.held()}
        found = []
        for name, some in exact.items():
            scale, minimum, width = held[f"{name}_scale"], held[f"{name}_minimum"], some[0].shape[3]
            old = dequantize(Codes(held[f"{name}_upper"], scale, minimum, HALF, width))
            if whole:
                lower = Codes(held[f"{name}_lower"], scale.float() / 2**HALF, -scale.float() / 2, HALF, width)
                old = old + dequantize(lower)
            found.append(torch.cat([old.to(some[0].dtype), *some], dim=2))
        return found[0], found[1]

    def attend(self, step: Step) -> Tensor:
        """Attention output of the last T entries over both halves and the exact entries. [B, H_q, T, D_v]"""
        return attend_to(step, *self.expand(whole=True))

    def upper_bytes(self) -> int:
        """Bytes of everything but the lower halves."""
        lower = 0
        if self.tokens is not None:
            held = self.tokens.held()
            lower = held["key_lower"].nbytes + held["value_lower"].nbytes
        return self.nbytes() - self.spare_bytes() - lower

    def entries_kept(self) -> list[int]:
        """Entries of each (batch, KV head)."""
        return [x + self.coded for x in super().entries_kept()]

    def facts(self) -> dict[str, Fact]:
        """Entries that are codes."""
        coded = self.coded * len(self.entries_kept())
        return {**super().facts(), "entries_quantized": Fact(coded, changed=True)}


@dataclass
class UpperKV(LayerKV):
    """The upper halves and exact entries of another store; only tokens that the other store lacks are its own."""

    source: HierarchicalKV = field(default_factory=HierarchicalKV)

    def append(self, step: Step) -> None:
        """Add entries that the other store does not hold."""
        if self.source.seen < step.seen:
            super().append(step)
        self.seen, self._window = step.seen, step.window

    def attend(self, step: Step) -> Tensor:
        """Attention output of the last T entries over the other store's upper halves and its own. [B, H_q, T, D_v]"""
        return attend_to(step, *self.source.expand(whole=False, later=(self.keys, self.values) if self.n else None))

    def read_bytes(self) -> int:
        """Bytes that a draft step reads."""
        return self.source.upper_bytes()


@dataclass
class HierarchicalPairKV(VerifiedKV):
    """Both halves verify, and the upper ones draft: the entries exist once."""

    target: HierarchicalKV = field(default_factory=HierarchicalKV)

    def __post_init__(self) -> None:
        """Let the draft read the upper halves of the target."""
        self.draft = UpperKV(source=self.target)

    def fork(self) -> VerifiedKV:
        """An independent copy with its own counters."""
        other = super().fork()
        assert isinstance(other.draft, UpperKV) and isinstance(other.target, HierarchicalKV)
        other.draft.source = other.target
        return other

    def entries_kept(self) -> list[int]:
        """Entries of each (batch, KV head)."""
        return self.target.entries_kept()

    def facts(self) -> dict[str, Fact]:
        """Counters of the codes."""
        return self.target.facts()


def lower_half(x: Tensor, upper: Codes) -> Tensor:
    """Codes of the distance to the upper half, in sixteenths of its scale. x: [..., n, D]. Returns packed codes."""
    grouped = (x.float() - dequantize(upper)).unflatten(-1, (-1, upper.channels)).unflatten(-3, (-1, upper.tokens))
    scale = upper.scale.float()[..., None, :, None]
    codes = ((grouped / scale.masked_fill(scale == 0, 1.0) + 0.5) * 2**HALF).round_().clamp_(0, 2**HALF - 1)
    return pack(codes.to(torch.uint8).flatten(-2).flatten(-3, -2), HALF)


def attend_to(step: Step, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of the last T entries over these. [B, H_q, T, D_v]"""
    return dense_attention(step.query, keys, values, sinks=step.sinks, causal=step.causal, **step.options)
