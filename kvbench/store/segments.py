"""Entries as segments of codes in two precisions, each segment with parameters of its own, and an exact tail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvbench.budget import LayerShape, Shape
from kvbench.kernels.attention_mass import joint_lse
from kvbench.kernels.pack import PARAMETER_BYTES, Codes, packed_width, quantize
from kvbench.kernels.packed_attention import packed_partial
from kvbench.kernels.ragged_attention import Partial, dense_partial, merge_partials
from kvbench.step import Step
from kvbench.store.entries import gather
from kvbench.store.facts import Fact
from kvbench.store.layer import POSITION_BYTES, SCORE_BYTES, LayerKV

CHANNEL_BYTES = 2


@dataclass(frozen=True)
class CodedEntries:
    """Entries of one precision: keys with a scale per channel, values with one per entry, which all heads share."""

    key: Codes  # scale [B, H_kv, 1, D]
    value: Codes  # scale [B, 1, n, 1]
    position: Tensor | None  # [B, H_kv, n] int32, where a window has to count tokens

    @classmethod
    def encode(cls, key: Tensor, value: Tensor, position: Tensor | None, bits: int) -> CodedEntries:
        """Entries of codes. key: [B, H_kv, n, D]; value: [B, H_kv, n, D_v], its channels made equal."""
        entries = quantize(value.transpose(1, 2), bits, tokens=value.shape[1], channels=value.shape[3])  # [B, n, H, ..]
        value_codes = replace(
            entries, packed=entries.packed.transpose(1, 2).contiguous(), scale=entries.scale.transpose(1, 2),
            minimum=entries.minimum.transpose(1, 2),
        )
        return cls(quantize(key, bits, tokens=key.shape[2]), value_codes, position)

    def tensors(self) -> list[Tensor]:
        """Every tensor that it keeps alive."""
        held = [x for codes in (self.key, self.value) for x in (codes.packed, codes.scale, codes.minimum)]
        return held if self.position is None else [*held, self.position]


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens, never written again: forks share them."""

    channel: Tensor  # what values were divided by, [B, H_kv, 1, D_v] float16
    entries: tuple[CodedEntries, ...]

    def partials(self, query: Tensor, options: dict[str, Any]) -> list[Partial]:
        """Attention over the entries of each precision."""
        group = query.shape[1] // self.channel.shape[1]
        channel = self.channel.float().repeat_interleave(group, dim=1)  # [B, H_q, 1, D_v]
        parts = [packed_partial(query, x.key, x.value, positions=x.position, **options) for x in self.entries]
        return [Partial(x.output * channel, x.lse) for x in parts]

    @property
    def n(self) -> int:
        """Entries of a KV head."""
        return sum(x.key.packed.shape[2] for x in self.entries)


@dataclass
class SegmentedKV(LayerKV):
    """An exact tail that is coded from its front, a segment at a time; every exact entry has a score for its method."""

    bounded: bool = True
    segments: list[Segment] = field(default_factory=list, init=False)

    def _entries(self, step: Step) -> dict[str, Tensor]:
        score = torch.zeros(step.key.shape[:3], dtype=torch.float32, device=step.key.device)
        return {**super()._entries(step), "score": score}

    def bytes_for(
        self, layer: LayerShape, shape: Shape, entries: int, *, coded: Sequence[tuple[int, int]] = ()
    ) -> int:
        """One segment. coded: entries and bits of each precision, whose sum is `entries`.

        Codes; key parameters per channel and precision; value parameters per entry; channels; positions for a window.
        """
        del shape
        head = layer.value_dim * CHANNEL_BYTES + (0 if layer.window is None else entries * POSITION_BYTES)
        for count, bits in coded:
            head += count * (packed_width(layer.key_dim, bits) + packed_width(layer.value_dim, bits))
            head += layer.key_dim * PARAMETER_BYTES if count else 0
        return layer.kv_heads * head + entries * PARAMETER_BYTES

    def running_bytes(self, layer: LayerShape, shape: Shape) -> int:
        """Bytes for scoring, those of the scores of every entry included."""
        return super().running_bytes(layer, shape) + shape.entries(layer) * layer.kv_heads * SCORE_BYTES

    def encode(self, count: int, important: Tensor, high_bits: int, low_bits: int, room: int) -> None:
        """Turn the first `count` entries into a segment, important ones in more bits; the tail has room for `room`.

        important: [B, H_kv, C], ascending indices below `count`, equally many for every head.
        """
        held = self._held()
        first = {name: held[name][:, :, :count] for name in ("key", "value")}
        heads = first["key"].shape[:2]
        if self._window is not None:
            first["position"] = self.logical_positions().to(torch.int32).expand(*heads, -1)[..., :count]
        rest = torch.ones(*heads, count, dtype=torch.int32, device=important.device).scatter(2, important, 0)
        others = rest.argsort(dim=-1, descending=True, stable=True)[..., : count - important.shape[2]]
        largest = first["value"].abs().amax(2, keepdim=True).float()
        channel = largest.sqrt().masked_fill(largest == 0, 1.0).to(torch.float16)
        entries = []
        for indices, bits in ((important, high_bits), (others, low_bits)):
            if indices.shape[2]:
                chosen = {name: gather(x, indices) for name, x in first.items()}
                equal = chosen["value"].float() / channel.float()
                entries.append(CodedEntries.encode(chosen["key"], equal, chosen.get("position"), bits))
        self.segments = [*self.segments, Segment(channel, tuple(entries))]
        assert self._buffer is not None
        tail = {name: x[:, :, count:].clone() for name, x in held.items()}
        if len(self.segments) == 1:
            self._replace(tail, room)
        else:
            self._buffer.write(0, tail)
            self.n -= count

    def attend_with_lse(self, step: Step) -> tuple[Tensor, Tensor]:
        """Attention over all segments and the tail, and the log of its normalizer. [B, H_q, T, D_v], [B, H_q, T]"""
        parts = [part for segment in self.segments for part in segment.partials(step.query, step.options)]
        parts.append(dense_partial(step.query, self.keys, self.values, positions=self._where(), **step.options))
        return merge_partials(parts, step.sinks).to(step.query.dtype), joint_lse(parts, step.sinks)

    def close(self) -> None:
        """Free segments and tail."""
        super().close()
        self.segments = []

    def tensors(self) -> list[Tensor]:
        """Every tensor of segments and tail."""
        held = [x for segment in self.segments for entries in segment.entries for x in entries.tensors()]
        return super().tensors() + held + [segment.channel for segment in self.segments]

    def entries_kept(self) -> list[int]:
        """Entries of segments and tail."""
        coded = sum(segment.n for segment in self.segments)
        return [x + coded for x in super().entries_kept()]

    def facts(self) -> dict[str, Fact]:
        """Entries that are codes, and the distinct bytes among their keys."""
        packed = [entries.key.packed.flatten() for segment in self.segments for entries in segment.entries]
        coded = sum(segment.n for segment in self.segments) * len(self.entries_kept())
        distinct = int(torch.bincount(torch.cat(packed)).count_nonzero()) if packed else 0
        return {
            **super().facts(), "entries_quantized": Fact(coded, changed=True),
            "distinct_codes": Fact(distinct, maximum=True),
        }
