"""Entries as codes of their own: each vector is encoded by itself, so later entries are encoded when they arrive."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from kvbench.budget import LayerShape, Shape
from kvbench.kernels.pack import Codes, dequantize, packed_width, quantize
from kvbench.kernels.packed_attention import packed_partial
from kvbench.kernels.ragged_attention import Partial, dense_partial, merge_partials, ragged_partial
from kvbench.step import Step
from kvbench.store.facts import Fact
from kvbench.store.layer import LayerKV

BLOCK = 2**20
"""Elements decoded at a time, over all heads."""
PARAMETER_BYTES = 4
"""A scale and a minimum in float16."""
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

    def fixed_bytes(self, width: int, heads: int) -> int:
        """Bytes of `tensors`, for this many KV heads."""
        del width, heads
        return 0

    def tensors(self) -> list[Tensor]:
        """Tensors of the coder that count as stored: what depends on the context or on the model."""
        return []


def as_norm(x: Tensor) -> Tensor:
    """Norms in float16.

    Raises:
        ValueError: a norm exceeds float16's 65504, or is not a number.
    """
    norm = x.to(torch.float16)
    if not norm.isfinite().all():
        raise ValueError(f"a norm of {x.amax().item():.4g} is beyond 65504, the limit of float16 norms.")
    return norm


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
class SplitCoder(Coder):
    """Two coders: one for the channels of the largest norm in the context, per KV head, and one for the others."""

    share: float
    """Share of the channels for the first coder, rounded down to whole channels."""
    large: Coder
    small: Coder
    order: Tensor | None = None
    """Channels by norm, the largest first. [B, H_kv, D] int16"""

    def count(self, width: int) -> tuple[int, int]:
        """Channels of both coders."""
        first = int(self.share * width)
        return first, width - first

    def fit(self, x: Tensor) -> Self:
        """Find the channels."""
        norms = x.float().square().sum(2)
        return replace(self, order=norms.argsort(dim=-1, descending=True, stable=True).to(torch.int16))

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
        own = {which: {name.removeprefix(which): x for name, x in parts.items() if name.startswith(which)}
               for which in ("large_", "small_")}
        first, rest = self.count(width)
        return torch.cat([self.large.decode(own["large_"], first), self.small.decode(own["small_"], rest)], dim=3)

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


@dataclass
class CodedKV(LayerKV):
    """Exact entries until `encode` ends the context; from then on every entry is encoded when it arrives."""

    key_coder: Coder | None = None
    value_coder: Coder | None = None

    coded: bool = field(default=False, init=False)
    _widths: tuple[int, int] = field(default=(0, 0), init=False)

    @property
    def _coders(self) -> dict[str, Coder]:
        assert self.key_coder is not None and self.value_coder is not None
        return {"key": self.key_coder, "value": self.value_coder}

    def bytes_for(self, layer: LayerShape, shape: Shape, entries: int) -> int:
        """Encoded entries, and the tensors of the coders."""
        del shape
        heads, widths = layer.kv_heads, zip(self._coders.values(), (layer.key_dim, layer.value_dim), strict=True)
        return sum(heads * entries * x.entry_bytes(width) + x.fixed_bytes(width, heads) for x, width in widths)

    def encode(self) -> None:
        """End the context: encode the entries and free the exact ones."""
        exact = self._held()
        self._widths = exact["key"].shape[3], exact["value"].shape[3]
        self.key_coder, self.value_coder = (x.fit(exact[name]) for name, x in self._coders.items())
        self._replace(self._encode(exact), self.n + max(0, self.capacity - self.seen))
        self.coded = True

    def _entries(self, step: Step) -> dict[str, Tensor]:
        entries = super()._entries(step)
        return self._encode(entries) if self.coded else entries

    def _encode(self, entries: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {name: x for name, x in entries.items() if name not in self._coders}
        for kind, coder in self._coders.items():
            found.update({f"{kind}_{name}": x for name, x in coder.encode(entries[kind]).items()})
        return found

    def _parts(self, kind: str, low: int, stop: int) -> Parts:
        assert self._buffer is not None
        held, start = self._buffer.tensors, f"{kind}_"
        return {name.removeprefix(start): x[:, :, low:stop] for name, x in held.items() if name.startswith(start)}

    def decode(self, low: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values of some entries, in the coders' coordinates. [B, H_kv, n, W] float32"""
        coders = zip(self._coders.items(), self._widths, strict=True)
        keys, values = (coder.decode(self._parts(kind, low, stop), width) for (kind, coder), width in coders)
        return keys, values

    def attend(self, step: Step) -> Tensor:
        """Attention output of the last T entries over every entry held. [B, H_q, T, D_v]"""
        if not self.coded:
            return super().attend(step)
        keys, values = self._coders.values()
        query = keys.turn(step.query.float()).to(step.query.dtype)
        options: dict[str, Any] = {
            "scale": step.scale, "seen": step.seen, "window": step.window, "softcap": step.softcap
        }
        before = self.n - step.query.shape[2]
        parts = self._earlier(query, before, options)
        own_keys, own_values = (x.to(query.dtype) for x in self.decode(before, self.n))
        parts.append(dense_partial(query, own_keys, own_values, positions=None, **options))
        return values.back(merge_partials(parts, step.sinks)).to(step.query.dtype)

    def _earlier(self, query: Tensor, before: int, options: dict[str, Any]) -> list[Partial]:
        """Attention over the entries before those of the queries: over codes, or over blocks that are decoded."""
        window, start = options["window"], self.seen - self.n
        first = 0 if window is None else max(0, self.n - query.shape[2] - window + 1)
        if before <= first:
            return []
        keys, values = (x.codes(self._parts(kind, first, before), width)
                        for (kind, x), width in zip(self._coders.items(), self._widths, strict=True))
        if keys is not None and values is not None:
            return [packed_partial(query, keys, values, start=start + first, **options)]
        batch, heads = self._parts("key", 0, 1).popitem()[1].shape[:2]
        size, parts = max(1, BLOCK // (batch * heads * max(self._widths))), []
        for low in range(first, before, size):
            count = min(size, before - low)
            block_keys, block_values = (x.to(query.dtype).flatten(0, 2) for x in self.decode(low, low + count))
            offsets = torch.arange(batch * heads + 1, dtype=torch.int32, device=query.device) * count
            at = None
            if window is not None:
                at = torch.arange(start + low, start + low + count, dtype=torch.int32, device=query.device)
                at = at.repeat(batch * heads)
            counts = [count] * (batch * heads)
            parts.append(ragged_partial(query, block_keys, block_values, offsets, counts, positions=at, **options))
        return parts

    def tensors(self) -> list[Tensor]:
        """Every tensor that the layer keeps alive."""
        return super().tensors() + [x for coder in self._coders.values() for x in coder.tensors()]

    def facts(self) -> dict[str, Fact]:
        """Entries that are encoded, and the distinct bytes of the first part of their keys."""
        entries = self.n * len(self.entries_kept()) if self.coded else 0
        distinct = 0
        if entries:
            first = next(iter(self._parts("key", 0, self.n).values()))
            distinct = int(torch.bincount(first.contiguous().view(torch.uint8).flatten().int()).count_nonzero())
        return {
            **super().facts(), "entries_quantized": Fact(entries, changed=True),
            "distinct_codes": Fact(distinct, maximum=True),
        }
