"""Packed codes: keys in groups of tokens, values in groups of channels, the last entries in full precision (KIVI)."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvbench.budget import LayerShape, Shape
from kvbench.errors import UserError
from kvbench.kernels.pack import PARAMETER_BYTES, Codes, dequantize, packed_width, quantize, unpack
from kvbench.kernels.packed_attention import packed_partial
from kvbench.kernels.ragged_attention import Partial, dense_partial, merge_partials
from kvbench.step import Step
from kvbench.store.blocks import AppendedBlock, Residual
from kvbench.store.coders import GroupCoder
from kvbench.store.facts import Fact
from kvbench.store.layer import POSITION_BYTES, LayerKV

COUNT_BLOCK = 1024
"""Entries whose codes are counted at a time."""


@dataclass(frozen=True)
class Packing:
    """How entries become codes."""

    key_bits: int
    value_bits: int
    group: int
    """Entries that share a scale and a minimum in each channel of the keys, and channels that share them in each value;
    a narrower value is one group."""
    residual: int
    """Keys are packed in blocks of this many entries, a multiple of `group`; as many last values stay exact."""
    later: bool
    """Whether entries that come after the context are packed too."""

    def head_bytes(self, layer: LayerShape, shape: Shape, entries: int) -> int:
        """Bytes of the keys and values of one KV head: codes, scales and minima, and the exact residual."""
        keys, values = self.packed_keys(entries), self.packed_values(entries)
        groups = keys // self.group * layer.key_dim + values * (layer.value_dim // min(self.group, layer.value_dim))
        codes = keys * packed_width(layer.key_dim, self.key_bits)
        codes += values * packed_width(layer.value_dim, self.value_bits)
        exact = (entries - keys) * layer.key_dim + (entries - values) * layer.value_dim
        return codes + groups * PARAMETER_BYTES + exact * shape.itemsize

    def packed_keys(self, entries: int) -> int:
        """How many of a KV head's entries have packed keys."""
        return entries - entries % self.residual

    def packed_values(self, entries: int) -> int:
        """How many of a KV head's entries have packed values."""
        return max(0, entries - self.residual)


