"""Keyformer: as H2O, with noise on the logits and a temperature, so that dropped tokens do not distort the scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from kvbench.constraints import Ge, Gt, Share
from kvbench.kernels.blocks import fit_block, float_products
from kvbench.kernels.dense_attention.torch import hide_unseen
from kvbench.method import BudgetKind, Card, Step, Upstream
from kvbench.selection import RollingMethod, mark_recent
from kvbench.store import LayerKV

QUERY_BIT, HEAD_BIT = 25, 50
"""Where a query's position and a head's index begin in the number of a pair; the key's position comes first."""
DRAWN = (1 << 23) - 1
"""Bits of a number that are used: as many as float32 holds exactly next to the half that keeps it from 0 and 1."""


@dataclass(frozen=True)
class Keyformer(RollingMethod):
    """Keeps, per KV head, the entries with the most accumulated noisy attention, and recent ones, at every step."""

    recent: Share = 0.3
    """Share of the budget for the most recent entries."""
    temperature: Annotated[float, Gt(0)] = 1.0
    """Temperature of the scores' softmax in the context."""
    rise: Annotated[float, Ge(0)] = 0.01
    """Added to the temperature with every token after the context."""
    seed: int = 0

    card: ClassVar[Card] = Card(
        name="keyformer",
        version="2",
        title="Keyformer: KV Cache Reduction through Key Tokens Selection for Efficient Generative Inference",
        idea="Dropping entries moves attention to those that stay, in favor of early ones. "
        "So scores accumulate a softmax over logits with Gumbel noise, whose temperature rises while decoding.",
        arxiv="2403.09054",
        year=2024,
        family="eviction",
        stages=("compression",),
        budget=BudgetKind.STORED,
        paper_budget="60%",
        heads="indexed",
        upstream=Upstream(repo="d-matrix-ai/keyformer-llm", commit="f327831", license="Apache-2.0"),
        deviations=(
            "Scores are summed over the query heads of a KV head; the paper has no grouped queries.",
            "The number of recent entries is rounded to the nearest; the authors round it down.",
            "Dropped entries are freed; the code of the authors' three models masks them.",
            ("An entry that leaves the recent ones competes with the older ones, as in the paper. The code of the "
            "authors' three models drops it: its mask counts the next token as recent, its choice does not."),
            ("The temperature rises by 0.01 with every token, the default of the authors' models. The paper and their "
            "programs for summaries and conversations divide a rise from 1 to 2 by the tokens to generate."),
            ("Noise depends on the seed, the layer, the head and the positions of query and key, so that the size of "
            "chunks does not matter. The sequences of a batch share it, and each has its own scores."),
            "The tokens of a later question raise the temperature like generated tokens; the paper has one prompt.",
        ),
        limits=(
            "A number is drawn for every pair of query and key in every head, which takes longer than the attention.",
        ),
    )

    graphable: ClassVar[str | None] = None

    def minimum_entries(self) -> int:
        """One entry to choose and one recent entry."""
        return 2

    def layer(self, index: int) -> LayerKV:
        """A store with scores and positions, in which entries are dropped in place."""
        del index
        return LayerKV(entry_state=("score",), track=True, bounded=True)

    def attend(self, kv: LayerKV, step: Step) -> Tensor:
        """Attention over every entry, after adding the scores of the new queries. [B, H_q, T, D_v]"""
        if self.rows is not None:
            kv.get_entry_state("score").add_(self.noisy_sums(kv, step))
        return kv.attend(step)

    def score(self, kv: LayerKV, step: Step, entries: int) -> Tensor:
        """Accumulated scores; infinite for recent entries. [B, H_kv, n]"""
        recent = mark_recent(kv, step, round(entries * self.recent))
        return kv.get_entry_state("score").masked_fill(recent, torch.inf)

    def noisy_sums(self, kv: LayerKV, step: Step) -> Tensor:
        """The softmax of noisy logits, summed over the new queries and the heads of the group. [B, H_kv, n] float32"""
        assert kv.positions is not None and self.length is not None
        keys, count = kv.keys, step.query.shape[2]
        before = kv.n - count
        sums = torch.zeros(keys.shape[:3], dtype=torch.float32, device=keys.device)
        queries = step.query.unflatten(1, (keys.shape[1], -1))  # [B, H_kv, G, T, D]
        size = fit_block(queries.shape[:3].numel() * kv.n, queries)
        for start in range(0, count, size):
            stop = min(start + size, count)
            some, high = queries[:, :, :, start:stop], before + stop
            logits = float_products(some.flatten(2, 3), keys[:, :, :high]).unflatten(2, some.shape[2:4]) * step.scale
            logits = step.cap(logits)
            positions = kv.positions[:, :, :high]
            first = step.seen - count + start
            asked = step.positions[0, start:stop]
            logits = logits + self.draw_noise(step, asked, positions)
            after = (asked - self.length + 1).clamp_min(0)
            logits = logits / (self.temperature + self.rise * after)[:, None]
            logits = hide_unseen(logits, before + start, step.window, positions, first)
            sums[:, :, :high] += logits.softmax(-1).sum((2, 3))
        return sums

    def draw_noise(self, step: Step, queries: Tensor, positions: Tensor) -> Tensor:
        """Gumbel noise by query head, query and key, the same wherever a pair occurs. [B, H_kv, G, t, n]

        queries: positions of the queries, [t]. positions: of the keys, [B, H_kv, n].
        """
        device, heads, kv_heads = positions.device, step.query.shape[1], positions.shape[1]
        group = torch.arange(heads, device=device).view(1, kv_heads, -1, 1, 1)
        pair = (queries[:, None] << QUERY_BIT) + (group << HEAD_BIT) + positions[:, :, None, None].long()
        drawn = mix(pair + seed_of(self.seed, step.layer)) & DRAWN
        uniform = (drawn.float() + 0.5) / (DRAWN + 1)
        return -(-uniform.log()).log()


def mix(numbers: Tensor) -> Tensor:
    """Hash every number to 64 bits, as the finalizer of SplitMix64 (Steele et al. 2014), on the tensor's device."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        numbers = (numbers ^ (numbers >> shift & (1 << 64 - shift) - 1)) * (factor - (1 << 64))
    return numbers ^ (numbers >> 31 & (1 << 33) - 1)


def seed_of(seed: int, layer: int) -> int:
    """The number that is added to every pair of a layer."""
    return (seed * 1_000_003 + layer) * 0x9E3779B97F4A7C15 % (1 << 63)
