"""One layer whose heads hold unlike things: all entries, or the first and a ring of the last."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from functools import reduce

import torch
from torch import Tensor

from kvbench.budget import LayerShape, Shape
from kvbench.kernels.ragged_attention import Partial, dense_partial, merge_partials
from kvbench.step import Step
from kvbench.store import LayerKV
from kvbench.store.facts import Fact, add_facts

MEAN_BYTES = 4
"""Per element of the mean, in float32."""


@dataclass
class StreamingKV(LayerKV):
    """All entries, until `trim` is called: the first and the last entries from then on, the last ones in a ring.

    Rows that were dropped can live on as one, the mean of their keys and the mean of their values: attention gives it
    as much weight as that many entries of its key would get (RazorAttention's compensation token).
    """

    merged: int = field(default=0, init=False)
    """Entries in the mean, of every head."""
    _sinks: int = field(default=0, init=False)
    """First entries, which are not in the mean."""
    _oldest: int = field(default=0, init=False)
    """Place in the ring of its oldest entry."""

    def trim(self, sinks: int, rows: int, *, compensate: bool) -> None:
        """Keep the first `sinks` entries and the last, `rows` in all; the same numbers in every call."""
        excess = self.n - rows
        if excess <= 0:
            return
        if not self.bounded:  # the first time: entries stand in the order in which they came
            self.bounded, self._sinks = True, sinks
            if compensate:
                self._merge(self.keys[:, :, sinks : sinks + excess], self.values[:, :, sinks : sinks + excess])
            order = torch.arange(self.n, device=self.keys.device)
            kept = torch.cat([order[:sinks], order[sinks + excess :]])
            self.keep(kept.expand(*self.keys.shape[:2], -1))
            return
        assert self._buffer is not None
        ring, device = rows - sinks, self.keys.device
        moved = min(excess, ring)  # of more new entries than the ring has places, the first go as they came
        places = sinks + (self._oldest + torch.arange(excess - moved, excess, device=device)) % ring
        if compensate:
            gone = torch.cat([places, torch.arange(rows, self.n - moved, device=device)])
            self._merge(self.keys[:, :, gone], self.values[:, :, gone])
        for x in self._buffer.tensors.values():
            x[:, :, places] = x[:, :, self.n - moved : self.n].clone()  # a copy of the new entries only
        self._oldest = (self._oldest + excess) % ring
        self.dropped += excess * self.keys.shape[0] * self.keys.shape[1]
        self.n = rows

    def _merge(self, keys: Tensor, values: Tensor) -> None:
        """Add entries to the sums that the mean is made of, in float32: a mean in bfloat16 would not move any more."""
        for name, x in (("key_sum", keys), ("value_sum", values)):
            total = x.sum(2, keepdim=True, dtype=torch.float32)  # [B, H_kv, 1, D]
            if name in self.state:
                self.state[name] += total
            else:
                self.state[name] = total
        self.merged += keys.shape[2]

    def attend(self, step: Step) -> Tensor:
        """Attention output of the last T entries over every entry held, and over the mean of the others."""
        if not self.merged:
            return super().attend(step)
        held = dense_partial(
            step.query, self.keys, self.values, scale=step.scale, seen=step.seen, window=step.window,
            positions=self._where(), softcap=step.softcap,
        )
        return merge_partials([held, self._compensation(step)], step.sinks).to(step.query.dtype)

    def _compensation(self, step: Step) -> Partial:
        """Attention to the mean alone; its logit is higher by the log of how many entries in sight it stands for."""
        query = step.query.float().unflatten(1, (self.keys.shape[1], -1))  # [B, H_kv, G, T, D]
        key, value = (self.state[name][:, :, None] / self.merged for name in ("key_sum", "value_sum"))
        logits = (query * key).sum(-1) * step.scale
        if step.softcap is not None:
            logits = step.softcap * torch.tanh(logits / step.softcap)
        rows = torch.full((), self.merged, device=logits.device)
        if step.window is not None:  # the conversation may outgrow a window that the context did not
            gone = step.positions[:, None, None] + 1 - step.window - self._sinks  # [B, 1, 1, T]
            rows = (rows - gone.clamp_min(0)).clamp_min(0)
        lse = logits + rows.float().log()
        return Partial(value.expand(*logits.shape, -1).flatten(1, 2), lse.flatten(1, 2))

    def entries_kept(self) -> list[int]:
        """Entries held by each (batch, KV head), the mean among them."""
        return [x + bool(self.merged) for x in super().entries_kept()]

    def facts(self) -> dict[str, Fact]:
        """Entries that were dropped, and those of them that live on in a mean."""
        merged = {"entries_merged": Fact(self.merged * self.keys.shape[0] * self.keys.shape[1])} if self.merged else {}
        return super().facts() | merged


@dataclass
class HeadGroupsKV(LayerKV):
    """Two stores: one for the heads that keep every entry, and one for those that stream."""

    retrieval: tuple[int, ...] = ()
    """KV heads that keep every entry."""
    groups: list[tuple[Tensor, LayerKV]] = field(default_factory=list, init=False)
    """KV heads and their store; none is empty."""

    def bytes_for(
        self, layer: LayerShape, shape: Shape, entries: int, *, whole: int = 0, mean: bool = False
    ) -> int:
        """`whole` heads with every entry, the others with `entries` and, if they drop some, with their mean."""
        exact, streaming = replace(layer, kv_heads=whole), replace(layer, kv_heads=layer.kv_heads - whole)
        total = super().bytes_for(exact, shape, shape.rows(layer)) + super().bytes_for(streaming, shape, entries)
        if mean and entries < shape.rows(layer):
            total += streaming.kv_heads * (layer.key_dim + layer.value_dim) * MEAN_BYTES
        return total

    def _divide(self, kv_heads: int, device: torch.device) -> None:
        others = [x for x in range(kv_heads) if x not in self.retrieval]
        for heads, store in ((list(self.retrieval), LayerKV()), (others, StreamingKV())):
            store.capacity, store.track = self.capacity, self.track
            if heads:
                self.groups.append((torch.tensor(heads, device=device), store))

    def append(self, step: Step) -> None:
        """Add a forward's entries, each head's to its own store."""
        self.seen, self._window = step.seen, step.window
        if not self.groups:
            self._divide(step.key.shape[1], step.key.device)
        for heads, store in self.groups:
            store.append(step if len(self.groups) == 1 else replace(
                step, key=step.key[:, heads], value=step.value[:, heads]
            ))

    def attend(self, step: Step) -> Tensor:
        """Attention output of the last T entries, each head over what it holds. [B, H_q, T, D_v]"""
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

    def trim(self, sinks: int, rows: int, *, compensate: bool) -> None:
        """Trim the heads that stream; see `StreamingKV.trim`."""
        for store in self._stores():
            if isinstance(store, StreamingKV):
                store.trim(sinks, rows, compensate=compensate)

    def _stores(self) -> list[LayerKV]:
        return [store for _, store in self.groups]

    # What a store must do, by both

    def reserve(self, tokens: int, forward: int) -> None:
        """Make room for `tokens` more tokens, at most `forward` at a time."""
        for store in self._stores():
            store.reserve(tokens, forward)

    def keep_last(self, rows: int) -> None:
        """Keep the last entries of every head: what a sliding window leaves."""
        for store in self._stores():
            store.keep_last(rows)

    def settle(self) -> None:
        """No compression is to come."""
        super().settle()
        for store in self._stores():
            store.settle()

    def fork(self) -> HeadGroupsKV:
        """A copy that may go on by itself."""
        other = copy.copy(self)
        other.groups = [(heads, store.fork()) for heads, store in self.groups]
        return other

    def close(self) -> None:
        """Give the entries back."""
        for store in self._stores():
            store.close()
        self.groups = []

    def tensors(self) -> list[Tensor]:
        """Every tensor that the layer keeps alive."""
        return [x for store in self._stores() for x in store.tensors()]

    def spare_bytes(self) -> int:
        """Bytes that hold no entry yet."""
        return sum(store.spare_bytes() for store in self._stores())

    def entries_kept(self) -> list[int]:
        """Entries held by each (batch, KV head)."""
        order = torch.cat([heads for heads, _ in self.groups]).argsort().tolist() if self.groups else []
        split = [torch.tensor(store.entries_kept()).view(-1, len(heads)) for heads, store in self.groups]
        return torch.cat(split, dim=1)[:, order].flatten().tolist() if split else []

    def facts(self) -> dict[str, Fact]:
        """Effect of what happened to the entries of both."""
        return reduce(add_facts, (store.facts() for store in self._stores())) if self.groups else super().facts()