class PackedBlock:
    """All entries of a layer: packed ones, and a residual that keys and values leave at different times.

    So the last packed keys may belong to values that are still exact, never the other way round.
    """

    def __init__(self, entries: dict[str, Tensor], packing: Packing, capacity: int) -> None:
        key, value = entries["key"], entries["value"]
        self.packing, self.n = packing, key.shape[2]
        self._widths = key.shape[3], value.shape[3]
        keys, values = packing.packed_keys(self.n), packing.packed_values(self.n)
        later = max(0, capacity - self.n)
        most, room = (self.n + later, 2 * packing.residual) if packing.later else (self.n, packing.residual + later)
        self.keys = AppendedBlock(self._key_codes(key[:, :, :keys]), packing.packed_keys(most) // packing.group)
        self.values = AppendedBlock(self._value_codes(value[:, :, :values]), packing.packed_values(most))
        self.last_keys = Residual(key[:, :, keys:], room)
        self.last_values = Residual(value[:, :, values:], room)
        where = {"position": entries["position"]} if "position" in entries else None
        self.where = None if where is None else AppendedBlock(where, self.n + later)

    def _key_codes(self, keys: Tensor) -> dict[str, Tensor]:
        """By group of tokens: codes [B, H_kv, groups, tokens, bytes], scales and minima [B, H_kv, groups, D]."""
        codes = quantize(keys, self.packing.key_bits, tokens=self.packing.group)
        packed = codes.packed.unflatten(2, (codes.scale.shape[2], self.packing.group))
        return {"packed": packed, "scale": codes.scale, "minimum": codes.minimum}

    def _value_codes(self, values: Tensor) -> dict[str, Tensor]:
        return GroupCoder(self.packing.value_bits, self.packing.group).encode(values)

    def codes(self) -> tuple[Codes, Codes]:
        """Packed keys and packed values, as views."""
        keys, values = self.keys.held(), self.values.held()
        return (
            Codes(keys["packed"].flatten(2, 3), keys["scale"], keys["minimum"], self.packing.key_bits, self._widths[0]),
            Codes(values["packed"], values["scale"], values["minimum"], self.packing.value_bits, self._widths[1]),
        )

    def append(self, entries: dict[str, Tensor]) -> None:
        """Add entries, exactly; `flush` packs."""
        self.last_keys.append(entries["key"])
        self.last_values.append(entries["value"])
        if self.where is not None:
            self.where.append({"position": entries["position"]})
        self.n += entries["key"].shape[2]

    def flush(self) -> None:
        """Pack what is too much for the residual: keys in whole blocks, values one by one."""
        if not self.packing.later:
            return
        keys, values = self.packing.packed_keys(self.last_keys.n), self.packing.packed_values(self.last_values.n)
        if keys:
            self.keys.append(self._key_codes(self.last_keys.take(keys)))
        if values:
            self.values.append(self._value_codes(self.last_values.take(values)))

    def parts(self, query: Tensor, *, seen: int, positions: Tensor | None, **options: Any) -> list[Partial]:
        """Attention of the last T entries over codes, over packed keys of exact values, and over exact entries."""
        keys, values = self.codes()
        both, packed = values.packed.shape[2], keys.packed.shape[2]
        at = [None] * 3 if positions is None else positions.split([both, packed - both, self.n - packed], dim=2)
        parts = []
        if both:
            parts.append(
                packed_partial(query, keys, values, seen=seen, positions=at[0], start=seen - self.n, **options)
            )
        exact = self.last_values.entries
        if packed > both:
            first = both // self.packing.group * self.packing.group
            between = dequantize(keys.slice(first, packed))[:, :, both - first :].to(exact.dtype)
            total = torch.full((), self.n - both, device=query.device)  # from here to the last query
            parts.append(dense_partial(
                query, between, exact[:, :, : packed - both], seen=seen, positions=at[1], length=total, **options
            ))
        rest = exact[:, :, packed - both :]
        parts.append(dense_partial(query, self.last_keys.entries, rest, seen=seen, positions=at[2], **options))
        return parts

    def reserve(self, tokens: int, forward: int) -> None:
        """Make room for `tokens` more entries, of which up to `forward` are exact before they are packed."""
        if self.packing.later:
            entries, exact = self.n + tokens, self.packing.residual + forward
            self.keys.reserve(self.packing.packed_keys(entries) // self.packing.group - self.keys.n)
            self.values.reserve(self.packing.packed_values(entries) - self.values.n)
        else:
            exact = tokens
        for last in (self.last_keys, self.last_values):
            last.reserve(exact)
        if self.where is not None:
            self.where.reserve(tokens)

    def _blocks(self) -> list[AppendedBlock]:
        return [x for x in (self.keys, self.values, self.where) if x is not None]

    def fork(self) -> PackedBlock:
        """An independent copy: codes are shared, the residual is copied."""
        other = copy.copy(self)
        other.keys, other.values = self.keys.fork(), self.values.fork()
        other.last_keys, other.last_values = self.last_keys.fork(), self.last_values.fork()
        other.where = None if self.where is None else self.where.fork()
        return other

    def close(self) -> None:
        """Free the entries."""
        for block in self._blocks():
            block.close()

    def tensors(self) -> list[Tensor]:
        """Every tensor that it keeps alive."""
        return [*(x for block in self._blocks() for x in block.tensors()), self.last_keys.block, self.last_values.block]

    def spare_bytes(self) -> int:
        """Bytes that hold no entry yet, or no longer."""
        blocks = sum(block.spare_bytes() for block in self._blocks())
        return blocks + self.last_keys.spare_bytes() + self.last_values.spare_bytes()


@dataclass
class PackedKV(LayerKV):
    """Exact entries until `pack` ends the context; codes and an exact residual from then on."""

    packing: Packing | None = None

    blocks: ClassVar[tuple[str, ...]] = ("packed",)
    packed: PackedBlock | None = field(default=None, init=False)

    def bytes_for(self, layer: LayerShape, shape: Shape, entries: int) -> int:
        """Packed entries and the residual, and positions where a window must count across evicted entries."""
        assert self.packing is not None
        holes = entries < shape.entries(layer) and layer.window is not None
        positions = entries * POSITION_BYTES if holes else 0
        return layer.kv_heads * (self.packing.head_bytes(layer, shape, entries) + positions)

    def pack(self) -> None:
        """End the context: the stored entries become codes, but for the residual."""
        assert self.packing is not None and self.frozen is None
        self.packed = PackedBlock(self._held(), self.packing, self.n + self.remaining)
        self._free_block()
        self.column_sums = False

    def flush(self) -> None:
        """Pack what later forwards brought; see `PackedBlock.flush`."""
        if self.packed is not None:
            self.packed.flush()

    def refuse_frozen(self) -> None:
        """Refuse to compress what is packed (`UserError`)."""
        if self.packed is not None:
            raise UserError("packed entries cannot be compressed a second time. Leave --recompress out.")
        super().refuse_frozen()

    @property
    def positions(self) -> Tensor | None:
        """Logical positions of all entries, where they are stored. [B, H_kv, n] int32"""
        if self.packed is None:
            return super().positions
        return None if self.packed.where is None else self.packed.where.held()["position"]

    def append(self, step: Step) -> None:
        """Add a forward's entries, exactly."""
        if self.packed is None:
            super().append(step)
            return
        self.seen, self._window = step.seen, step.window
        self.packed.append(self._entries(step))
        self.n = self.packed.n

    def reserve(self, tokens: int, forward: int) -> None:
        """Make room for `tokens` more tokens, of which up to `forward` come before anything is packed."""
        if self.packed is None:
            super().reserve(tokens, forward)
        else:
            self.packed.reserve(tokens, forward)

    def attend(self, step: Step) -> Tensor:
        """Attention output of the last T entries over every entry held. [B, H_q, T, D_v]"""
        if self.packed is None:
            return super().attend(step)
        parts = self.packed.parts(step.query, positions=self._where(), **step.options)
        return merge_partials(parts, step.sinks).to(step.query.dtype)

    def entries_kept(self) -> list[int]:
        """Entries held by each (batch, KV head)."""
        if self.packed is None:
            return super().entries_kept()
        batch, heads = self.packed.last_keys.block.shape[:2]
        return [self.n] * (batch * heads)

    def facts(self) -> dict[str, Fact]:
        """Entries whose keys are packed, and the distinct codes of keys and of values, at most 2 ** bits."""
        if self.packed is None:
            return {**super().facts(), "entries_quantized": Fact(0, changed=True)}
        keys, values = self.packed.codes()
        return {
            **super().facts(),
            "entries_quantized": Fact(keys.packed.shape[2] * len(self.entries_kept()), changed=True),
            "distinct_key_codes": Fact(distinct(keys), maximum=True),
            "distinct_value_codes": Fact(distinct(values), maximum=True),
        }


def distinct(codes: Codes) -> int:
    """How many different codes there are."""
    found = torch.zeros(2**codes.bits, dtype=torch.bool)
    for start in range(0, codes.packed.shape[2], COUNT_BLOCK):
        block = codes.packed[:, :, start : start + COUNT_BLOCK]
        found[unpack(block, codes.bits, codes.width).flatten().long().cpu()] = True
    return int(found.sum())
