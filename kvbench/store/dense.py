"""Entries of one layer in one dense block, in the order of arrival.

The order gives causality, whatever was evicted between entries. Logical positions are stored only where something
needs them: a window that must count tokens across holes, a method that re-rotates, a test that looks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvbench.errors import UserError
from kvbench.kernels.column_sums import column_sums
from kvbench.step import Step
from kvbench.store.entries import Buffer, last_entries, storage_bytes, unused_bytes


@dataclass
class DenseKV:
    """A dense block that grows at its end, and the data that later scoring needs.

    The options are those of `LayerKV`.
    """

    queries: int = 0
    column_sums: bool = False
    track: bool = False
    bounded: bool = False
    slack: int = 1
    entry_state: tuple[str, ...] = ()

    n: int = field(default=0, init=False)
    """Entries per KV head in the dense block. Where steps have static shapes, as the host counts them."""
    seen: int = field(default=0, init=False)
    """Tokens so far."""
    capacity: int = field(default=0, init=False)
    """Upper bound of the conversation's tokens, so that decoding never reallocates."""
    recent_queries: Tensor | None = field(default=None, init=False)
    """The last `queries` queries of the context. [B, H_q, w, D]"""
    settled: bool = field(default=False, init=False)
    """Whether no compression is to come, so that nothing more is kept for scoring."""
    length: Tensor | None = field(default=None, init=False)
    """Entries held, on the device, where steps have static shapes; `keys` and the like are then the whole block."""
    _block: Buffer | None = field(default=None, init=False)
    _window: int | None = field(default=None, init=False)

    def prepare(self, capacity: int, *, track: bool) -> None:
        """Take the session's options: most tokens of the conversation, and whether to store positions in any case."""
        self.capacity, self.track = capacity, self.track or track

    @property
    def remaining(self) -> int:
        """Tokens of the conversation that may still come."""
        return max(0, self.capacity - self.seen)

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
        buffer = self._buffer
        assert buffer is not None, "the layer holds no entries yet"
        entries = buffer.tensors[name]
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
        self._write(entries)
        if self.queries and not self.settled:
            self.recent_queries = last_entries(self.recent_queries, step.query, self.queries)
        if self.column_sums:
            self.scores.add_(
                column_sums(step.query, self.keys, scale=step.scale, seen=step.seen, window=step.window,
                            positions=self._where(), softcap=step.softcap, sinks=step.sinks)
            )

    def _write(self, entries: dict[str, Tensor]) -> None:
        """Add entries to the block; a full one is copied into a larger one."""
        buffer, count = self._buffer, next(iter(entries.values())).shape[2]
        assert buffer is not None
        if self.n + count > buffer.capacity or not buffer.clear(self):
            buffer = self._reallocate(max(buffer.capacity, self.n + count))
        buffer.write(self.n, entries)
        self.n += count

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
        self._free_block()
        count = next(iter(entries.values())).shape[2]
        self._block = Buffer(entries, max(count, capacity))
        self._block.write(0, entries)
        self._block.join(self)
        self.n = count

    def _free_block(self) -> None:
        """Hold no dense entry; what forks appended to a shared block may be overwritten."""
        if self._block is not None:
            self._block.leave(self)
        self._block = None

    def _refuse_overflow(self, count: int) -> None:
        assert self._buffer is not None
        if self.n + count > self._buffer.capacity:
            raise UserError(
                f"{count} more entries do not fit the fixed capacity of {self._buffer.capacity} with {self.n} held: "
                "open the session with a larger capacity before its steps are made static."
            )

    # Holding

    def _where(self) -> Tensor | None:
        """Positions, if the window has to be counted by them."""
        return self.positions if self._window is not None else None

    def _held(self) -> dict[str, Tensor]:
        assert self._buffer is not None
        return {name: x[:, :, : self.n] for name, x in self._buffer.tensors.items()}

    def _held_with_holes(self) -> dict[str, Tensor]:
        """Stored tensors before entries are dropped; a window then needs positions, which the order implied so far."""
        held = self._held()
        if self._window is not None and not self.track:
            key = held["key"]
            positions = torch.arange(self.seen - self.n, self.seen, dtype=torch.int32, device=key.device)
            held["position"] = positions.expand(*key.shape[:2], -1)
            self.track = True
        return held

    def crop(self, tokens: int) -> None:
        """Forget the last tokens, each an entry of the dense block."""
        self.n -= tokens
        self.seen -= tokens

    def spare_bytes(self) -> int:
        """Bytes of the dense block that hold no entry yet."""
        if self._buffer is None:
            return 0
        return unused_bytes(storage_bytes(self._buffer.tensors.values()), self.n, self._buffer.capacity)
