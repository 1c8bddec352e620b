"""Entries in two precisions: important ones in slots that are overwritten, the others as append-only codes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvbench.budget import LayerShape, Shape
from kvbench.kernels.attention_mass import attention_mass, joint_lse
from kvbench.kernels.pack import Codes, dequantize
from kvbench.kernels.packed_attention import packed_partial
from kvbench.kernels.ragged_attention import Partial, dense_partial, merge_partials
from kvbench.step import Step
from kvbench.store.blocks import AppendedBlock
from kvbench.store.coders import GroupCoder
from kvbench.store.entries import gather
from kvbench.store.facts import Fact
from kvbench.store.layer import POSITION_BYTES, SCORE_BYTES, LayerKV

BALANCER_BYTES = 4
EXACT = 16
"""Bits that stand for the model's own type."""
MASS_BLOCK = 1024
"""Entries of codes that are brought back at a time to score them."""


@dataclass(frozen=True)
class Coding:
    """How entries become codes: bits, and channels of an entry that share a scale and a minimum."""

    bits: int
    channels: int | None
    """None: half of the entry."""

    def group(self, width: int) -> int:
        """Channels of a group in entries of `width`."""
        return max(1, width // 2) if self.channels is None else self.channels

    def coder(self, width: int) -> GroupCoder:
        """The coder of keys or values of this width."""
        return GroupCoder(self.bits, self.group(width))

    def encode(self, key: Tensor, value: Tensor) -> dict[str, Tensor]:
        """Codes, scales and minima of entries, by name. key: [B, H_kv, n, D]; value: [B, H_kv, n, D_v]"""
        return {
            f"{name}_{part}": found for name, x in (("key", key), ("value", value))
            for part, found in self.coder(x.shape[-1]).encode(x).items()
        }

    def entry_bytes(self, layer: LayerShape) -> int:
        """Bytes of the codes, scales and minima of one entry."""
        return sum(self.coder(width).entry_bytes(width) for width in (layer.key_dim, layer.value_dim))

    def view(self, entries: dict[str, Tensor], widths: tuple[int, int]) -> tuple[Codes, Codes]:
        """Keys and values of these widths, as they were encoded."""
        key, value = (
            Codes(entries[f"{name}_packed"], entries[f"{name}_scale"], entries[f"{name}_minimum"], self.bits, width)
            for name, width in zip(("key", "value"), widths, strict=True)
        )
        return key, value


@dataclass
class TieredKV(LayerKV):
    """One softmax over two tiers: the dense block, in the high precision, and codes of what was demoted from it.

    Until `split`, the context is stored in full precision with the attention that each entry received. After it, codes
    store keys times a balancer per KV head and channel, and queries are divided by it.
    """

    column_sums: bool = True
    track: bool = True
    bounded: bool = True
    high: Coding | None = None
    """None: the high tier is exact."""
    low: Coding | None = None
    share: float = 1.0
    """Of the entries to come, how many the high tier grows by."""

    blocks: ClassVar[tuple[str, ...]] = ("demoted",)
    demoted: AppendedBlock | None = field(default=None, init=False)
    _widths: tuple[int, int] = field(default=(0, 0), init=False)

    def bytes_for(self, layer: LayerShape, shape: Shape, entries: int, *, high: int = 0) -> int:
        """Both tiers, `high` entries in the high one with scores and positions; balancers; positions for a window."""
        assert self.low is not None
        exact = (layer.key_dim + layer.value_dim) * shape.itemsize
        high_bytes = (exact if self.high is None else self.high.entry_bytes(layer)) + SCORE_BYTES + POSITION_BYTES
        low_bytes = self.low.entry_bytes(layer) + (0 if layer.window is None else POSITION_BYTES)
        head = high * high_bytes + (entries - high) * low_bytes + layer.key_dim * BALANCER_BYTES
        return layer.kv_heads * head

    def split(self, indices: Tensor, balancer: Tensor, entries: int) -> None:
        """End the context: these entries of every head are the high tier, all others become codes.

        indices: [B, H_kv, C]. balancer: [B, H_kv, 1, D]. entries: most entries of the high tier in this conversation.
        """
        held = self._held()
        rest = torch.ones(held["score"].shape, dtype=torch.bool, device=indices.device).scatter(2, indices, False)
        count = self.n - indices.shape[2]
        others = rest.int().argsort(dim=-1, descending=True, stable=True)[..., :count]
        self.state["balancer"] = balancer
        self._widths = held["key"].shape[3], held["value"].shape[3]
        later = self.remaining - max(0, entries - indices.shape[2])
        self.demoted = AppendedBlock(self._coded({name: gather(x, others) for name, x in held.items()}), count + later)
        kept = {name: gather(x, indices) for name, x in held.items()}
        if self.high is not None:
            kept = {**self._encode(self.high, kept), "score": kept["score"], "position": kept["position"]}
        self.column_sums = False  # from now on both tiers share a softmax: `attend` scores
        self._replace(kept, entries + 1)

    def demote(self, indices: Tensor) -> None:
        """Move entries from the high tier to the low one, for good. indices: [B, H_kv, m], distinct."""
        assert self.demoted is not None
        entries = {name: gather(x, indices) for name, x in self._held().items()}
        if self.high is not None:
            key, value = (dequantize(x) for x in self.high.view(entries, self._widths))
            entries = {"key": key / self.state["balancer"], "value": value, "position": entries["position"]}
        self.demoted.append(self._coded(entries))
        self.drop(indices)

    def _coded(self, entries: dict[str, Tensor]) -> dict[str, Tensor]:
        """Entries as the low tier holds them; positions only where a window has to count tokens."""
        position = {"position": entries["position"]} if self._window is not None else {}
        assert self.low is not None
        return {**self._encode(self.low, entries), **position}

    def _encode(self, coding: Coding, entries: dict[str, Tensor]) -> dict[str, Tensor]:
        return coding.encode(entries["key"] * self.state["balancer"], entries["value"])

    def _entries(self, step: Step) -> dict[str, Tensor]:
        entries = super()._entries(step)
        if self.demoted is None:
            return entries
        entries["score"] = torch.zeros(step.key.shape[:3], dtype=torch.float32, device=step.key.device)
        if self.high is not None:
            entries = {**self._encode(self.high, entries), "score": entries["score"], "position": entries["position"]}
        return entries

    def _count_dropped(self, entries: int, indices: Tensor) -> None:
        """Nothing is evicted: what leaves the dense block is demoted."""

    # Reading

    def attend(self, step: Step) -> Tensor:
        """Attention over both tiers; those of the high one accumulate the mass that they receive. [B, H_q, T, D_v]"""
        if self.demoted is None:
            return super().attend(step)
        return merge_partials(self._attend_and_score(step), step.sinks).to(step.query.dtype)

    def observe(self, step: Step) -> None:
        """Score the high tier by a step whose attention is not computed."""
        if self.demoted is not None:
            self._attend_and_score(step)

    def _attend_and_score(self, step: Step) -> list[Partial]:
        """Attention over each tier; the mass that entries of the high one receive is added to their scores."""
        assert self.demoted is not None
        options = step.options
        group = step.query.shape[1] // step.key.shape[1]
        # Not rounded to the model's type: that would shift the low tier against the exact one, by whole logits where
        # a channel has a large mean.
        balanced = step.query.float() / self.state["balancer"].repeat_interleave(group, dim=1)
        parts = []
        if self.demoted.n:
            assert self.low is not None
            entries = self.demoted.held()
            codes = self.low.view(entries, self._widths)
            parts.append(packed_partial(balanced, *codes, positions=entries.get("position"), **options))
        parts += self._high_parts(step, balanced, options)
        self._score(step, balanced, joint_lse(parts, step.sinks))
        return parts

    def _high_parts(self, step: Step, balanced: Tensor, options: dict[str, Any]) -> list[Partial]:
        """Attention over the high tier, whose last T entries are the queries' own."""
        positions = self._where()
        if self.high is None:
            return [dense_partial(step.query, self.keys, self.values, positions=positions, **options)]
        key, value = self.high.view(self._held(), self._widths)
        before = self.n - step.query.shape[2]
        new = slice(before, None)
        parts = [dense_partial(
            balanced, dequantize(key.slice(before, self.n)), dequantize(value.slice(before, self.n)),
            positions=None if positions is None else positions[:, :, new], **options,
        )]
        if before:
            old = None if positions is None else positions[:, :, :before]
            parts.append(
                packed_partial(balanced, key.slice(0, before), value.slice(0, before), positions=old, **options)
            )
        return parts

    def _score(self, step: Step, balanced: Tensor, lse: Tensor) -> None:
        """Add the mass that each entry of the high tier received in the joint softmax."""
        count = step.query.shape[2]
        at = torch.arange(self.n - count, self.n, device=step.query.device)
        options: dict[str, Any] = {
            "scale": step.scale, "lse": lse, "window": step.window, "softcap": step.softcap,
            "logical": torch.arange(step.seen - count, step.seen, device=step.query.device),
        }
        if self.high is None:
            self.scores.add_(attention_mass(step.query, self.keys, at, positions=self._where(), **options))
            return
        key, positions = self.high.view(self._held(), self._widths)[0], self._where()
        for low in range(0, self.n, MASS_BLOCK):
            entries = slice(low, min(low + MASS_BLOCK, self.n))
            self.scores[:, :, entries].add_(attention_mass(
                balanced, dequantize(key.slice(entries.start, entries.stop)), at - low,
                positions=None if positions is None else positions[:, :, entries], **options,
            ))

    # Room, forks and bytes

    def reserve(self, tokens: int, forward: int) -> None:
        """The high tier grows by its share of the tokens and holds those of one pass; others go to the low one."""
        super().reserve(tokens, forward + math.ceil(self.share * tokens))
        if self.demoted is not None:
            self.demoted.reserve(tokens)

    def entries_kept(self) -> list[int]:
        """Entries of both tiers."""
        low = self.demoted.n if self.demoted is not None else 0
        return [x + low for x in super().entries_kept()]

    def facts(self) -> dict[str, Fact]:
        """Entries that are codes, and the distinct bytes among those of the low tier's keys."""
        entries = distinct = 0
        if self.demoted is not None:
            packed = self.demoted.held()["key_packed"]
            heads = packed.shape[0] * packed.shape[1]
            entries = (self.demoted.n + (0 if self.high is None else self.n)) * heads
            distinct = int(torch.bincount(packed.flatten(), minlength=1).count_nonzero())
        return {
            **super().facts(), "entries_quantized": Fact(entries, changed=True),
            "distinct_codes": Fact(distinct, maximum=True),
        }
