"""RetroInfer: the best clusters of keys are read, and the next ones count by their mean key and mean value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvbench.constraints import Positive, Share
from kvbench.kernels.ragged_attention import Partial, merge_partials
from kvbench.method import BudgetKind, Card, LayerShape, Shape, Step, Upstream
from kvbench.store.chosen import ChosenKV
from kvbench.techniques.clustering import cluster_segments, means
from kvbench.techniques.reading import ClusterMethod, mark_taken, take_units


@dataclass(frozen=True)
class RetroInfer(ClusterMethod):
    """Reads, per KV head, sinks, recent entries and the best clusters, and estimates the attention to other ones."""

    segment: Positive = 8000
    """Most entries that are clustered together."""
    estimated: Share = 0.232
    """Share of the clusters, after those that are read, whose attention is estimated."""

    card: ClassVar[Card] = Card(
        name="retroinfer",
        title="RetroInfer: A Vector-Storage Approach for Scalable Long-Context LLM Inference",
        idea="A few clusters of similar keys get most of the attention and are read. The attention to the clusters "
        "that follow them is estimated from their mean key, their size and the sum of their values.",
        arxiv="2505.02922",
        year=2025,
        version="2",
        family="retrieval",
        stages=("retrieval", "loading"),
        budget=BudgetKind.READ,
        heads="independent",
        upstream=Upstream(repo="microsoft/RetrievalAttention", commit="2a66c4c", license="MIT"),
        deviations=(
            "The budget counts entries, sinks and recent ones included; the authors read 1.8 % of the clusters.",
            ("A cluster that the budget ends in is read in part, and its other entries may be estimated; the authors "
            "read whole clusters."),
            "The number of estimated clusters is rounded up; the authors' code rounds it.",
            ("Later entries are always read, in addition to the budget; the authors cluster generated tokens whenever "
            "there are 1,024."),
            ("Keys are normalized in k-means, and every key is in a cluster of its own segment. The authors' k-means "
            "updates directions with unnormalized keys, and its last pass assigns keys to the centers of all segments, "
            "which matters for contexts longer than one segment."),
            ("Segments have 8,000 entries, and the last one has the rest. The authors divide a context into equal "
            "ones, one for every 8,192 entries."),
            ("k-means starts from the first key of every interval of equal length; the authors' starts from the middle "
            "one."),
            "Each token of a question chooses its own clusters, as if it were decoded.",
            ("By default entries stay on the device. With tier=host they are on the host, as the authors have them, "
            "without their cache of clusters on the device."),
        ),
        limits=(
            "It saves reads; the index is stored in addition to all entries.", "The prompt is run with full attention.",
        ),
    )

    def start(self, kv: ChosenKV, step: Step) -> None:
        """Cluster the centered keys by direction, and put each cluster's entries next to each other."""
        del step
        inner = slice(self.sinks, kv.n - self.recent)
        keys, values = kv.keys[:, :, inner].float(), kv.values[:, :, inner].float()
        middle = keys.mean(2, keepdim=True)
        centers, labels = cluster_segments(keys - middle, self.cluster, self.segment, self.iterations, spherical=True)
        mean_values = means(values, labels, values.new_zeros((*centers.shape[:3], values.shape[3])))
        offsets = self.order_by_cluster(kv, labels, centers.shape[2])
        kv.start({
            "centers": (centers + middle).to(kv.keys.dtype), "values": mean_values.to(kv.values.dtype),
            "offsets": offsets,
        })

    def read(self, kv: ChosenKV, step: Step, seen: int) -> Partial:
        """Attention over sinks, the best clusters, recent and later entries, merged with the estimate of others."""
        centers, offsets = kv.scan(kv.index["centers"]), kv.scan(kv.index["offsets"])
        grouped = step.query[:, :, 0].unflatten(1, (centers.shape[1], -1))
        logits = grouped.float() @ centers.float().mT * step.scale  # [B, H_kv, G, U]
        sizes = offsets.diff(dim=-1).long()
        shares = logits.softmax(-1).sum(2).masked_fill(sizes == 0, -1)
        taken = take_units(shares, offsets, self.chosen)
        chosen = mark_taken(taken, offsets, kv.indexed - self.sinks - self.recent)
        mask = torch.ones((*chosen.shape[:2], seen), dtype=torch.bool, device=chosen.device)
        mask[:, :, self.sinks : self.sinks + chosen.shape[2]] = chosen
        exact = kv.read(step, mask)
        count = self.estimated_clusters(sizes.shape[-1])
        if not count:
            return exact
        left = sizes - taken
        places = shares.masked_fill(left == 0, -1).topk(count, dim=-1).indices  # [B, H_kv, Z]
        counts = left.gather(-1, places).float()[:, :, None].log()  # -inf: nothing is left of it
        zone = logits.gather(-1, places[:, :, None].expand(-1, -1, logits.shape[2], -1))
        zone = step.cap(zone) + counts  # as in the attention that the estimate is merged with
        values = kv.scan(kv.index["values"].gather(2, places[..., None].expand(-1, -1, -1, kv.values.shape[3])))
        lse = zone.logsumexp(-1)
        weights = (zone - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
        rest = Partial((weights @ values.float()).flatten(1, 2)[:, :, None], lse.flatten(1, 2)[..., None])
        return Partial(merge_partials([exact, rest]), torch.logaddexp(exact.lse, rest.lse))

    def estimated_clusters(self, clusters: int) -> int:
        """Clusters whose attention is estimated."""
        return math.ceil(self.estimated * clusters)

    def index_bytes(self, layer: LayerShape, shape: Shape) -> int:
        """Bytes of the clusters and of their mean values."""
        values = self.clusters(shape) * layer.value_dim * shape.itemsize
        return self.scanned_bytes(layer, shape) + layer.kv_heads * values

    def token_bytes(self, layer: LayerShape, shape: Shape) -> int:
        """Bytes that a token reads: every center, some mean values, and entries."""
        values = self.estimated_clusters(self.clusters(shape)) * layer.value_dim * shape.itemsize
        return self.scanned_bytes(layer, shape) + layer.kv_heads * values + self.entry_bytes(layer, shape)
