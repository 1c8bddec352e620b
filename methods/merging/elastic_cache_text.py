"""Elastic Cache, on text: merges all other entries into the nearest of the most attended ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.method import BudgetKind, Card, Upstream
from kvbench.selection import AttentionSums, top_entries
from kvbench.store import LayerKV


@dataclass(frozen=True)
class ElasticCacheText(AttentionSums):
    """Keeps the most attended tokens, the same in all heads, as means of the entries nearest to each."""

    recompressible: ClassVar[str | None] = "merged entries are not merged again, and later entries stay as they are."
    card: ClassVar[Card] = Card(
        name="elastic-cache-text",
        version="2",
        title="Efficient Inference of Vision Instruction-Following Models with Elastic Cache",
        idea="Merging an entry into a neighbor loses less than dropping it. The outermost tokens stay as they are. "
        "The most attended others are anchors, and each becomes the mean of the entries nearest to it.",
        arxiv="2407.18121",
        year=2024,
        family="merging",
        stages=("compression",),
        budget=BudgetKind.STORED,
        paper_budget="50%",
        heads="pooled",
        upstream=Upstream(repo="liuzuyan/ElasticCache", commit="3138e03", license="MIT"),
        deviations=(
            "Text only: the paper is about images and text. Its rule is used as it is.",
            ("Anchors are the most attended tokens, as in the paper. The authors' code compares indices with a number "
            "of ranks, so that it keeps others. In place of each entry that it drops, it merges the one before it."),
            ("Entries after the context are kept. The authors drop one at a fixed place, 25 before the end of the "
            "compressed prompt, whenever the cache is above its share."),
        ),
        limits=(
            "A mean of many entries counts as one in the softmax: no bias makes up for the others.",
            "Keys are averaged after rotation, so that fast channels cancel out over long distances.",
            "Sums of attention favor early tokens, which more queries see.",
        ),
    )

    def select(self, kv: LayerKV, scores: Tensor, entries: int) -> None:
        """Keep the anchors, each with the mean key and value of the entries nearest to it, and the outermost tokens."""
        anchors = top_entries(scores, entries)
        outermost = scores.gather(-1, anchors)[0, 0] == torch.inf  # [C], the same in all heads and sequences
        owner = share_out(anchors[:, 0], outermost, kv.n)[:, None].expand(-1, kv.keys.shape[1], -1)  # [B, H_kv, n]
        key, value = (bucket_means(x, owner, entries) for x in (kv.keys, kv.values))
        kv.keep(anchors)
        kv.keys.copy_(key)
        kv.values.copy_(value)


def share_out(anchors: Tensor, outermost: Tensor, count: int) -> Tensor:
    """The anchor that takes each of `count` entries: the nearest that is not outermost; these take themselves. [B, n]

    anchors: ascending [B, C]. outermost: [C] bool.
    """
    inner, ends = (~outermost).nonzero()[:, 0], outermost.nonzero()[:, 0]
    owner = inner[nearest(anchors[:, inner], count)]
    return owner.scatter(1, anchors[:, ends], ends.expand(len(owner), -1))


def nearest(anchors: Tensor, count: int) -> Tensor:
    """The anchor that is nearest to each of `count` places; of two, the earlier. anchors: ascending [B, C] -> [B, n]"""
    middles = (anchors[:, 1:] + anchors[:, :-1]) / 2
    places = torch.arange(count, dtype=middles.dtype, device=anchors.device).expand(anchors.shape[0], -1)
    return torch.searchsorted(middles.contiguous(), places.contiguous())


def bucket_means(rows: Tensor, owner: Tensor, buckets: int) -> Tensor:
    """Mean of the rows of each bucket, in float32. rows: [B, H_kv, n, D]. owner: [B, H_kv, n]. [B, H_kv, buckets, D]"""
    sums = torch.zeros((*rows.shape[:2], buckets, rows.shape[3]), dtype=torch.float32, device=rows.device)
    sums.scatter_add_(2, owner[..., None].expand_as(rows), rows.float())
    sizes = torch.zeros(sums.shape[:3], device=rows.device).scatter_add_(2, owner, torch.ones_like(owner).float())
    return (sums / sizes[..., None]).to(rows.dtype)
