"""Non-causal attention: scores entries by the attention within blocks of the context, later queries included or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.constraints import Positive
from kvbench.method import BudgetKind, Card, Shape, Step, Upstream
from kvbench.selection import ScoredMethod, pool_scores
from kvbench.store import LayerKV
from kvbench.store.layer import SCORE_BYTES


@dataclass(frozen=True)
class BlockAttention(ScoredMethod):
    """Sums the attention of every query of a block of the context to every key of that block, causal or not."""

    block: Positive = 256
    """Tokens per block."""
    scaled: bool = True
    """Whether logits have the model's scale."""

    recompressible: ClassVar[str | None] = "it sums attention within blocks of the context only."

    def outer_tokens(self) -> tuple[int, int]:
        """First and last tokens of the context that belong to no block."""
        return 0, 0

    def running_bytes(self, shape: Shape) -> int:
        """Bytes of an incomplete block's queries and keys, and of the sums."""
        held = min(shape.length, self.block + self.outer_tokens()[1])
        return super().running_bytes(shape) + sum(
            held * (x.query_heads + x.kv_heads) * x.key_dim * shape.itemsize + shape.length * x.kv_heads * SCORE_BYTES
            for x in shape.layers
        )

    def attend(self, kv: LayerKV, step: Step) -> Tensor:
        """Attention over every entry; sums up the blocks that the context's tokens complete. [B, H_q, T, D_v]"""
        if step.moment.in_context:
            self._observe(kv, step)
        return kv.attend(step)

    def evict(self, kv: LayerKV, step: Step) -> None:
        """Compress as every scorer does, and free the sums."""
        super().evict(kv, step)
        if step.moment.compresses:
            for name in ("query", "key", "mass"):
                kv.state.pop(name, None)

    def _observe(self, kv: LayerKV, step: Step) -> None:
        first, last = self.outer_tokens()
        inner = step.positions[0] >= first
        query, key = step.query[:, :, inner], step.key[:, :, inner]
        if "query" in kv.state:
            query, key = torch.cat([kv.state["query"], query], dim=2), torch.cat([kv.state["key"], key], dim=2)
        ready = max(0, query.shape[2] - last)
        if not step.moment.compresses:
            ready -= ready % self.block
        old = kv.state.get("mass", query.new_zeros((*key.shape[:2], 0), dtype=torch.float32))
        blocks = [slice(x, min(x + self.block, ready)) for x in range(0, ready, self.block)]
        new = [self._sum(query[:, :, x], key[:, :, x], step.scale if self.scaled else 1.0) for x in blocks]
        kv.state["mass"] = torch.cat([old, *new], dim=-1)
        kv.state["query"], kv.state["key"] = query[:, :, ready:].clone(), key[:, :, ready:].clone()

    def _sum(self, query: Tensor, key: Tensor, scale: float) -> Tensor:
        """Attention that each key of a block receives from the block, mean over its group's heads. [B, H_kv, t]"""
        grouped = query.unflatten(1, (key.shape[1], -1)).flatten(2, 3)  # [B, H_kv, G * t, D]
        weights: Tensor = (grouped.float() @ key.float().mT * scale).softmax(-1).unflatten(2, (-1, key.shape[2]))
        return weights.sum(3).mean(2)

    def weigh(self, kv: LayerKV) -> Tensor:
        """Attention sums times value norms, smoothed over three entries, of the entries in blocks. [B, H_kv, m]"""
        stop = max(0, kv.n - self.outer_tokens()[1])
        mass = kv.state["mass"]
        mass = mass[..., max(0, mass.shape[-1] - stop) :]  # a sliding layer stores no entries that its window left
        values = kv.values[:, :, stop - mass.shape[-1] : stop]
        return pool_scores(mass * values.float().norm(dim=-1), 3, "avg")


@dataclass(frozen=True)
class NonCausal(BlockAttention):
    """Keeps, per KV head, the entries with the most attention within their block, times the norm of the value."""

    card: ClassVar[Card] = Card(
        name="noncausal",
        title="Compactor: Calibrated Query-Agnostic KV Cache Compression with Approximate Leverage Scores",
        idea="Causal attention sums favor early tokens. "
        "Attention within blocks, from earlier queries to later keys too, has no such bias and needs no question.",
        arxiv="2507.08143",
        year=2025,
        family="eviction",
        stages=("compression",),
        budget=BudgetKind.STORED,
        heads="independent",
        upstream=Upstream(repo="NVIDIA/kvpress", commit="8bb29b9", license="Apache-2.0"),
        deviations=(
            "One part of Compactor alone, as kvpress offers it.",
            ("Tokens that fill up the last block are left out. kvpress sets their logits to 0 as queries and to -1e-9 "
            "as keys, which leaves both in its sums."),
            "Scores are not standardized: within a head that changes no choice.",
            ("Logits have the model's scale. kvpress and the authors' engine leave it out, and the paper's formula has "
            "none (scaled=false)."),
        ),
        unverified=(
            ("Value norms as a factor of attention: kvpress's; by summaries of the paper, which we did not have, its "
            "formula has none."),
        ),
        limits=("Soft caps and learned sink logits of the model are not applied: this is not its own attention.",),
    )

    def score(self, kv: LayerKV, step: Step) -> Tensor:
        """Attention within blocks times value norm. [B, H_kv, n]"""
        return self.weigh(kv)
