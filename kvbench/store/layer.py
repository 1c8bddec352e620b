"""The base store: attention over the KV entries of one layer, their eviction, forks, and the count of bytes."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.budget import LayerShape, Shape
from kvbench.errors import UserError
from kvbench.kernels.dense_attention import dense_attention
from kvbench.kernels.ragged_attention import dense_partial, merge_partials, ragged_partial
from kvbench.step import Step
from kvbench.store.blocks import EntryBlock
from kvbench.store.dense import DenseKV
from kvbench.store.entries import FlatEntries, gather, gather_many, match_holes, scatter, storage_bytes
from kvbench.store.facts import Fact

POSITION_BYTES = SCORE_BYTES = OFFSET_BYTES = 4


@dataclass
class LayerKV(DenseKV):
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

    ragged: bool = False

    blocks: ClassVar[tuple[str, ...]] = ()
    """Fields with a block of entries in another form, or None: forked, freed and counted with the layer's entries."""

    dropped: int = field(default=0, init=False)
    """Entries evicted so far, over all heads: shown by the effect check."""
    frozen: FlatEntries | None = field(default=None, init=False)
    state: dict[str, Tensor] = field(default_factory=dict, init=False)
    """Tensors that a method keeps per layer; counted and forked with the entries, and left as they are by `keep`."""

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

    # Reading

    def resume(self) -> None:
        """An answer is about to begin: bring entries into the form that its steps read."""

    def attend(self, step: Step) -> Tensor:
        """Attention output of the last T entries over every entry held. [B, H_q, T, D_v]"""
        seen = step.seen if self.length is None else step.positions[0, -1] + 1  # a captured step has no host numbers
        options = {**step.options, "seen": seen}
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

    def observe(self, step: Step) -> None:
        """Score entries by a step whose attention is not computed; for stores that score them in `attend`."""

    def frozen_query(self, step: Step) -> Tensor:
        """The queries as they meet the frozen keys. [B, H_q, T, D]"""
        return step.query

    # Evicting

    def keep(self, indices: Tensor) -> None:
        """Keep these entries of every head and free the rest. indices: [B, H_kv, C], ascending."""
        self.refuse_frozen()
        kept = {name: gather_many(x, indices) for name, x in self._held_with_holes().items()}
        self._count_dropped(self.n - indices.shape[2], indices)
        self._replace(kept, indices.shape[2] + (self.slack if self.bounded else self.remaining))

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
        self._replace(empty, self.remaining)

    def keep_last(self, entries: int) -> None:
        """Keep the last entries of every head: what a sliding window leaves of any cache, so no eviction."""
        if self.frozen is None and self._buffer is not None and self.n > entries:
            held = {name: x[:, :, self.n - entries :] for name, x in self._held().items()}
            self._replace(held, entries + self.remaining)

    def drop(self, indices: Tensor) -> None:
        """Evict entries in place, filling their slots with the last entries: no copy of the rest.

        The order of entries is lost, so a store that drops keeps positions where order matters to its method.
        indices: [B, H_kv, m], distinct.
        """
        self.refuse_frozen()
        assert self.bounded, "only a bounded store drops entries in place: return LayerKV(bounded=True) from `layer`"
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

    def _count_dropped(self, entries: int, indices: Tensor) -> None:
        self.dropped += entries * indices.shape[0] * indices.shape[1]

    def refuse_frozen(self) -> None:
        """Refuse to compress what was frozen in unequal numbers (`UserError`), or only the tail would be."""
        if self.frozen is not None:
            raise UserError(
                "entries that heads keep in unequal numbers, or that stand for several, are frozen: they cannot be "
                "compressed a second time. Leave --recompress out."
            )

    # Forking

    def fork(self) -> LayerKV:
        """An independent copy: append-only entries are shared, entries that are written in place are copied."""
        other = copy.copy(self)
        other.state = {name: x.clone() for name, x in self.state.items()}
        if self._buffer is None:
            pass
        elif self.bounded or self.column_sums or self.entry_state or self.length is not None:
            other.length = None
            other._replace(self._held(), self._buffer.capacity)  # the same class
            if self.length is not None:
                other.make_static()
        else:
            self._buffer.join(other)
        for name, block in self._list_blocks():
            if getattr(other, name) is block:  # else the copy of the entries has made its own
                setattr(other, name, block.fork())
        return other

    def close(self) -> None:
        """Free the entries; those that a fork appended to a shared block may be overwritten."""
        self._free_block()
        self.frozen = self.recent_queries = None
        self.state = {}
        for name, block in self._list_blocks():
            block.close()
            setattr(self, name, None)

    def make_static(self) -> None:
        """From now on every step has the same shapes.

        The number of entries is a tensor on the device, and masks hide the entries beyond it. A bounded store that has
        reached its budget drops an entry for each one that it adds, so its steps are static.

        Raises:
            UserError: it has not reached it, or it counts positions in a window, which the host knows.
        """
        if self.bounded:
            if not self.dropped or self._window is not None:
                why = "has a sliding window" if self.dropped else "has dropped no entry yet, so it grows"
                raise UserError(f"a store that drops entries in place {why}: it has no static steps.")
            return
        assert self._buffer is not None
        if self._buffer.is_shared(self):
            self._reallocate(self._buffer.capacity)
        held = list(self._buffer.tensors.values())
        for x in held:
            x[:, :, self.n :].zero_()  # read from now on, with weight zero: NaN there would be NaN in the output
        self.length = torch.tensor(self.n, device=held[0].device)

    # Counting

    def tensors(self) -> list[Tensor]:
        """Every tensor that the layer keeps alive."""
        held = list(self._buffer.tensors.values()) if self._buffer is not None else []
        held += self.frozen.tensors() if self.frozen is not None else []
        held += [self.recent_queries] if self.recent_queries is not None else []
        held += [x for _, block in self._list_blocks() for x in block.tensors()]
        return held + list(self.state.values())

    def spare_bytes(self) -> int:
        """Bytes that hold no entry yet."""
        return super().spare_bytes() + sum(block.spare_bytes() for _, block in self._list_blocks())

    def _list_blocks(self) -> list[tuple[str, EntryBlock]]:
        return [(name, block) for name in self.blocks if (block := getattr(self, name)) is not None]

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
