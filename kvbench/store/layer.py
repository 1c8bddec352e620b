"""The base store: the KV entries of one layer.

They stand in the order of arrival, so causality is the order of entries, whatever was evicted between them. Logical
positions are stored only where something needs them: a window that must count tokens across holes, a method that
re-rotates, a test that looks.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvbench.budget import LayerShape, Shape
from kvbench.errors import UserError
from kvbench.kernels.column_sums import column_sums
from kvbench.kernels.dense_attention import dense_attention
from kvbench.kernels.ragged_attention import dense_partial, merge_partials, ragged_partial
from kvbench.step import Step
from kvbench.store.entries import Buffer, FlatEntries, gather, last_entries, match_holes, scatter, storage_bytes
from kvbench.store.facts import Fact

POSITION_BYTES = SCORE_BYTES = OFFSET_BYTES = 4


@dataclass
class LayerKV:
    """Entries of one layer: one dense block, and a ragged one before it where heads kept unequal numbers.

    Options, set by `Method.layer`:
        queries: how many of the last queries to keep while a compression is to come (observation window).
        column_sums: accumulate the attention mass that each entry received, over all queries.
        track: store each entry's logical position.
        bounded: entries are dropped in place while decoding, so the block does not grow.
        slack: entries that a bounded store has room for above those that it keeps.
        ragged: heads will keep unequal numbers of entries (`keep_where`, `freeze`).
        entry_state: names of numbers to keep per entry, which `keep` and `drop` move with it (`get_entry_state`).
    """

    queries: int = 0
    column_sums: bool = False
    track: bool = False
    bounded: bool = False
    slack: int = 1
    ragged: bool = False
    entry_state: tuple[str, ...] = ()

    n: int = field(default=0, init=False)
    """Entries per KV head in the dense block. Where steps have static shapes, as the host counts them."""
    seen: int = field(default=0, init=False)
    """Tokens so far."""
    dropped: int = field(default=0, init=False)
    """Entries evicted so far, over all heads: shown by the effect check."""
    capacity: int = field(default=0, init=False)
    """Upper bound of the conversation's tokens, so that decoding never reallocates."""
    recent_queries: Tensor | None = field(default=None, init=False)
    """The last `queries` queries of the context. [B, H_q, w, D]"""
    frozen: FlatEntries | None = field(default=None, init=False)
    state: dict[str, Tensor] = field(default_factory=dict, init=False)
    """Tensors that a method keeps per layer; counted and forked with the entries, and left as they are by `keep`."""
    settled: bool = field(default=False, init=False)
    """Whether no compression is to come, so that nothing more is kept for scoring."""
    length: Tensor | None = field(default=None, init=False)
    """Entries held, on the device, where steps have static shapes; `keys` and the like are then the whole block."""
    _block: Buffer | None = field(default=None, init=False)
    _window: int | None = field(default=None, init=False)

    def bytes_for(self, layer: LayerShape, shape: Shape, entries: int) -> int:
        """Bytes that a context takes after compression to this many entries per KV head, by formula."""
        holes = entries < shape.entries(layer)
        width = (layer.key_dim + layer.value_dim) * shape.itemsize
        width += POSITION_BYTES if self.track or (holes and layer.window is not None) else 0
        width += SCORE_BYTES if self.column_sums and self.bounded else 0
        width += SCORE_BYTES * len(self.entry_state)
        offsets = (layer.kv_heads + 1) * OFFSET_BYTES if self.ragged and holes else 0
        return entries * layer.kv_heads * width + offsets

    def running_bytes(self, layer: LayerShape, shape: Shape) -> int:
        """Bytes next to keys and values while the context is run, by formula: positions, numbers per entry, queries."""
        numbers = POSITION_BYTES * self.track + SCORE_BYTES * (self.column_sums + len(self.entry_state))
        queries = min(self.queries, shape.length) * layer.query_heads * layer.key_dim * shape.itemsize
        return shape.entries(layer) * layer.kv_heads * numbers + queries

    # Entries as tensors

    @property
    def _buffer(self) -> Buffer | None:
        """The dense block, with this store's own entries in it: forks share it, and write into the same places."""
        if self._block is not None:
            self._block.resume(self)
        return self._block

    def _entries(self, step: Step) -> dict[str, Tensor]:
        """New entries as they are stored, by name."""
        entries = {"key": step.key, "value": step.value}
        if self.track:
            entries["position"] = step.positions[:, None].expand(-1, step.key.shape[1], -1).to(torch.int32)
        for name in (*(["score"] if self.column_sums else ()), *self.entry_state):
            entries[name] = torch.zeros(step.key.shape[:3], dtype=torch.float32, device=step.key.device)
        return entries

    def _view(self, name: str) -> Tensor:
        assert self._buffer is not None, "the layer holds no entries yet"
        entries = self._buffer.tensors[name]
        return entries if self.length is not None else entries[:, :, : self.n]

    def get_entry_state(self, name: str) -> Tensor:
        """A number per entry, zero when the entry arrives, to be written in place. [B, H_kv, n] float32"""
        return self._view(name)

    @property
    def keys(self) -> Tensor:
        """Rotated keys of the dense block. [B, H_kv, n, D]"""
        return self._view("key")

    @property
    def values(self) -> Tensor:
        """Values of the dense block. [B, H_kv, n, D_v]"""
        return self._view("value")

    @property
    def positions(self) -> Tensor | None:
        """Logical positions of the dense block, where they are stored. [B, H_kv, n] int32"""
        held = self._buffer is not None and "position" in self._buffer.tensors
        return self._view("position") if held else None

    def logical_positions(self) -> Tensor:
        """Positions of the dense block, stored or implied by the order of entries. [B, H_kv, n] or [n]"""
        held = self.positions
        return torch.arange(self.seen - self.n, self.seen, device=self.keys.device) if held is None else held

    @property
    def scores(self) -> Tensor:
        """Attention mass that each entry received so far, summed over its group's heads. [B, H_kv, n] float32"""
        return self._view("score")

    # Adding

    def append(self, step: Step) -> None:
        """Add a forward's entries, and what later scoring needs of its queries."""
        self.seen, self._window = step.seen, step.window
        entries = self._entries(step)
        count = step.key.shape[2]
        if self.length is not None:
            assert self._buffer is not None
            self._refuse_overflow(count)
            index = self.length + torch.arange(count, device=self.length.device)
            for name, x in entries.items():
                self._buffer.tensors[name].index_copy_(2, index, x)
            self.length.add_(count)
            self.n += count
            return
        buffer = self._buffer
        if buffer is None:
            buffer = Buffer(entries, max(count, self.capacity if step.moment.in_context else 0))
            buffer.join(self)
            self._block = buffer
        elif self.n + count > buffer.capacity or not buffer.clear(self):
            buffer = self._reallocate(self.n + count)
        buffer.write(self.n, entries)
        self.n += count
        if self.queries and not self.settled:
            self.recent_queries = last_entries(self.recent_queries, step.query, self.queries)
        if self.column_sums:
            self.scores.add_(
                column_sums(step.query, self.keys, scale=step.scale, seen=step.seen, window=step.window,
                            positions=self._where(), softcap=step.softcap, sinks=step.sinks)
            )

    def reserve(self, tokens: int, forward: int) -> None:
        """Make room now for `tokens` more tokens, at most `forward` at a time, so that decode does not have to."""
        extra = min(tokens, max(forward, self.slack)) if self.bounded else tokens
        if self.length is not None:
            self._refuse_overflow(extra)
        elif self._buffer is not None and self.n + extra > self._buffer.capacity:
            self._reallocate(self.n + extra)

    def _reallocate(self, capacity: int) -> Buffer:
        self._replace(self._held(), capacity)
        assert self._block is not None
        return self._block

    def _replace(self, entries: dict[str, Tensor], capacity: int) -> None:
        """Hold these entries and no others, in a block of their own."""
        if self._block is not None:
            self._block.leave(self)
        count = next(iter(entries.values())).shape[2]
        self._block = Buffer(entries, max(count, capacity))
        self._block.write(0, entries)
        self._block.join(self)
        self.n = count

    def _refuse_overflow(self, count: int) -> None:
        assert self._buffer is not None
        if self.n + count > self._buffer.capacity:
            raise UserError(
                f"{count} more entries do not fit the fixed capacity of {self._buffer.capacity} with {self.n} held: "
                "open the session with a larger capacity before its steps are made static."
            )

    # Reading

    def _where(self) -> Tensor | None:
        """Positions, if the window has to be counted by them."""
        return self.positions if self._window is not None else None

    def attend(self, step: Step) -> Tensor:
        """Attention output of the last T entries over every entry held. [B, H_q, T, D_v]"""
        seen = step.seen if self.length is None else step.positions[0, -1] + 1  # a captured step has no host numbers
        options: dict[str, Any] = {"scale": step.scale, "seen": seen, "window": step.window, "softcap": step.softcap}
        if self.frozen is None:
            return dense_attention(
                step.query, self.keys, self.values, **options, positions=self._where(), sinks=step.sinks,
                causal=step.causal, length=self.length,
            )
        parts = [
            ragged_partial(self.frozen_query(step), self.frozen.key, self.frozen.value, self.frozen.offsets,
                           self.frozen.counts, positions=self.frozen.position, bias=self.frozen.bias, **options),
            dense_partial(step.query, self.keys, self.values, positions=self._where(), length=self.length, **options),
        ]
        return merge_partials(parts, step.sinks).to(step.query.dtype)

    def frozen_query(self, step: Step) -> Tensor:
        """The queries as they meet the frozen keys. [B, H_q, T, D]"""
        return step.query

    # Evicting

    def keep(self, indices: Tensor) -> None:
        """Keep these entries of every head and free the rest. indices: [B, H_kv, C], ascending."""
        self.refuse_frozen()
        kept = {name: gather(x, indices) for name, x in self._held_with_holes().items()}
        self._count_dropped(self.n - indices.shape[2], indices)
        self._replace(kept, indices.shape[2] + (self.slack if self.bounded else max(0, self.capacity - self.seen)))

    def keep_where(self, mask: Tensor) -> None:
        """Keep entries by head, unequal numbers allowed, flat and never written again. mask: [B, H_kv, n] bool"""
        self.refuse_frozen()
        held = self._held_with_holes()
        position = held.get("position")
        self.freeze(
            held["key"][mask], held["value"][mask], mask.sum(-1), position=None if position is None else position[mask]
        )

    def freeze(
        self, key: Tensor, value: Tensor, counts: Tensor, *, position: Tensor | None = None, bias: Tensor | None = None
    ) -> None:
        """Hold these entries, flat and never written again, in place of all stored entries.

        key: [R, D]; value: [R, D_v]; counts: [B, H_kv], how many of the R each head holds, heads one after the other.
        position: [R] int32, needed where there is a window. bias: [R] float32, added to the entries' logits: log n for
        an entry that represents n merged ones.
        """
        self.refuse_frozen()
        if self.entry_state:
            raise UserError(
                f"the state of entries, {', '.join(self.entry_state)}, does not follow entries that heads keep in "
                "unequal numbers. Use keep or drop, or a store without entry_state."
            )
        assert self._window is None or position is not None, "a window over frozen entries needs their positions"
        offsets = torch.zeros(counts.numel() + 1, dtype=torch.int32, device=counts.device)
        offsets[1:] = counts.flatten().cumsum(0)
        self.frozen = FlatEntries(key, value, offsets, counts.flatten().tolist(), position, bias)
        self.dropped += counts.numel() * self.n - key.shape[0]
        empty = {name: x[:, :, :0] for name, x in self._held().items()}
        if position is not None:
            self.track = True
            empty["position"] = position.new_empty((*counts.shape, 0))
        self._replace(empty, max(0, self.capacity - self.seen))

    def keep_last(self, entries: int) -> None:
        """Keep the last entries of every head: what a sliding window leaves of any cache, so no eviction."""
        if self.frozen is None and self._buffer is not None and self.n > entries:
            held = {name: x[:, :, self.n - entries :] for name, x in self._held().items()}
            self._replace(held, entries + max(0, self.capacity - self.seen))

    def drop(self, indices: Tensor) -> None:
        """Evict entries in place, filling their slots with the last entries: no copy of the rest.

        The order of entries is lost, so a store that drops keeps positions where order matters to its method.
        indices: [B, H_kv, m], distinct.
        """
        self.refuse_frozen()
        assert self.bounded, "entries may be overwritten only in a store that is `bounded`: its forks copy"
        if self._window is not None and not self.track:
            self._replace(self._held_with_holes(), self.n)
        assert self._buffer is not None
        source, target = match_holes(indices, self.n)
        for x in self._buffer.tensors.values():
            scatter(x, target, gather(x, source))
        self._count_dropped(indices.shape[2], indices)
        self.n -= indices.shape[2]

    def settle(self) -> None:
        """No compression is to come: free what was kept for scoring, unless entries are still dropped by it."""
        self.settled = True
        self.recent_queries = None
        if self.column_sums and not self.bounded:
            self.column_sums = False
            if self._buffer is not None:
                del self._buffer.tensors["score"]

    def _held(self) -> dict[str, Tensor]:
        assert self._buffer is not None
        return {name: x[:, :, : self.n] for name, x in self._buffer.tensors.items()}

    def _count_dropped(self, entries: int, indices: Tensor) -> None:
        self.dropped += entries * indices.shape[0] * indices.shape[1]

    def _held_with_holes(self) -> dict[str, Tensor]:
        """Stored tensors before entries are dropped; a window then needs positions, which the order implied so far."""
        held = self._held()
        if self._window is not None and not self.track:
            key = held["key"]
            positions = torch.arange(self.seen - self.n, self.seen, dtype=torch.int32, device=key.device)
            held["position"] = positions.expand(*key.shape[:2], -1)
            self.track = True
        return held

    def refuse_frozen(self) -> None:
        """Refuse to compress what was frozen in unequal numbers (`UserError`), or only the tail would be."""
        if self.frozen is not None:
            raise UserError(
                "entries that heads keep in unequal numbers, or that stand for several, are frozen: they cannot be "
                "compressed a second time. Leave --recompress out."
            )

    def crop(self, tokens: int) -> None:
        """Forget the last tokens, each an entry of the dense block."""
        self.n -= tokens
        self.seen -= tokens

    # Forking

    def fork(self) -> LayerKV:
        """An independent copy: append-only entries are shared, entries that are written in place are copied."""
        other = copy.copy(self)
        other.state = {name: x.clone() for name, x in self.state.items()}
        if self._buffer is None:
            return other
        if self.bounded or self.column_sums or self.entry_state or self.length is not None:
            other.length = None
            other._replace(self._held(), self._buffer.capacity)  # the same class
            if self.length is not None:
                other.make_static()
        else:
            self._buffer.join(other)
        return other

    def close(self) -> None:
        """Free the entries; those that a fork appended to a shared block may be overwritten."""
        if self._block is not None:
            self._block.leave(self)
        self._block = self.frozen = self.recent_queries = None
        self.state = {}

    def make_static(self) -> None:
        """From now on every step has the same shapes: the length lives on the device, masks do the rest."""
        if self.bounded:
            raise UserError("entries dropped while decoding have no static steps: the method must say so: `graphable`.")
        assert self._buffer is not None
        if self._buffer.is_shared(self):
            self._reallocate(self._buffer.capacity)
        for x in self._buffer.tensors.values():
            x[:, :, self.n :].zero_()  # read from now on, with weight zero: NaN there would be NaN in the output
        self.length = torch.tensor(self.n, device=self.keys.device)

    # Counting

    def tensors(self) -> list[Tensor]:
        """Every tensor that the layer keeps alive."""
        held = list(self._buffer.tensors.values()) if self._buffer is not None else []
        held += self.frozen.tensors() if self.frozen is not None else []
        held += [self.recent_queries] if self.recent_queries is not None else []
        return held + list(self.state.values())

    def nbytes(self) -> int:
        """Bytes of all storages."""
        return storage_bytes(self.tensors())

    def host_tensors(self) -> list[Tensor]:
        """Every tensor that the layer keeps alive in host memory, a tier of its own next to `tensors`."""
        return []

    def read_bytes(self) -> int:
        """Bytes that one decode step reads: all that is held, unless a store reads a part."""
        return self.nbytes() - self.spare_bytes()

    def file_bytes(self) -> int:
        """Bytes of entries in a file, a tier of its own next to `tensors`."""
        return 0

    def tier_read_bytes(self) -> tuple[int, int]:
        """Bytes of `read_bytes` that come from the host and from a file."""
        return 0, 0

    def distinct_read_bytes(self) -> int:
        """As `read_bytes`, with an entry counted once that several query heads read."""
        return self.read_bytes()

    def full_read_tokens(self) -> float:
        """Tokens that the full cache reads at the step of `read_bytes`, before any window."""
        return self.seen

    def credit(self, branch: LayerKV) -> None:
        """Add a fork's read counters to this store. No-op for stores that always read every entry."""

    def spare_bytes(self) -> int:
        """Bytes of the dense block that hold no entry yet."""
        if self._buffer is None:
            return 0
        held = storage_bytes(self._buffer.tensors.values())
        return held - held * self.n // self._buffer.capacity if self._buffer.capacity else 0

    def host_spare_bytes(self) -> int:
        """Bytes in host memory that hold no entry yet."""
        return 0

    def entries_kept(self) -> list[int]:
        """Stored entries of each (batch, KV head)."""
        if self._buffer is None:
            return []
        batch, heads = next(iter(self._buffer.tensors.values())).shape[:2]
        ragged = self.frozen.counts if self.frozen is not None else [0] * (batch * heads)
        return [count + self.n for count in ragged]

    def facts(self) -> dict[str, Fact]:
        """Counters for the effect check, by name."""
        return {"entries_dropped": Fact(self.dropped, changed=True)}
