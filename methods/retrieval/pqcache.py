"""PQCache: codes of keys by product quantization give approximate scores, and the best entries are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Self

import torch
from torch import Tensor

from kvbench.constraints import Ge, Le, Positive
from kvbench.errors import UserError
from kvbench.kernels.ragged_attention import Partial
from kvbench.method import Budget, BudgetKind, Card, LayerShape, Shape, Step, Upstream
from kvbench.store.chosen import ChosenKV
from kvbench.techniques.clustering import cluster, nearest
from kvbench.techniques.reading import ReadingMethod, mark_ends_and_best


@dataclass(frozen=True)
class PQCache(ReadingMethod):
    """Reads, per KV head, sinks, recent entries, and the entries whose quantized keys get the most attention."""

    parts: Positive = 2
    """Parts of a key, each with codes of its own."""
    bits: Annotated[int, Ge(1), Le(8)] = 6
    """Bits of a code, which is stored in a byte."""
    sinks: Positive = 32
    """First entries, which are always read."""
    recent: Annotated[float, Ge(0), Le(1)] = 0.5
    """Share of the budget without sinks for the last entries, which are always read."""
    iterations: Positive = 20
    """Most iterations of k-means."""

    card: ClassVar[Card] = Card(
        name="pqcache",
        title="PQCache: Product Quantization-based KVCache for Long Context LLM Inference",
        idea="Finding the keys with the largest products with a query is a search problem, for which product "
        "quantization is known: a key becomes a few codes, and a small table gives its approximate score.",
        arxiv="2407.12820",
        year=2024,
        family="retrieval",
        stages=("retrieval", "loading"),
        budget=BudgetKind.READ,
        heads="independent",
        upstream=Upstream(repo="HugoZHL/PQCache", commit="151ce6b", license=None),
        deviations=(
            ("By default entries stay on the device. With tier=host they are on the host, as the authors have them, "
            "without their cache of blocks on the device."),
            ("k-means runs to its end before the first token, from evenly spaced keys; the authors' starts from random "
            "ones and runs on the host while the GPU computes, with the number of iterations that time allows."),
            ("The budget counts the first entries and the token's own one; the authors' code reads both in addition to "
            "its share of the other entries."),
            "A new entry gets its codes when it arrives; the authors' code computes them when it leaves the window.",
            "Each token of a question chooses its own entries, as if it were decoded.",
        ),
        unverified=("iterations: the authors fit their number to the time of a prefill.",),
        limits=(
            "It saves reads; the index is stored in addition to all entries.", "The prompt is run with full attention.",
        ),
    )

    def fit(self, budget: Budget | None, shape: Shape) -> Self:
        """Resolve the budget; refuse keys that do not divide into parts (`UserError`)."""
        for layer in shape.layers:
            if layer.key_dim % self.parts:
                raise UserError(
                    f"pqcache: keys of {layer.key_dim} channels do not divide into {self.parts} parts. Use a divisor "
                    "of their number: --set parts=2, for example."
                )
        return super().fit(budget, shape)

    def minimum_entries(self) -> int:
        """The sinks, a recent entry and one to choose."""
        return self.sinks + 2

    @property
    def last(self) -> int:
        """Last entries that are always read: at least one, and one is left to choose."""
        assert self.rows is not None
        inner = self.rows - self.sinks
        return min(inner - 1, max(1, round(inner * self.recent)))

    def start(self, kv: ChosenKV, step: Step) -> None:
        """Cluster every part of the keys after the sinks; a key's codes are its clusters."""
        del step
        keys = self.divide(kv.keys[:, :, self.sinks :])
        centers, labels = cluster(keys, self.centers(kv.n), self.iterations)
        kv.start({"centers": centers.to(kv.keys.dtype)}, codes={"code": labels.movedim(2, 3).to(torch.uint8)})

    def extend(self, kv: ChosenKV, step: Step) -> None:
        """Code new keys."""
        assert kv.codes is not None
        labels = nearest(self.divide(step.key), kv.index["centers"].float())
        kv.codes.append({"code": labels.movedim(2, 3).to(torch.uint8)})

    def divide(self, keys: Tensor) -> Tensor:
        """Keys by part. [B, H_kv, n, D] -> [B, H_kv, P, n, D / P] float32"""
        parts: Tensor = keys.float().unflatten(3, (self.parts, -1)).movedim(3, 2)
        return parts

    def centers(self, length: int) -> int:
        """Centers of each part."""
        return int(min(2**self.bits, length - self.sinks))

    def read(self, kv: ChosenKV, step: Step, seen: int) -> Partial:
        """Attention over sinks, recent entries, and those with the largest sum of shares over the group."""
        assert self.rows is not None
        logits = self.approximate(kv, step, seen - self.last)
        shares = logits.new_zeros((*logits.shape[:2], seen))
        shares[..., self.sinks : seen - self.last] = (logits * step.scale).softmax(-1).sum(2)
        return kv.read(step, mark_ends_and_best(shares, self.rows, self.sinks, self.last))

    def approximate(self, kv: ChosenKV, step: Step, stop: int) -> Tensor:
        """Products of a token's queries with the quantized keys after the sinks. [B, H_kv, G, n]"""
        centers, codes = kv.scan(kv.index["centers"]).float(), kv.scan(kv.code("code")[:, :, : stop - self.sinks])
        query = step.query[:, :, 0].float().unflatten(1, (centers.shape[1], -1))  # [B, H_kv, G, D]
        table = query.unflatten(3, (self.parts, -1)).movedim(3, 2) @ centers.mT  # [B, H_kv, P, G, C]
        places = codes.long().movedim(3, 2)[:, :, :, None].expand(-1, -1, -1, query.shape[2], -1)
        products: Tensor = table.gather(4, places).sum(2)
        return products

    def index_bytes(self, layer: LayerShape, shape: Shape) -> int:
        """Bytes of the codes and the centers."""
        codes = (shape.length - self.sinks) * self.parts
        return layer.kv_heads * (codes + self.centers(shape.length) * layer.key_dim * shape.itemsize)

    def token_bytes(self, layer: LayerShape, shape: Shape) -> int:
        """Bytes that a token reads: centers, the codes of all entries but the first and last ones, and entries."""
        skipped = layer.kv_heads * self.last * self.parts
        return self.index_bytes(layer, shape) - skipped + self.entry_bytes(layer, shape)
