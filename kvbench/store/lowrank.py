"""Keys as a low-rank product and values on the host, of which each token brings back the chunks that it selects."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvbench.budget import LayerShape, Shape
from kvbench.kernels.lowrank_keys import factor_keys, restore_keys
from kvbench.kernels.ragged_attention import Partial, dense_partial, merge_partials
from kvbench.step import Step
from kvbench.store.coded import attend_block
from kvbench.store.entries import gather, storage_bytes
from kvbench.store.facts import Fact
from kvbench.store.host import HostEntries, host_fact
from kvbench.store.layer import LayerKV
from kvbench.store.selective import SelectiveKV

if TYPE_CHECKING:
    from kvbench.hf import Rope

INDEX_BYTES = 4


@dataclass(frozen=True)
class Chunks:
    """The chunks of a context that are stored apart, J per KV head; never written again, shared by forks."""

    size: int
    landmarks: Tensor  # [B, H_kv, J, D]
    number: Tensor  # [B, H_kv, J] int32: which of the context's chunks
    factors: Tensor  # [B, n, r], of every entry of the context that is in a chunk
    basis: Tensor  # [B, H_kv, r, D]
    values: HostEntries  # [B, H_kv, J, size * D_v]

    def tensors(self) -> list[Tensor]:
        """Every tensor on the device."""
        return [self.landmarks, self.number, self.factors, self.basis]


@dataclass(frozen=True)
class FetchedChunks:
    """Chunks that were fetched, written in place: chunks that the next token selects again need not be fetched."""

    chunk: Tensor  # [B, H_kv, k] int32: which of the J is in it; J: none yet
    key: Tensor  # [B, H_kv, k, size * D], rotated
    value: Tensor  # [B, H_kv, k, size * D_v]

    def tensors(self) -> list[Tensor]:
        """Every tensor on the device."""
        return [self.chunk, self.key, self.value]


@dataclass(frozen=True)
class Factoring:
    """How the context of a layer is divided into chunks that stay exact and chunks that are stored apart."""

    size: int
    """Tokens of a chunk."""
    chunks: int
    """Chunks that are factored; the tokens after them stay exact."""
    outliers: int
    """Of these, the chunks per KV head that stay exact."""
    slots: int
    """Chunks that a token selects."""
    rank: int

    @property
    def apart(self) -> int:
        """Chunks per KV head that are stored apart."""
        return self.chunks - self.outliers

    def stored_bytes(self, layer: LayerShape, shape: Shape) -> int:
        """Bytes on the device: factors, basis, landmarks with their numbers, exact entries, and the slots."""
        entries = shape.length - self.apart * self.size + self.slots * self.size
        head = entries * (layer.key_dim + layer.value_dim) + layer.key_dim * (self.rank + self.apart)
        factors = self.chunks * self.size * self.rank
        numbers = layer.kv_heads * (self.apart + self.slots) * INDEX_BYTES
        return (layer.kv_heads * head + factors) * shape.itemsize + numbers

    def read_bytes(self, layer: LayerShape, shape: Shape) -> int:
        """Bytes that a step reads if no slot holds a chunk that it selects, those from the host included."""
        fetched = layer.kv_heads * self.slots * self.size * (self.rank + layer.value_dim)
        return self.stored_bytes(layer, shape) + (fetched - self.chunks * self.size * self.rank) * shape.itemsize

    def least_read_bytes(self, layer: LayerShape, shape: Shape) -> int:
        """Bytes that a step reads if slots hold all chunks that it selects: landmarks, slots and exact entries."""
        entries = shape.length - self.apart * self.size + self.slots * self.size
        head = entries * (layer.key_dim + layer.value_dim) + layer.key_dim * self.apart
        return layer.kv_heads * head * shape.itemsize

    def slot_bytes(self, layer: LayerShape, shape: Shape) -> int:
        """Bytes of the slots, which every fork copies."""
        chunk = self.size * (layer.key_dim + layer.value_dim) * shape.itemsize
        return layer.kv_heads * self.slots * (chunk + INDEX_BYTES)

    def host_bytes(self, layer: LayerShape, shape: Shape) -> int:
        """Bytes in host memory: the values of the chunks stored apart."""
        return self.apart * self.size * layer.kv_heads * layer.value_dim * shape.itemsize


@dataclass
class LowRankKV(SelectiveKV):
    """Exact entries until `factorize`; from then on the dense block holds the exact ones and all later entries."""

    _chunks: Chunks | None = field(default=None, init=False)
    _slots: FetchedChunks | None = field(default=None, init=False)

    def factorize(self, rope: Rope, landmarks: Tensor, exact: Tensor, plan: Factoring) -> None:
        """Store chunks of the context apart: keys as factors, values on the host, landmarks to choose by.

        landmarks: [B, H_kv, c, D], of the first c chunks of the context; later entries stay exact.
        exact: [B, H_kv, o], ascending: chunks that stay exact as well.
        """
        assert self.seen == self.n and self._window is None, "positions are the order of entries"
        batch, heads, count, _ = landmarks.shape
        size, slots = plan.size, plan.slots
        inside = count * size
        apart = torch.ones((batch, heads, count), dtype=torch.bool, device=exact.device).scatter_(2, exact, False)
        number = apart.int().argsort(dim=-1, descending=True, stable=True)[..., : count - exact.shape[2]]
        plain = rope.rotate_from(self.keys[:, :, :inside], 0, inverse=True)
        factors, basis = factor_keys(plain, plan.rank)
        values = self.values[:, :, :inside].unflatten(2, (count, size)).flatten(3)
        self._chunks = Chunks(
            size, gather(landmarks, number).to(self.keys.dtype), number.to(torch.int32), factors, basis,
            HostEntries(gather(values, number)),
        )
        self._slots = FetchedChunks(
            number.new_full((batch, heads, slots), number.shape[2], dtype=torch.int32),
            self.keys.new_zeros((batch, heads, slots, size * self.keys.shape[3])),
            self.values.new_zeros((batch, heads, slots, size * self.values.shape[3])),
        )
        stay = (exact[..., None] * size + torch.arange(size, device=exact.device)).flatten(2)
        after = torch.arange(inside, self.n, device=exact.device).expand(batch, heads, -1)
        index = torch.cat([stay, after], dim=-1)
        kept = {name: gather(x, index) for name, x in self._held().items()}
        self._replace(kept, index.shape[2] + self.remaining)
        self.selective = True

    @property
    def landmarks(self) -> Tensor:
        """Landmarks: the keys by which chunks are chosen. [B, H_kv, J, D]"""
        assert self._chunks is not None
        return self._chunks.landmarks

    def attend_chunks(self, step: Step, chosen: Tensor) -> Tensor:
        """Attention over the dense block and, for each new token, the chunks chosen for it. [B, H_q, T, D_v]

        chosen: [B, H_kv, T, k], of the J chunks stored apart.
        """
        parts = [self._attend_slots(step, t, chosen[:, :, t]) for t in range(chosen.shape[2])]
        apart = Partial(torch.cat([x.output for x in parts], dim=2), torch.cat([x.lse for x in parts], dim=2))
        dense = dense_partial(step.query, self.keys, self.values, **step.options)
        return merge_partials([apart, dense], step.sinks).to(step.query.dtype)

    def _attend_slots(self, step: Step, t: int, chosen: Tensor) -> Partial:
        assert self._slots is not None
        self._bring_back(step.rope, chosen, step.query.shape[2] - 1 - t)
        keys, values = (
            x.view(*x.shape[:2], -1, held.shape[3])
            for x, held in ((self._slots.key, self.keys), (self._slots.value, self.values))
        )
        return attend_block(step.query[:, :, t : t + 1], keys, values, 0, step.options)

    def _bring_back(self, rope: Rope, chosen: Tensor, later: int) -> None:
        """Make the slots hold these chunks; those that they hold already stay where they are.

        chosen: [B, H_kv, k]. later: tokens of the same pass after the one that chose them.
        """
        assert self._chunks is not None and self._slots is not None
        chunks, slots = self._chunks, self._slots
        batch, heads, count = chosen.shape
        order = torch.arange(count, device=chosen.device)
        where = chosen.new_full((batch, heads, chunks.number.shape[2] + 1), count)
        where.scatter_(2, slots.chunk.long(), order.expand_as(chosen))
        found = where.gather(2, chosen)  # the slot of each chunk; `count`: in none
        missing = found == count
        misses = missing.sum(-1, keepdim=True)  # [B, H_kv, 1]
        most, missed = torch.stack([misses.max(), misses.sum()]).tolist()  # the host waits once for both
        self._count(chosen.numel() - missed, chosen.numel(), most, later)
        if not most:
            return
        taken = torch.zeros_like(where[..., :1], dtype=torch.bool).repeat(1, 1, count + 1).scatter_(2, found, True)
        free = taken[..., :count].int().argsort(dim=-1, stable=True)[..., :most]  # as many as the head's misses
        wanted = missing.int().argsort(dim=-1, descending=True, stable=True)[..., :most]
        # A head with fewer misses than another fetches some of its chunks again.
        new = chosen.gather(2, wanted).where(order[:most] < misses, slots.chunk.gather(2, free).long())
        entries = chunks.number.gather(2, new).long()[..., None] * chunks.size
        entries = (entries + torch.arange(chunks.size, device=entries.device)).flatten(2)  # [B, H_kv, most * size]
        places = (free[..., None] * chunks.size + torch.arange(chunks.size, device=entries.device)).flatten(2)
        block = slots.key.view(batch, heads, count * chunks.size, -1)
        restore_keys(block, places, chunks.factors, chunks.basis, entries, rope)
        at = (torch.arange(batch * heads, device=free.device).view(batch, heads, 1) * count + free).flatten()
        slots.value.flatten(0, 2).index_copy_(0, at, chunks.values.fetch(new).flatten(0, 2))
        slots.chunk.scatter_(2, free, new.to(torch.int32))

    def _count(self, hits: int, chosen: int, most: int, later: int) -> None:
        """Count a token's selection, and the bytes that it reads on the device and brings from the host."""
        assert self._chunks is not None and self._slots is not None
        chunks, slots = self._chunks, self._slots
        batch, heads = chunks.landmarks.shape[:2]
        dense = (self.keys[0, 0, later:].numel() + self.values[0, 0, later:].numel()) * self.keys.itemsize
        row = chunks.factors.shape[2] * chunks.factors.itemsize
        value = chunks.values.entries.shape[3] * chunks.values.entries.itemsize
        brought = storage_bytes([chunks.basis]) + batch * heads * most * (chunks.size * row + value) if most else 0
        self.reads.update({
            "queries": 1, "seen": self.seen - later, "chunks_selected": chosen, "chunks_reused": hits,
            "host_bytes": batch * heads * most * value,
            "bytes": storage_bytes([chunks.landmarks, slots.key, slots.value]) + batch * heads * dense + brought,
        })

    def fork(self) -> LayerKV:
        """An independent copy: entries stored apart are shared, slots are not."""
        other = super().fork()
        assert isinstance(other, LowRankKV)
        if self._slots is not None:
            other._slots = FetchedChunks(*(x.clone() for x in self._slots.tensors()))  # noqa: SLF001  # the same class
        return other

    def close(self) -> None:
        """Free the entries."""
        super().close()
        self._chunks = self._slots = None

    def tensors(self) -> list[Tensor]:
        """Every tensor that the layer keeps alive on the device."""
        return super().tensors() + [y for x in (self._chunks, self._slots) if x is not None for y in x.tensors()]

    def host_tensors(self) -> list[Tensor]:
        """The values of the chunks stored apart."""
        return [] if self._chunks is None else [self._chunks.values.entries]

    def entries_kept(self) -> list[int]:
        """Entries held by each (batch, KV head), in whatever form."""
        return [count + self._entries_apart() for count in super().entries_kept()]

    def _entries_apart(self) -> int:
        return 0 if self._chunks is None else self._chunks.number.shape[2] * self._chunks.size

    def facts(self) -> dict[str, Fact]:
        """Entries stored apart, on what kind of host, and layers that stayed exact."""
        if self._chunks is None:
            return {**super().facts(), "layers_dense": Fact(1)}
        entries = self._entries_apart() * len(super().entries_kept())
        host = host_fact(entries, self.keys.device)
        return {**super().facts(), "entries_factored": Fact(entries, changed=True), **host}
