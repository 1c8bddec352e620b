"""R-KV: while decoding, drops entries that get little attention or whose keys repeat others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench.budget import LayerShape
from kvbench.constraints import Ge, Gt, Odd, Positive, Share
from kvbench.kernels.blocks import fit_block, float_products
from kvbench.method import BudgetKind, Card, Shape, Step, Upstream
from kvbench.selection import PeriodicMethod, pool_scores
from kvbench.store import LayerKV
from kvbench.store.scores import roll_queries


@dataclass(frozen=True)
class RKV(PeriodicMethod):
    """Keeps the last tokens and the entries with the best attention less redundancy, after every `period` tokens."""

    period: Positive = 128
    window: Positive = 8
    """Last tokens, by whose queries entries are scored, and which are always kept."""
    kernel: Annotated[int, Ge(1), Odd] = 7
    mix: Share = 0.1
    """Weight of attention; redundancy has the rest."""
    similar: Annotated[float, Gt(0)] = 0.5
    """Cosine above which the latest such key does not count as redundant."""

    card: ClassVar[Card] = Card(
        name="r-kv",
        title="R-KV: Redundancy-aware KV Cache Compression for Reasoning Models",
        idea="Reasoning repeats itself, and repeated text keeps attention on many equal entries. "
        "Entries are scored by attention from the last tokens less their similarity to other keys, while decoding.",
        arxiv="2505.24133",
        year=2025,
        family="eviction",
        stages=("compression",),
        budget=BudgetKind.STORED,
        heads="independent",
        upstream=Upstream(repo="Zefan-Cai/R-KV", commit="cc5a9b9", license="Apache-2.0"),
        deviations=(
            ("Pooling, and the latest of similar keys, follow the order of the text; in the authors' code that of the "
            "cache, which is the order of scores after the first eviction."),
            ("The prompt is compressed too, once, at its end, so that the budget holds from then on. The authors' code "
            "does so as well when a prompt exceeds the budget."),
            ("Entries are dropped when `period` of them are above the budget. The authors' code drops them in the step "
            "after the one in which the text's length is a multiple of it, if the cache has reached the budget."),
            "Where no key is similar to a token's, none is left out. The authors' code leaves out the first one.",
            "Cosines are summed over blocks; the authors' code holds all of them.",
            "mix is 0.1, as the paper recommends; the authors' code has 0.07 by default.",
        ),
        limits=(
            "Up to `period` entries are stored above the budget between two evictions; end_bytes counts them.",
            ("Scores of redundancy are a softmax over all entries, so differences between entries shrink as the cache "
            "grows."),
        ),
    )

    def minimum_entries(self) -> int:
        """The window and one entry to choose."""
        return self.window + 1

    def layer_bytes(self, index: int, shape: Shape, entries: int) -> int:
        """Bytes of the entries and of the last queries."""
        return super().layer_bytes(index, shape, entries) + self._query_bytes(shape.layers[index], shape)

    def running_bytes(self, shape: Shape) -> int:
        """Bytes for scoring, and of the last queries."""
        return super().running_bytes(shape) + sum(self._query_bytes(x, shape) for x in shape.layers)

    def _query_bytes(self, layer: LayerShape, shape: Shape) -> int:
        return 0 if self.rows is None else self.window * layer.query_heads * layer.key_dim * shape.itemsize

    def evict(self, kv: LayerKV, step: Step) -> None:
        """Note the queries, then evict where it is time."""
        if self.rows is not None:
            roll_queries(kv, step, self.window)
        super().evict(kv, step)

    def score(self, kv: LayerKV, step: Step, entries: int) -> Tensor:
        """Attention less redundancy, weighed by `mix`; infinite for the window. [B, H_kv, n]"""
        assert kv.positions is not None
        recent = kv.positions >= step.seen - self.window
        attention = pool_by_position(self._attention(kv, step, recent), kv.positions, self.kernel)
        scores = self.mix * attention - (1 - self.mix) * redundancy(kv.keys, kv.positions, self.similar)
        return scores.masked_fill(recent, torch.inf)

    def _attention(self, kv: LayerKV, step: Step, recent: Tensor) -> Tensor:
        """Mean attention of the last queries to the entries before them, largest logit of the group. [B, H_kv, n]"""
        count = min(self.window, step.seen)
        queries = kv.state["queries"][:, :, -count:].unflatten(1, (kv.keys.shape[1], -1))  # [B, H_kv, G, w, D]
        logits = step.cap(float_products(queries, kv.keys[:, :, None]).amax(2) * step.scale)  # [B, H_kv, w, n]
        weights: Tensor = logits.masked_fill(recent[:, :, None], -torch.inf).softmax(-1).nan_to_num()
        return weights.mean(2)


def pool_by_position(scores: Tensor, positions: Tensor, kernel: int) -> Tensor:
    """The largest score among neighbors in the text, whose order entries lose when some are dropped. [B, H_kv, n]"""
    order = positions.argsort(dim=-1)
    pooled = pool_scores(scores.gather(-1, order), kernel, "max")
    return torch.empty_like(scores).scatter_(-1, order, pooled)


def redundancy(keys: Tensor, positions: Tensor, similar: float) -> Tensor:
    """Softmax of each key's mean cosine to the others; of the keys similar to one, the latest does not count for it.

    keys: [B, H_kv, n, D]. positions: [B, H_kv, n]. Returns [B, H_kv, n] float32.
    """
    units = F.normalize(keys.float(), dim=-1)
    count = keys.shape[2]
    sums = torch.zeros_like(positions, dtype=torch.float32)
    size = fit_block(positions.shape[0] * positions.shape[1] * count, keys)
    for start in range(0, count, size):
        stop = min(start + size, count)
        cosines = units[:, :, start:stop] @ units.mT  # [B, H_kv, rows, n]
        diagonal = torch.arange(start, stop, device=keys.device)
        cosines[:, :, diagonal - start, diagonal] = 0.0
        where = positions[:, :, None].expand_as(cosines).masked_fill(cosines <= similar, -1)
        latest = where.max(-1, keepdim=True)
        cosines = cosines.scatter(-1, latest.indices, 0.0).where(latest.values >= 0, cosines)
        sums += cosines.sum(2)
    return (sums / count).softmax(-1)
