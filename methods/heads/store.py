"""Store of a layer in which some heads keep all entries and the others the first and a ring of the last."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from functools import reduce

import torch
from torch import Tensor

from kvbench.budget import LayerShape, Shape
from kvbench.errors import UserError
from kvbench.kernels.ragged_attention import Partial, dense_partial, merge_partials
from kvbench.step import Step
from kvbench.store import LayerKV
from kvbench.store.facts import Fact, add_facts

MEAN_BYTES = 4
"""Bytes per element of the mean, in float32."""


@dataclass
class StreamingKV(LayerKV):
    """Keeps all entries until `trim` is called, then the first and the last entries, the last ones in a ring.

    Dropped entries can be replaced by one entry, the mean of their keys and values, whose weight in attention is
    multiplied by their number (RazorAttention's compensation token).
    """

    merged: int = field(default=0, init=False)
    """Entries in the mean, per head."""
    _sinks: int = field(default=0, init=False)
    """First entries, which are not in the mean."""
    _oldest: int = field(default=0, init=False)
    """Index in the ring of its oldest entry."""
    counts: Tensor | None = field(default=None, init=False)
    """`_oldest` and `merged` on the device, where steps have static shapes. [2] int64"""

    def trim(self, sinks: int, entries: int, *, compensate: bool) -> None:
        """Keep `entries` entries, the first `sinks` and the last ones; call it with the same numbers each time."""
        excess = self.n - entries
        if excess <= 0:
            return
        if not self.bounded:  # first call: entries are still in the order of tokens
            self.bounded, self._sinks = True, sinks
            if compensate:
                self._merge(self.keys[:, :, sinks : sinks + excess], self.values[:, :, sinks : sinks + excess])
            order = torch.arange(self.n, device=self.keys.device)
            kept = torch.cat([order[:sinks], order[sinks + excess :]])
            self.keep(kept.expand(*self.keys.shape[:2], -1))
            return
        assert self._buffer is not None
        ring, device = entries - sinks, self.keys.device
        moved = min(excess, ring)  # if more entries are new than fit the ring, the first of them are dropped
        oldest = self._oldest if self.counts is None else self.counts[0]
        places = sinks + (oldest + torch.arange(excess - moved, excess, device=device)) % ring
        if compensate:
            gone = torch.cat([places, torch.arange(entries, self.n - moved, device=device)])
            self._merge(self.keys[:, :, gone], self.values[:, :, gone])
        for x in self._buffer.tensors.values():
            x[:, :, places] = x[:, :, self.n - moved : self.n].clone()  # a copy of the new entries only
        self._oldest = (self._oldest + excess) % ring
        if self.counts is not None:
            self.counts[0].add_(excess).remainder_(ring)
        self.dropped += excess * self.keys.shape[0] * self.keys.shape[1]
        self.n = entries

    def _merge(self, keys: Tensor, values: Tensor) -> None:
        """Add entries to the float32 sums of the mean; in bfloat16 small additions would be rounded away."""
        for name, x in (("key_sum", keys), ("value_sum", values)):
            total = x.sum(2, keepdim=True, dtype=torch.float32)  # [B, H_kv, 1, D]
            if name in self.state:
                self.state[name] += total
            else:
                self.state[name] = total
        self.merged += keys.shape[2]
        if self.counts is not None:
            self.counts[1].add_(keys.shape[2])

    def attend(self, step: Step) -> Tensor:
        """Attention output of the last T tokens over the stored entries and the mean. [B, H_q, T, D_v]"""
        if not self.merged:
            return super().attend(step)
        stored = dense_partial(step.query, self.keys, self.values, positions=self._where(), **step.options)
        return merge_partials([stored, self._compensation(step)], step.sinks).to(step.query.dtype)

    def _compensation(self, step: Step) -> Partial:
        """Attention to the mean alone; its logit is raised by the log of its number of visible entries."""
        query = step.query.float().unflatten(1, (self.keys.shape[1], -1))  # [B, H_kv, G, T, D]
        count = torch.full((), self.merged, device=query.device) if self.counts is None else self.counts[1]
        key, value = (self.state[name][:, :, None] / count for name in ("key_sum", "value_sum"))
        logits = step.cap((query * key).sum(-1) * step.scale)
        if step.window is not None:  # the conversation may be longer than the window even if the context is not
            gone = step.positions[:, None, None] + 1 - step.window - self._sinks  # [B, 1, 1, T]
            count = (count - gone.clamp_min(0)).clamp_min(0)
        lse = logits + count.float().log()
        return Partial(value.expand(*logits.shape, -1).flatten(1, 2), lse.flatten(1, 2))

    def make_static(self) -> None:
        """Count on the device what the host counts; see `LayerKV.make_static`."""
        if not self.bounded:
            raise UserError("a streaming head has dropped no entry yet, so it grows: it has no static steps.")
        super().make_static()
        self.counts = torch.tensor([self._oldest, self.merged], device=self.keys.device)

    def fork(self) -> LayerKV:
        """An independent copy; see `LayerKV.fork`."""
        other = super().fork()
        assert isinstance(other, StreamingKV)
        other.counts = None if self.counts is None else self.counts.clone()
        return other

    def entries_kept(self) -> list[int]:
        """Entries stored per (batch, KV head), including the mean."""
        return [x + bool(self.merged) for x in super().entries_kept()]

    def facts(self) -> dict[str, Fact]:
        """Facts of the effect check: dropped entries, and those of them in the mean."""
        merged = {"entries_merged": Fact(self.merged * self.keys.shape[0] * self.keys.shape[1])} if self.merged else {}
        return super().facts() | merged


@dataclass
class HeadGroupsKV(LayerKV):
    """Two stores: one for the heads that keep every entry, and one for streaming heads."""

    retrieval: tuple[int, ...] = ()
    """KV heads that keep every entry."""
    groups: list[tuple[Tensor, LayerKV]] = field(default_factory=list, init=False)
    """The KV heads of each store, and the store; only stores with heads."""

    def bytes_for(
        self, layer: LayerShape, shape: Shape, entries: int, *, whole: int = 0, mean: bool = False
    ) -> int:
        """Bytes of `whole` heads with every entry, and of the others with `entries` and, if `mean`, a mean."""
        exact, streaming = replace(layer, kv_heads=whole), replace(layer, kv_heads=layer.kv_heads - whole)
        total = super().bytes_for(exact, shape, shape.entries(layer)) + super().bytes_for(streaming, shape, entries)
        if mean and entries < shape.entries(layer):
            total += streaming.kv_heads * (layer.key_dim + layer.value_dim) * MEAN_BYTES
        return total

    def make_whole(self) -> LayerKV:
        """The store of the heads that keep every entry."""
        return LayerKV()

    def _divide(self, kv_heads: int, device: torch.device) -> None:
        others = [x for x in range(kv_heads) if x not in self.retrieval]
        for heads, store in ((list(self.retrieval), self.make_whole()), (others, StreamingKV())):
            store.capacity, store.track = self.capacity, self.track
            if heads:
                self.groups.append((torch.tensor(heads, device=device), store))

    def append(self, step: Step) -> None:
        """Append the entries of a forward pass to the stores of their heads."""
        self.seen, self._window = step.seen, step.window
        if not self.groups:
            self._divide(step.key.shape[1], step.key.device)
        for heads, store in self.groups:
            store.append(step if len(self.groups) == 1 else replace(
                step, key=step.key[:, heads], value=step.value[:, heads]
            ))

    def attend(self, step: Step) -> Tensor:
        """Attention output of the last T tokens, each head over its stored entries. [B, H_q, T, D_v]"""
        if len(self.groups) == 1:
            return self.groups[0][1].attend(step)
        kv_heads = step.key.shape[1]
        query = step.query.unflatten(1, (kv_heads, -1))  # [B, H_kv, G, T, D]
        output: Tensor = query.new_empty((*query.shape[:-1], step.value.shape[-1]))
        for heads, store in self.groups:
            sinks = None if step.sinks is None else step.sinks.view(kv_heads, -1)[heads].flatten()
            part = store.attend(replace(step, query=query[:, heads].flatten(1, 2), sinks=sinks))
            output[:, heads] = part.unflatten(1, (len(heads), -1))
        return output.flatten(1, 2)

    def trim(self, sinks: int, entries: int, *, compensate: bool) -> None:
        """Trim the streaming heads; see `StreamingKV.trim`."""
        for store in self._stores():
            if isinstance(store, StreamingKV):
                store.trim(sinks, entries, compensate=compensate)

    def _stores(self) -> list[LayerKV]:
        return [store for _, store in self.groups]

    # The interface of a store, for both

    def reserve(self, tokens: int, forward: int) -> None:
        """Allocate for `tokens` more tokens, at most `forward` in one pass."""
        for store in self._stores():
            store.reserve(tokens, forward)

    def keep_last(self, entries: int) -> None:
        """Keep the last entries of every head, for a sliding window."""
        for store in self._stores():
            store.keep_last(entries)

    def settle(self) -> None:
        """Note that no compression follows."""
        super().settle()
        for store in self._stores():
            store.settle()

    def fork(self) -> HeadGroupsKV:
        """Copy the store; changes to the copy do not affect the original."""
        other = copy.copy(self)
        other.groups = [(heads, store.fork()) for heads, store in self.groups]
        return other

    def make_static(self) -> None:
        """Give the steps of both stores static shapes (`UserError` where one cannot)."""
        for store in self._stores():
            store.make_static()

    def close(self) -> None:
        """Free the entries."""
        for store in self._stores():
            store.close()
        self.groups = []

    def tensors(self) -> list[Tensor]:
        """Every tensor of the layer."""
        return [x for store in self._stores() for x in store.tensors()]

    def spare_bytes(self) -> int:
        """Allocated bytes that contain no entry yet."""
        return sum(store.spare_bytes() for store in self._stores())

    def entries_kept(self) -> list[int]:
        """Entries stored per (batch, KV head)."""
        order = torch.cat([heads for heads, _ in self.groups]).argsort().tolist() if self.groups else []
        split = [torch.tensor(store.entries_kept()).view(-1, len(heads)) for heads, store in self.groups]
        return torch.cat(split, dim=1)[:, order].flatten().tolist() if split else []

    def facts(self) -> dict[str, Fact]:
        """Facts of the effect check, over both stores."""
        return reduce(add_facts, (store.facts() for store in self._stores())) if self.groups else super().facts()
