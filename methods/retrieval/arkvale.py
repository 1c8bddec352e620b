"""ArkVale: a token reads a set of pages, and replaces those with the lowest scores by those with the highest.

The score of a page for a query is found from its digest, a box around its keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.constraints import Natural, Positive, Share
from kvbench.kernels.ragged_attention import Partial
from kvbench.method import BudgetKind, Card, LayerShape, Shape, Step, Upstream
from kvbench.store.chosen import ChosenKV
from kvbench.techniques.reading import ReadingMethod, mark_ends_and_best


@dataclass(frozen=True)
class ArkVale(ReadingMethod):
    """Reads the first and last pages and a set of others, which the tokens' queries renew page by page."""

    page: Positive = 16
    """Entries per page."""
    sinks: Natural = 2
    """First pages, which are always read."""
    recent: Positive = 2
    """Last pages of the context, which are always read; the last one may be partial."""
    chosen: Share = 0.5
    """Share of the budget that each token's query chooses, first and last pages included; the others stay."""
    most: Positive = 1280
    """Most entries that each token's query chooses, first and last pages included."""
    box: Literal["mean", "tight"] = "mean"
    """Half the side of the box: the mean distance of the keys from its center, or the largest, which is a bound."""

    heads: Literal["layer", "group"] = "layer"
    """Whether all heads of a layer choose together, by the mean of their products, or every KV head for itself."""

    card: ClassVar[Card] = Card(
        name="arkvale",
        title="ArkVale: Efficient Generative LLM Inference with Recallable Key-Value Eviction",
        idea="Entries that are evicted to the host in pages can be recalled. A small digest of each page, a box around "
        "its keys, tells for every query how important the page may be.",
        arxiv=None,
        year=2024,
        version="3",
        family="retrieval",
        stages=("retrieval", "loading"),
        budget=BudgetKind.READ,
        paper_budget="1024",
        heads="pooled",
        upstream=Upstream(repo="pku-liang/ArkVale", commit="0c3b45ebe7ecc8c81ff4bc0f9c68c04a0866de88", license=None),
        deviations=(
            ("Pages of 16 entries, which the paper measures beside 32: first and last pages of 32 take more than the "
            "budget of a short context. Use --set page=32 for long ones."),
            ("By default entries stay on the device. With tier=host they are on the host, and chosen pages are fetched "
            "for every token; the authors keep a budget of pages on the device and recall those that are missing."),
            ("The query chooses one page at least. The authors' code refuses budgets of less than eight pages, half of "
            "which would be the first and last ones."),
            "Later entries are always read, in addition to the budget; the authors page them like the context.",
            "Every layer chooses pages; the first two read everything in the authors' benchmarks.",
            "Each token of a question chooses its own pages, as if it were decoded.",
        ),
        unverified=(
            ("The paper names neither sinks nor recent: both are the defaults of the authors' class. Their script for "
            "LongBench has one first page."),
        ),
        limits=(
            "It saves reads; the index is stored in addition to all entries.", "The prompt is run with full attention.",
            "With box=mean a digest is no bound: a single key far from the others may be missed.",
        ),
    )

    def minimum_entries(self) -> int:
        """The first and last pages and one to choose."""
        return (self.sinks + self.recent + 1) * self.page

    def recent_start(self, length: int) -> int:
        """The page that the recent pages start with."""
        return -(-length // self.page) - self.recent

    def start(self, kv: ChosenKV, step: Step) -> None:
        """Make the digests of all full pages, and let the context's last query choose the first set of pages.

        A digest is the lower and upper corner of a box.
        """
        keys = kv.keys[:, :, : kv.n // self.page * self.page].float().unflatten(2, (-1, self.page))
        center = (keys.amax(3) + keys.amin(3)) / 2
        distance = (keys - center[:, :, :, None]).abs()
        half = distance.mean(3) if self.box == "mean" else distance.amax(3)
        corners = torch.stack([center - half, center + half], dim=3)
        kv.start({"digest": corners.to(kv.keys.dtype)})  # [B, H_kv, pages, 2, D]
        scores = self.estimate(self.between(kv), step.query[:, :, -1])
        kv.state["resident"] = mark_ends_and_best(scores, self.pages(kv.indexed), 0, 0)

    def between(self, kv: ChosenKV) -> Tensor:
        """Digests of the pages between the first and the last ones. [B, H_kv, pages, 2, D]"""
        return kv.index["digest"][:, :, self.sinks : self.recent_start(kv.indexed)]

    def ends(self, length: int) -> int:
        """Entries of the first and the last pages."""
        return length - (self.recent_start(length) - self.sinks) * self.page

    def pages(self, length: int) -> int:
        """Pages of the budget between the first and the last ones."""
        assert self.rows is not None
        return (self.rows - self.ends(length)) // self.page

    def read(self, kv: ChosenKV, step: Step, seen: int) -> Partial:
        """Attention over the first, the last and the resident pages, and over later entries.

        Pages that the query chooses become resident, in place of those with the lowest scores.
        """
        assert self.rows is not None
        pages, resident = self.pages(kv.indexed), kv.state["resident"]
        count = int(min(self.chosen * self.rows, self.most)) // self.page - self.sinks - (self.recent - 1)
        scores = self.estimate(kv.scan(self.between(kv)), step.query[:, :, 0])
        chosen = mark_ends_and_best(scores, min(pages, max(1, count)), 0, 0)
        kept = scores.masked_fill(~resident, -torch.inf).masked_fill(chosen, torch.inf)
        resident.copy_(mark_ends_and_best(kept, pages, 0, 0))
        mask = torch.ones((len(scores), kv.keys.shape[1], seen), dtype=torch.bool, device=scores.device)
        between = slice(self.sinks * self.page, self.recent_start(kv.indexed) * self.page)
        mask[:, :, between] = resident.repeat_interleave(self.page, dim=2)
        return kv.read(step, mask)

    def estimate(self, digests: Tensor, query: Tensor) -> Tensor:
        """The score of every page. [B, H_kv, pages], or [B, 1, pages] where the heads of a layer choose together

        digests: [B, H_kv, pages, 2, D]. query: [B, H_q, D].
        """
        scores = self.score(query.float().unflatten(1, (digests.shape[1], -1)), digests.float()).mean(2)
        return scores.mean(1, keepdim=True) if self.heads == "layer" else scores

    def score(self, query: Tensor, digest: Tensor) -> Tensor:
        """The largest product of each query with a point of each box. [B, H_kv, G, pages]

        query: [B, H_kv, G, D]. digest: [B, H_kv, pages, 2, D].
        """
        lower, upper = digest.unbind(3)
        return query.clamp_min(0) @ upper.mT + query.clamp_max(0) @ lower.mT

    def index_bytes(self, layer: LayerShape, shape: Shape) -> int:
        """Bytes of the digests of all full pages, and of the marks of resident pages, of one byte each."""
        marks = (1 if self.heads == "layer" else layer.kv_heads) * (self.recent_start(shape.length) - self.sinks)
        return layer.kv_heads * (shape.length // self.page) * 2 * layer.key_dim * shape.itemsize + marks

    def token_bytes(self, layer: LayerShape, shape: Shape) -> int:
        """Bytes that a token reads: the digests of the pages that it may choose, and entries of whole pages."""
        digests = (self.recent_start(shape.length) - self.sinks) * 2 * layer.key_dim
        entries = self.ends(shape.length) + self.pages(shape.length) * self.page
        return layer.kv_heads * (digests + entries * (layer.key_dim + layer.value_dim)) * shape.itemsize
