"""Entries of which each query reads those that a method marks, and the index by which the method chooses them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.kernels.ragged_attention import Partial, merge_partials, ragged_partial
from kvbench.step import Step
from kvbench.store.blocks import AppendedBlock
from kvbench.store.facts import Fact
from kvbench.store.file import FileEntries
from kvbench.store.host import HostEntries, host_fact
from kvbench.store.selective import SelectiveKV

Tier = Literal["device", "host", "file"]
Weigh = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""From the keys that were read, [R, D], and the batch, head and entry of each to what is added to its logit. [R]"""


@dataclass
class ChosenKV(SelectiveKV):
    """Every entry in one block. Once the context is indexed, a query reads the index and the entries marked for it."""

    blocks: ClassVar[tuple[str, ...]] = ("codes",)
    proof: ClassVar[str | None] = "entries_skipped"
    index: dict[str, Tensor] = field(default_factory=dict, init=False)
    """Made at the end of the context and never written again: forks share it."""

    indexed: int = field(default=0, init=False)
    """Entries per KV head when the index was made."""
    tier: HostEntries | FileEntries | None = field(default=None, init=False)
    """The context's entries, where they are not on the device; the block then holds later ones only."""
    apart: int = field(default=0, init=False)
    """Entries per KV head in the tier."""
    codes: AppendedBlock | None = field(default=None, init=False)
    """The part of the index that grows with the entries. [B, H_kv, n, ...] by name"""

    def start(self, index: dict[str, Tensor], codes: dict[str, Tensor] | None = None) -> None:
        """The context is complete: from now on attention may read a part. codes: a part that grows with the entries."""
        self.index, self.indexed, self.selective = index, self.n, True
        if codes is not None:
            self.codes = AppendedBlock(codes, max(self.n, self.capacity))

    def move(self, tier: Tier) -> None:
        """Move every entry to another tier; later ones stay on the device."""
        if tier == "device":
            return
        entries = torch.cat([self.keys, self.values], dim=3)
        self.tier, self.apart = (HostEntries if tier == "host" else FileEntries)(entries), self.n
        self._replace({name: x[:, :, :0] for name, x in self._held().items()}, self.remaining)

    @property
    def total(self) -> int:
        """Entries per KV head in all tiers."""
        return self.n + self.apart

    def code(self, name: str) -> Tensor:
        """A part of the index that grows with the entries. [B, H_kv, n, ...]"""
        assert self.codes is not None
        return self.codes.held()[name]

    def reserve(self, tokens: int, forward: int) -> None:
        """Make room for more tokens, also in the index."""
        super().reserve(tokens, forward)
        if self.codes is not None:
            self.codes.reserve(tokens)

    def attend_each(self, step: Step, read: Callable[[Step, int], Partial]) -> Tensor:
        """Attention of the new tokens, one after the other. [B, H_q, T, D_v]

        read: attention of one token, from its own step and the number of entries up to its own.
        """
        before, parts = self.total - step.query.shape[2], []
        for t, token in enumerate(step.tokens()):
            self.reads.update({"queries": 1, "seen": token.seen})
            parts.append(read(token, before + t + 1))
        whole = Partial(torch.cat([x.output for x in parts], dim=2), torch.cat([x.lse for x in parts], dim=2))
        return merge_partials([whole], step.sinks).to(step.query.dtype)

    def scan(self, x: Tensor) -> Tensor:
        """Pass on a part of the index and count its bytes as read."""
        self.reads["bytes"] += x.numel() * x.itemsize
        return x

    def read(self, step: Step, mask: Tensor, weigh: Weigh | None = None) -> Partial:
        """Attention of one token over the marked entries, which are gathered and nothing else.

        mask: [B, H, n] bool, over the first n entries. H is the number of KV heads, or of query heads that read for
        themselves. weigh: a function of the keys that are read; its result is added to their logits.
        """
        heads, kv_heads = mask.shape[1], self.keys.shape[1]
        batch, head, entry = mask.nonzero(as_tuple=True)
        keys, values = self._gather(batch, head // (heads // kv_heads), entry)
        counts = mask.sum(-1).flatten()
        every = self._count(mask, counts)
        return ragged_partial(
            step.query, keys, values, F.pad(counts.cumsum(0), (1, 0)).to(torch.int32), every, scale=step.scale,
            seen=step.seen, softcap=step.softcap,
            bias=None if weigh is None else weigh(keys, batch, head, entry),
        )

    def _gather(self, batch: Tensor, head: Tensor, entry: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of these entries, from their tier. [R, D], [R, D_v]"""
        if self.tier is None:  # one place in the whole block is faster than three indices
            block, heads = self._buffer, self.keys.shape[1]
            assert block is not None
            places = (batch * heads + head) * block.capacity + entry
            keys, values = (block.tensors[x].flatten(0, 2).index_select(0, places) for x in ("key", "value"))
            return keys, values
        # By integers: an index by a mask makes the host wait for the device.
        apart, near = (x.nonzero()[:, 0] for x in (entry < self.apart, entry >= self.apart))
        later = batch[near], head[near], entry[near] - self.apart
        places = (batch * self.keys.shape[1] + head) * self.apart + entry
        widths = self.keys.shape[3], self.values.shape[3]
        found = self.keys.new_empty((len(entry), sum(widths)))
        found[apart] = self.tier.take(places[apart])
        found[near] = torch.cat([self.keys[later], self.values[later]], dim=1)
        counter = "file_bytes" if isinstance(self.tier, FileEntries) else "host_bytes"
        self.reads[counter] += len(apart) * self.entry_bytes
        keys, values = found.split(widths, dim=1)
        return keys, values

    def _count(self, mask: Tensor, counts: Tensor) -> list[int]:
        """Count entries read by every head, those that differ per KV head, and those left alone.

        counts: [B * H], entries read by every head. Returned as numbers: all numbers come to the host at once.
        """
        shared = mask.unflatten(1, (self.keys.shape[1], -1)).any(2).sum()
        *every, distinct = torch.cat([counts, shared[None]]).tolist()
        read = sum(every)
        self.reads.update({
            "entries_read": read, "entries_skipped": mask.numel() - read, "entries_distinct": distinct,
            "bytes": read * self.entry_bytes,
        })
        return every

    def distinct_read_bytes(self) -> int:
        """As `read_bytes`, with an entry counted once that several heads of a group read."""
        if not self.selective:
            return super().distinct_read_bytes()
        again = self.reads["entries_read"] - self.reads["entries_distinct"]
        return (self.reads["bytes"] - again * self.entry_bytes) // max(1, self.reads["queries"])

    def close(self) -> None:
        """Free the entries and the index."""
        super().close()
        self.index, self.tier = {}, None

    def tensors(self) -> list[Tensor]:
        """Every tensor that the layer keeps alive."""
        return [*super().tensors(), *self.index.values()]

    def host_tensors(self) -> list[Tensor]:
        """The entries of the context, if they are on the host."""
        return [self.tier.entries] if isinstance(self.tier, HostEntries) else []

    def file_bytes(self) -> int:
        """Bytes of the entries of the context, if they are in a file."""
        return self.tier.nbytes if isinstance(self.tier, FileEntries) else 0

    def entries_kept(self) -> list[int]:
        """Stored entries of each (batch, KV head), in all tiers."""
        return [x + self.apart for x in super().entries_kept()]

    def facts(self) -> dict[str, Fact]:
        """Counters of the reads, entries on the host, and layers that read everything."""
        found = super().facts()
        if isinstance(self.tier, HostEntries):
            found.update(host_fact(self.apart * len(super().entries_kept()), self.keys.device))
        return {**found, **({} if self.selective else {"layers_dense": Fact(1)})}
