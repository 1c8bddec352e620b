"""ThinK: drops the channels of the keys that matter least to the last queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.budget import LayerShape, Shape
from kvbench.constraints import Natural, Positive, Share
from kvbench.method import BudgetKind, Card, Method, Step, Upstream
from kvbench.store import Fact, LayerKV
from kvbench.store.layer import OFFSET_BYTES, POSITION_BYTES

INDEX_BYTES = 8


@dataclass
class ThinKV(LayerKV):
    """Entries of which all but the last store some channels of their keys; values are whole.

    ratio: share of the channels that are dropped. recent: last entries of the context with whole keys.
    """

    ratio: float = 0.0
    recent: int = 0

    def channels(self, width: int) -> int:
        """Channels that a key of this width keeps."""
        return width - int(width * self.ratio)

    def bytes_for(self, layer: LayerShape, shape: Shape, entries: int) -> int:
        """Thin and whole keys, values, offsets, and the numbers of the channels of every head."""
        total, kept = super().bytes_for(layer, shape, entries), self.channels(layer.key_dim)
        thin = entries - self.recent
        if thin <= 0 or kept == layer.key_dim:
            return total
        saved = thin * (layer.key_dim - kept) * shape.itemsize
        positions = POSITION_BYTES * entries if layer.window is not None and not self.track else 0
        return total + layer.kv_heads * (positions + kept * INDEX_BYTES - saved) + (layer.kv_heads + 1) * OFFSET_BYTES

    def drop_channels(self, channels: Tensor) -> None:
        """Keep these channels of the keys of all but the last entries. channels: [B, H_kv, C], ascending"""
        thin, dropped = self.n - self.recent, self.dropped
        held = self._held_with_holes()
        rest = {name: x[:, :, thin:].clone() for name, x in held.items()}
        key = held["key"][:, :, :thin].gather(3, channels[:, :, None].expand(-1, -1, thin, -1))
        position = held["position"][:, :, :thin].flatten().clone() if "position" in held else None
        counts = torch.full(key.shape[:2], thin, device=key.device)
        self.freeze(key.flatten(0, 2), held["value"][:, :, :thin].flatten(0, 2).clone(), counts, position=position)
        self.dropped = dropped  # every entry is still stored
        self.state["channels"] = channels
        self._replace(rest, self.recent + self.remaining)

    def frozen_query(self, step: Step) -> Tensor:
        """The channels of the queries that the thin keys have. [B, H_q, T, C]"""
        channels = self.state["channels"]
        grouped: Tensor = step.query.unflatten(1, (channels.shape[1], -1))  # [B, H_kv, G, T, D]
        return grouped.gather(4, channels[:, :, None, None].expand(*grouped.shape[:4], -1)).flatten(1, 2)

    def facts(self) -> dict[str, Fact]:
        """Entries whose keys are thin prove the effect."""
        thin = sum(self.frozen.counts) if self.frozen is not None else 0
        return {**super().facts(), "thin_keys": Fact(thin, changed=True)}


@dataclass(frozen=True)
class ThinK(Method):
    """Drops, per KV head, the key channels with the smallest products of query and key norms."""

    ratio: Share = 0.4
    """Share of the key channels that are dropped."""
    window: Positive = 32
    """Last queries, by which channels are chosen."""
    recent: Natural = 32
    """Last entries of the context, whose keys stay whole."""

    recompressible: ClassVar[str | None] = "thin keys are frozen, and later entries stay whole."
    card: ClassVar[Card] = Card(
        name="think",
        title="ThinK: Thinner Key Cache by Query-Driven Pruning",
        idea="Few channels of the keys carry most of the products with queries. "
        "The channels that add least for the last queries are dropped from all keys but the last ones, and queries "
        "skip them there.",
        arxiv="2407.21018",
        year=2024,
        family="channels",
        stages=("compression",),
        budget=BudgetKind.BITS,
        heads="independent",
        upstream=Upstream(repo="NVIDIA/kvpress", commit="8bb29b9", license="Apache-2.0"),
        deviations=(
            "Channels are freed; kvpress sets them to zero. The last 32 entries stay whole, as in the authors' runs.",
            ("Squared queries are averaged over the query heads of a KV head, as in kvpress; the authors' code repeats "
            "the keys and chooses per query head."),
            "Alone, with every entry kept; the authors also put it after an eviction.",
        ),
        limits=(
            "Only keys shrink: with 40 % of their channels dropped, 80 % of the bytes remain.",
            "Channels are chosen by the last tokens: a question that is asked later may need others.",
        ),
    )

    def layer(self, index: int) -> LayerKV:
        """A store that also keeps the last queries, until the compression."""
        return ThinKV(queries=self.window, ratio=self.ratio, recent=self.recent)

    def evict(self, kv: LayerKV, step: Step) -> None:
        """Drop channels once, after the attention of the context's last chunk, so that the prefill is exact."""
        assert isinstance(kv, ThinKV)
        if not step.moment.compresses:
            return
        kv.refuse_frozen()
        width = kv.keys.shape[3]
        if kv.n > self.recent and kv.channels(width) < width:
            kv.drop_channels(best_channels(kv, kv.channels(width)))

    def identity(self, shape: Shape) -> bool:
        """Whether no channel is dropped: none by `ratio`, or no entry is old enough."""
        return all(int(x.key_dim * self.ratio) == 0 or shape.entries(x) <= self.recent for x in shape.layers)


def best_channels(kv: LayerKV, count: int) -> Tensor:
    """Ascending numbers of the channels with the largest mean square of queries times that of keys. [B, H_kv, count]"""
    assert kv.recent_queries is not None
    queries = kv.recent_queries.float().square().mean(2).unflatten(1, (kv.keys.shape[1], -1)).mean(2)  # [B, H_kv, D]
    scores: Tensor = queries * kv.keys.float().square().mean(2)
    return scores.argsort(dim=-1, descending=True, stable=True)[..., :count].sort(dim=-1).values
