"""Entries as codes of their own: each vector is encoded by itself, when it arrives or in blocks of several."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from kvbench.budget import LayerShape, Shape
from kvbench.errors import UserError
from kvbench.kernels.blocks import GPU_BLOCKS
from kvbench.kernels.cast_attention import cast_partial
from kvbench.kernels.level_attention import Levels, level_partial
from kvbench.kernels.packed_attention import packed_partial
from kvbench.kernels.ragged_attention import Partial, dense_partial, merge_partials, ragged_partial
from kvbench.step import Step
from kvbench.store.blocks import Residual
from kvbench.store.coders import Coder, Parts
from kvbench.store.facts import Fact
from kvbench.store.layer import LayerKV

if TYPE_CHECKING:
    from kvbench.hf import Rope
    from kvbench.kernels.pack import Codes

T = TypeVar("T")
Cast = tuple[Tensor, Tensor | None]
"""Numbers in 8 bits, and their factor."""
BLOCK = 2**20
"""Elements decoded at a time on a CPU, over all heads."""


@dataclass
class CodedKV(LayerKV):
    """Exact entries until `encode` ends the context; codes from then on, and exact entries that wait for a block."""

    key_coder: Coder | None = None
    value_coder: Coder | None = None
    plain: bool = False
    """Whether keys are encoded as they are before rotation; `turn` must then leave queries as they are."""
    sinks: int = 0
    """First entries of the context, which stay exact. These are turned like queries, so a coder's `turn` must keep
    products and `back` must undo it."""

    residual: int = 0
    """Entries are encoded in blocks of this many, and those since the last whole block stay exact; 0: every entry is
    encoded when it arrives."""

    coded: bool = field(default=False, init=False)
    first: dict[str, Tensor] = field(default_factory=dict, init=False)
    """Exact keys and values of the first entries. [B, H_kv, sinks, D]"""
    recent: dict[str, Residual] = field(default_factory=dict, init=False)
    """Exact keys and values since the last whole block, and their positions where they are stored."""
    _widths: tuple[int, int] = field(default=(0, 0), init=False)
    _rope: Rope | None = field(default=None, init=False)

    @property
    def _coders(self) -> dict[str, Coder]:
        assert self.key_coder is not None and self.value_coder is not None
        return {"key": self.key_coder, "value": self.value_coder}

    def bytes_for(self, layer: LayerShape, shape: Shape, entries: int) -> int:
        """Exact first and last entries, encoded others, and the tensors of the coders."""
        heads, widths = layer.kv_heads, (layer.key_dim, layer.value_dim)
        exact = min(self.sinks, entries)
        exact += self._waiting(entries - exact)
        return heads * exact * sum(widths) * shape.itemsize + sum(
            heads * (entries - exact) * x.entry_bytes(width) + x.fixed_bytes(width, heads)
            for x, width in zip(self._coders.values(), widths, strict=True)
        )

    def _waiting(self, entries: int) -> int:
        """How many of this many entries wait for a whole block."""
        return entries % self.residual if self.residual else 0

    @property
    def _total(self) -> int:
        """Entries of a KV head that are encoded or wait for it."""
        return self.n + (self.recent["key"].n if self.recent else 0)

    def encode(self) -> None:
        """End the context: encode all but the first and the last entries and free the exact ones."""
        first = min(self.sinks, self.n)
        held = self._held()
        self._widths = held["key"].shape[3], held["value"].shape[3]
        if first:
            self.first = {name: held[name][:, :, :first].clone() for name in ("key", "value")}
        exact = {name: x[:, :, first:] for name, x in held.items()}
        if self.plain:
            exact["key"] = self._turn_keys(exact["key"], self.seen - self.n + first, inverse=True)
        self.key_coder, self.value_coder = (x.fit(exact[name]) for name, x in self._coders.items())
        later = self.remaining
        if self.residual:
            assert not self.plain, "recent keys are exact as they are rotated"
            whole = self.n - first - self._waiting(self.n - first)
            later += self.n - first - whole
            self.recent = {
                name: Residual(x[:, :, whole:] if x.dim() == 4 else x[:, :, whole:, None], 2 * self.residual)
                for name, x in exact.items()
            }
            exact = {name: x[:, :, :whole] for name, x in exact.items()}
        self._replace(self._encode(exact), exact["key"].shape[2] + later)
        self.coded = True

    def append(self, step: Step) -> None:
        """Add a forward's entries."""
        self._rope = step.rope
        if not self.recent:
            super().append(step)
            return
        self.seen, self._window = step.seen, step.window
        for name, x in self._entries(step).items():
            self.recent[name].append(x if x.dim() == 4 else x[..., None])

    def make_static(self) -> None:
        """As the base class does; only for codes whose kernel takes a length on the device.

        Raises:
            UserError: the codes are neither casts nor levels.
        """
        held = {kind: self._parts(kind, 0, self.n) for kind in self._coders}
        if self.plain or self.recent or not (self._casts(held) or self._levels(held)):
            raise UserError("codes that are decoded in blocks have no static steps.")
        super().make_static()

    def flush(self) -> None:
        """Encode the exact entries that fill whole blocks, after the attention of their turn."""
        waiting = self._total - self.n
        whole = waiting - self._waiting(waiting)
        if whole:
            taken = {name: x.take(whole) for name, x in self.recent.items()}
            self._write(self._encode({name: x if name in self._coders else x[..., 0] for name, x in taken.items()}))

    @property
    def positions(self) -> Tensor | None:
        """Logical positions of all entries but the first exact ones, where they are stored. [B, H_kv, n] int32"""
        held = super().positions
        if held is None or "position" not in self.recent:
            return held
        return torch.cat([held, self.recent["position"].entries[..., 0]], dim=2)

    def reserve(self, tokens: int, forward: int) -> None:
        """Make room for `tokens` more tokens, of which up to `forward` are exact before they are encoded."""
        super().reserve(tokens + self._total - self.n, forward)
        for x in self.recent.values():
            x.reserve(self.residual + forward)

    def _turn_keys(self, keys: Tensor, start: int, *, inverse: bool = False) -> Tensor:
        """Keys of the tokens from `start` on, rotated to their positions or back. [B, H_kv, n, D]"""
        assert self._rope is not None
        return self._rope.rotate_from(keys.float(), start, inverse=inverse)

    def _entries(self, step: Step) -> dict[str, Tensor]:
        entries = super()._entries(step)
        if self.coded and self.plain:
            entries["key"] = self._turn_keys(step.key, step.seen - step.key.shape[2], inverse=True)
        return self._encode(entries) if self.coded and not self.recent else entries

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
        return self._turn_keys(keys, self.seen - self._total + low) if self.plain else keys, values

    def attend(self, step: Step) -> Tensor:
        """Attention output of the last T entries over every entry held. [B, H_q, T, D_v]"""
        if not self.coded:
            return super().attend(step)
        keys, values = self._coders.values()
        query = keys.turn(step.query.float()).to(step.query.dtype)
        options = step.options
        if self.recent:
            parts = self._first(query, options) + self._earlier(query, self.n, options)
            parts = [Partial(values.back(x.output), x.lse) for x in parts]
            recent = (self.recent[name].entries for name in self._coders)
            parts.append(dense_partial(step.query, *recent, positions=None, **options))
            return merge_partials(parts, step.sinks).to(step.query.dtype)
        own = step.query.shape[2]
        before = self.n - (own if own > 1 else 0)  # a single query sees its own entry like the ones before it
        parts = self._first(query, options) + self._earlier(query, before, options)
        if before < self.n:
            own_keys, own_values = (x.to(query.dtype) for x in self.decode(before, self.n))
            parts.append(dense_partial(query, own_keys, own_values, positions=None, **options))
        return values.back(merge_partials(parts, step.sinks)).to(step.query.dtype)

    def _earlier(self, query: Tensor, before: int, options: dict[str, Any]) -> list[Partial]:
        """Attention over the entries before those of the queries: over codes, casts, or blocks that are decoded."""
        window, start = options["window"], self.seen - self._total
        first = 0 if window is None else max(0, self._total - query.shape[2] - window + 1)
        if before <= first:
            return []
        length = self.length if query.shape[2] == 1 else None
        if length is not None:  # a static step reads the whole block
            assert self._buffer is not None
            first, before = 0, self._buffer.capacity
        held = {kind: self._parts(kind, first, before) for kind in self._coders}
        if not self.plain:
            if codes := self._codes(held):
                return [packed_partial(query, *codes, start=start + first, **options)]
            place: dict[str, Any] = {"start": start + first, "length": length}
            if casts := self._casts(held):
                (numbers, factor), (others, other) = casts
                return [cast_partial(query, numbers, others, factor, other, **place, **options)]
            if levels := self._levels(held):
                keys, values = levels
                return [level_partial(query, keys, values, **place, **options)]
        size = block_entries(next(iter(held["key"].values())), max(self._widths))
        return [
            attend_block(query, *self.decode(low, min(low + size, before)), start + low, options)
            for low in range(first, before, size)
        ]

    def _codes(self, held: dict[str, Parts]) -> tuple[Codes, Codes] | None:
        return both(x.codes(held[kind], w) for (kind, x), w in zip(self._coders.items(), self._widths, strict=True))

    def _casts(self, held: dict[str, Parts]) -> tuple[Cast, Cast] | None:
        return both(x.casts(held[kind]) for kind, x in self._coders.items())

    def _levels(self, held: dict[str, Parts]) -> tuple[tuple[Levels, ...], tuple[Levels, ...]] | None:
        return both(
            x.level_codes(held[kind], w) for (kind, x), w in zip(self._coders.items(), self._widths, strict=True)
        )

    def _first(self, query: Tensor, options: dict[str, Any]) -> list[Partial]:
        """Attention over the exact first entries, in the coders' coordinates."""
        if not self.first:
            return []
        keys, values = (coder.turn(self.first[kind].float()) for kind, coder in self._coders.items())
        start = self.seen - self._total - keys.shape[2]  # above 0 where a sliding window has left tokens behind
        return [attend_block(query, keys, values, start, options)]

    def tensors(self) -> list[Tensor]:
        """Every tensor that the layer keeps alive."""
        coders = [x for coder in self._coders.values() for x in coder.tensors()]
        return [*super().tensors(), *coders, *self.first.values(), *(x.block for x in self.recent.values())]

    def spare_bytes(self) -> int:
        """Bytes that hold no entry."""
        return super().spare_bytes() + sum(x.spare_bytes() for x in self.recent.values())

    def fork(self) -> LayerKV:
        """An independent copy: codes are shared, exact entries that wait for a block are copied."""
        other = super().fork()
        assert isinstance(other, CodedKV)
        other.recent = {name: x.fork() for name, x in self.recent.items()}
        return other

    def close(self) -> None:
        """Free the entries."""
        super().close()
        self.first, self.recent = {}, {}

    def entries_kept(self) -> list[int]:
        """Entries of each (batch, KV head), exact ones included."""
        exact = (self.first["key"].shape[2] if self.first else 0) + self._total - self.n
        return [x + exact for x in super().entries_kept()]

    def facts(self) -> dict[str, Fact]:
        """Entries that are encoded, and the distinct bytes of the first part of their keys."""
        entries = self.n * len(self.entries_kept()) if self.coded else 0
        distinct = 0
        if entries:
            first = next(iter(self._parts("key", 0, self.n).values()))
            distinct = int(torch.bincount(first.contiguous().view(torch.uint8).flatten()).count_nonzero())
        return {
            **super().facts(), "entries_quantized": Fact(entries, changed=True),
            "distinct_codes": Fact(distinct, maximum=True),
        }


def both(found: Iterable[T | None]) -> tuple[T, T] | None:
    """One of keys and one of values; None if either is missing."""
    keys, values = found
    return None if keys is None or values is None else (keys, values)


def block_entries(held: Tensor, width: int) -> int:
    """Entries that are decoded at a time. held: a part of them, [B, H_kv, n, ...]; width: elements of one, decoded."""
    most = BLOCK * (GPU_BLOCKS if held.is_cuda else 1)
    return max(1, most // (held.shape[:2].numel() * width))


def attend_block(query: Tensor, keys: Tensor, values: Tensor, start: int, options: dict[str, Any]) -> Partial:
    """Attention over entries before the queries, from the token `start` on. keys: [B, H_kv, n, W]"""
    heads, count = keys.shape[:2].numel(), keys.shape[2]
    offsets = torch.arange(heads + 1, dtype=torch.int32, device=query.device) * count
    at = None
    if options["window"] is not None:
        at = torch.arange(start, start + count, dtype=torch.int32, device=query.device).repeat(heads)
    return ragged_partial(
        query, keys.to(query.dtype).flatten(0, 2), values.to(query.dtype).flatten(0, 2), offsets, [count] * heads,
        positions=at, **options,
    )
