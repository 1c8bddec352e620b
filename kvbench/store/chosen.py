"""Entries of which each query reads those that a method marks, and the index by which the method chooses them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.kernels.ragged_attention import Partial, merge_partials, ragged_partial
from kvbench.step import Step
from kvbench.store.blocks import AppendedBlock
from kvbench.store.facts import Fact
from kvbench.store.layer import LayerKV
from kvbench.store.selective import SelectiveKV


@dataclass
class ChosenKV(SelectiveKV):
    """Every entry in one block. Once the context is indexed, a query reads the index and the entries marked for it."""

    proof: ClassVar[str | None] = "entries_skipped"
    index: dict[str, Tensor] = field(default_factory=dict, init=False)
    """Made at the end of the context and never written again: forks share it."""

    codes: AppendedBlock | None = field(default=None, init=False)
    """The part of the index that grows with the entries. [B, H_kv, n, ...] by name"""

    def start(self, codes: dict[str, Tensor] | None = None, **index: Tensor) -> None:
        """The context is complete: from now on attention may read a part."""
        self.index, self.selective = index, True
        if codes is not None:
            self.codes = AppendedBlock(codes, max(self.n, self.capacity))

    def code(self, name: str) -> Tensor:
        """A part of the index that grows with the entries. [B, H_kv, n, ...]"""
        assert self.codes is not None
        return self.codes.held()[name]

    def reserve(self, tokens: int, forward: int) -> None:
        """Make room for more tokens, also in the index."""
        super().reserve(tokens, forward)
        if self.codes is not None:
            self.codes.reserve(tokens)

    def fork(self) -> LayerKV:
        """An independent copy with its own counters. The index is shared like entries."""
        other = super().fork()
        assert isinstance(other, ChosenKV)
        other.codes = None if self.codes is None else self.codes.fork()
        return other

    def attend_each(self, step: Step, read: Callable[[Step, int], Partial]) -> Tensor:
        """Attention of the new tokens, one after the other. [B, H_q, T, D_v]

        read: attention of one token, from its own step and the number of entries up to its own.
        """
        count = step.query.shape[2]
        parts = []
        for t in range(count):
            token = replace(
                step, query=step.query[:, :, t : t + 1], key=step.key[:, :, t : t + 1],
                value=step.value[:, :, t : t + 1], positions=step.positions[:, t : t + 1],
                ids=None if step.ids is None else step.ids[:, t : t + 1], seen=step.seen - count + t + 1,
            )
            self.reads.update({"queries": 1, "seen": token.seen})
            parts.append(read(token, self.n - count + t + 1))
        whole = Partial(torch.cat([x.output for x in parts], dim=2), torch.cat([x.lse for x in parts], dim=2))
        return merge_partials([whole], step.sinks).to(step.query.dtype)

    def scan(self, x: Tensor) -> Tensor:
        """Pass on a part of the index and count its bytes as read."""
        self.reads["bytes"] += x.numel() * x.itemsize
        return x

    def read(self, step: Step, mask: Tensor, bias: Tensor | None = None) -> Partial:
        """Attention of one token over the marked entries, which are gathered and nothing else.

        mask: [B, H, n] bool, over the first n entries. H is the number of KV heads, or of query heads that read for
        themselves. bias: [B, H, n] float32, added to the logits.
        """
        heads, kv_heads = mask.shape[1], self.keys.shape[1]
        batch, head, entry = mask.nonzero(as_tuple=True)
        places = batch, head // (heads // kv_heads), entry
        counts = mask.sum(-1).flatten()
        self._count(mask)
        return ragged_partial(
            step.query, self.keys[places], self.values[places], F.pad(counts.cumsum(0), (1, 0)).to(torch.int32),
            counts.tolist(), scale=step.scale, seen=step.seen, softcap=step.softcap,
            bias=None if bias is None else bias[mask],
        )

    def _count(self, mask: Tensor) -> None:
        """Count entries read by every head, those that differ per KV head, and those left alone."""
        read = int(mask.sum())
        distinct = int(mask.unflatten(1, (self.keys.shape[1], -1)).any(2).sum())
        self.reads.update({
            "entries_read": read, "entries_skipped": mask.numel() - read, "entries_distinct": distinct,
            "bytes": read * self.entry_bytes,
        })

    @property
    def entry_bytes(self) -> int:
        """Bytes of one key and one value."""
        return self.keys.shape[3] * self.keys.itemsize + self.values.shape[3] * self.values.itemsize

    def distinct_read_bytes(self) -> int:
        """As `read_bytes`, with an entry counted once that several heads of a group read."""
        if not self.selective:
            return super().distinct_read_bytes()
        again = self.reads["entries_read"] - self.reads["entries_distinct"]
        return (self.reads["bytes"] - again * self.entry_bytes) // max(1, self.reads["queries"])

    def close(self) -> None:
        """Free the entries and the index."""
        super().close()
        self.index = {}
        if self.codes is not None:
            self.codes.close()
            self.codes = None

    def tensors(self) -> list[Tensor]:
        """Every tensor that the layer keeps alive."""
        codes = [] if self.codes is None else self.codes.tensors()
        return [*super().tensors(), *self.index.values(), *codes]

    def spare_bytes(self) -> int:
        """Bytes that hold no entry and no part of the index yet."""
        return super().spare_bytes() + (0 if self.codes is None else self.codes.spare_bytes())

    def facts(self) -> dict[str, Fact]:
        """Counters of the reads, and layers that read everything."""
        return {**super().facts(), **({} if self.selective else {"layers_dense": Fact(1)})}
