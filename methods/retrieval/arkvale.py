"""ArkVale: each page has a digest, a box around its keys, and a token reads the pages whose boxes promise most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.constraints import Natural, Positive
from kvbench.kernels.ragged_attention import Partial
from kvbench.method import BudgetKind, Card, LayerShape, Shape, Step, Upstream
from kvbench.store.chosen import ChosenKV
from kvbench.techniques.reading import ReadingMethod, mark_ends_and_best


@dataclass(frozen=True)
class ArkVale(ReadingMethod):
    """Reads the first and last pages and those with the largest product of query and digest."""

    page: Positive = 16
    """Entries per page."""
    sinks: Natural = 2
    """First pages, which are always read."""
    recent: Positive = 2
    """Last pages of the context, which are always read; the last one may be partial."""
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
        version="2",
        family="retrieval",
        stages=("retrieval", "loading"),
        budget=BudgetKind.READ,
        paper_budget="1024",
        heads="pooled",
        upstream=Upstream(repo="pku-liang/ArkVale", commit="0c3b45ebe7ecc8c81ff4bc0f9c68c04a0866de88", license=None),
        deviations=(
            ("Pages of 16 entries; the release's examples have 32, of which the first and last ones take more than a "
            "short context's budget. Use --set page=32 for long ones."),
            ("By default entries stay on the device. With tier=host they are on the host, and chosen pages are fetched "
            "for every token; the authors keep a budget of pages on the device and recall those that are missing."),
            ("The token's own query chooses all pages of the budget. The authors' code reads every page on the device, "
            "of which the query chooses half by default and a quarter in its README; the others are left from earlier "
            "tokens."),
            "Later entries are always read, in addition to the budget; the authors page them like the context.",
            "Every layer chooses pages; the first two read everything in the authors' benchmarks.",
            "Each token of a question chooses its own pages, as if it were decoded.",
        ),
        unverified=(
            ("The paper (NeurIPS 2024, no arXiv id) was not at hand; sinks, recent, box and heads are those of the "
            "release."),
        ),
        limits=(
            "It saves reads; the index is stored in addition to all entries.", "The prompt is run with full attention.",
            "With box=mean a digest is no bound: a single key far from the others may be missed.",
        ),
    )

    def minimum_entries(self) -> int:
        """The first and last pages and one entry to choose."""
        return (self.sinks + self.recent) * self.page + 1

    def recent_start(self, length: int) -> int:
        """The page that the recent pages start with."""
        return -(-length // self.page) - self.recent

    def start(self, kv: ChosenKV, step: Step) -> None:
        """Make the digests of all full pages: the lower and upper corner of their boxes."""
        del step
        keys = kv.keys[:, :, : kv.n // self.page * self.page].float().unflatten(2, (-1, self.page))
        center = (keys.amax(3) + keys.amin(3)) / 2
        distance = (keys - center[:, :, :, None]).abs()
        half = distance.mean(3) if self.box == "mean" else distance.amax(3)
        corners = torch.stack([center - half, center + half], dim=3)
        kv.start({"digest": corners.to(kv.keys.dtype)})  # [B, H_kv, pages, 2, D]

    def read(self, kv: ChosenKV, step: Step, seen: int) -> Partial:
        """Attention over the first, the last and the best pages, and over later entries."""
        assert self.rows is not None
        last = self.recent_start(kv.indexed)
        digest = kv.scan(kv.index["digest"][:, :, self.sinks : last]).float()
        query = step.query[:, :, 0].float().unflatten(1, (digest.shape[1], -1))  # [B, H_kv, G, D]
        promise = self.score(query, digest).mean(2)  # [B, H_kv, pages]
        if self.heads == "layer":
            promise = promise.mean(1, keepdim=True).expand_as(promise)
        promise = promise.repeat_interleave(self.page, dim=2)
        scores = promise.new_zeros((*promise.shape[:2], kv.indexed))
        scores[:, :, self.sinks * self.page : last * self.page] = promise
        mask = torch.ones((*promise.shape[:2], seen), dtype=torch.bool, device=promise.device)
        mask[:, :, : kv.indexed] = mark_ends_and_best(
            scores, self.rows, self.sinks * self.page, kv.indexed - last * self.page
        )
        return kv.read(step, mask)

    def score(self, query: Tensor, digest: Tensor) -> Tensor:
        """The largest product of each query with a point of each box. [B, H_kv, G, pages]

        query: [B, H_kv, G, D]. digest: [B, H_kv, pages, 2, D].
        """
        lower, upper = digest.unbind(3)
        return query.clamp_min(0) @ upper.mT + query.clamp_max(0) @ lower.mT

    def index_bytes(self, layer: LayerShape, shape: Shape) -> int:
        """Bytes of the digests of all full pages."""
        return layer.kv_heads * (shape.length // self.page) * 2 * layer.key_dim * shape.itemsize

    def token_bytes(self, layer: LayerShape, shape: Shape) -> int:
        """Bytes that a token reads: the digests of the pages that it may choose, and entries."""
        pages = self.recent_start(shape.length) - self.sinks
        return self.entry_bytes(layer, shape) + layer.kv_heads * pages * 2 * layer.key_dim * shape.itemsize
