"""FlexPrefill: every head chooses its pattern for this prompt, and as many entries as its attention needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench.constraints import Share
from kvbench.method import BudgetKind, Card, Step, Upstream
from kvbench.methods.prefill.patterns import diagonal_sums, last_attention, pool_blocks
from kvbench.store.prompt import Chosen
from kvbench.techniques.sparse_prefill import SparsePrefillMethod, cover_mass, first_and_own


@dataclass(frozen=True)
class FlexPrefill(SparsePrefillMethod):
    """Blocks by pooled queries and keys where these predict the last queries' attention, else verticals and slashes."""

    gamma: Share = 0.9
    """Share of the estimated attention that is computed."""
    tau: Share = 0.1
    """Distance of estimated from true attention of the last queries up to which the estimate is used."""

    card: ClassVar[Card] = Card(
        name="flexprefill",
        title="FlexPrefill: A Context-Aware Sparse Attention Mechanism for Efficient Long-Sequence Inference",
        idea="The last queries show, for each head and prompt, whether pooled queries and keys predict attention. If "
        "so, blocks are chosen by them, else columns and diagonals; in both cases until a share of it is covered.",
        arxiv="2502.20766",
        year=2025,
        family="prefill",
        stages=("generation",),
        budget=BudgetKind.PROMPT,
        heads="independent",
        upstream=Upstream(
            repo="microsoft/MInference", commit="fb56c917f618e8645f1cfc37535afd7424d78f0d", license="MIT"
        ),
        deviations=(
            ("Columns and diagonals are whole blocks, the fewest that cover `gamma`; the paper's are single ones. The "
            "port in microsoft/MInference takes as many blocks as the tokens that cover it fill, and counts the first "
            "block among them, so that a single heavy column elsewhere is lost."),
            "The last, partial block is pooled over its own tokens.",
            "A least and a largest number of tokens per head, which the code has as options, are not there.",
        ),
        limits=(
            "It saves arithmetic in the prompt, not memory: every entry is stored, and decode steps read all of them.",
            "The context runs in one pass, whatever --chunk says.",
            ("The port in microsoft/MInference hands the size of blocks to another parameter, `gqa_interleave`, by "
            "position."),
        ),
    )

    def choose(self, query: Tensor, key: Tensor, step: Step) -> Chosen:
        """Every head's own pattern."""
        assert self.block_size is not None
        batch, heads, tokens, _ = query.shape
        count = -(-tokens // self.block_size)
        blocks = torch.empty((batch, heads, count, count), dtype=torch.bool, device=query.device)
        for b in range(batch):
            for head in range(heads):
                blocks[b, head] = self.choose_head(query[b, head], key[b, head * key.shape[1] // heads], step.scale)
        return Chosen(self.block_size, blocks | first_and_own(count, query))

    def choose_head(self, query: Tensor, key: Tensor, scale: float) -> Tensor:
        """The blocks of one head. query: [T, D]. key: [T, D]. Returns [T / block, T / block] bool"""
        assert self.block_size is not None
        shares = last_attention(query, key, self.block_size, scale)  # [w, T]
        pooled_keys = pool_blocks(key, self.block_size)
        estimate = (query[-len(shares) :].float().mean(0) @ pooled_keys.mT * scale).softmax(-1)
        true = self.sum_blocks(shares.mean(0))
        if root_divergence(estimate, true) < self.tau:
            return self.by_pooling(pool_blocks(query, self.block_size), pooled_keys, scale)
        return self.by_lines(shares)

    def by_pooling(self, queries: Tensor, keys: Tensor, scale: float) -> Tensor:
        """The best blocks of all rows together. queries, keys: [T / block, D]"""
        logits = queries @ keys.mT * scale
        later = torch.ones_like(logits, dtype=torch.bool).triu(1)
        mass = logits.masked_fill(later, -torch.inf).softmax(-1)
        none = torch.zeros_like(later).flatten()
        return cover_mass(mass.flatten(), self.gamma, none).view_as(later)

    def by_lines(self, shares: Tensor) -> Tensor:
        """The best columns and diagonals of blocks. shares: attention of the last queries, [w, T]"""
        columns, diagonals = (
            cover_mass(sums, self.gamma, torch.zeros_like(sums, dtype=torch.bool))
            for sums in map(self.sum_blocks, (shares.mean(0), diagonal_sums(shares) / len(shares)))
        )
        row = torch.arange(len(columns), device=shares.device)
        return columns | diagonals[(row[:, None] - row).clamp_min(0)]

    def sum_blocks(self, line: Tensor) -> Tensor:
        """Sums over blocks. line: [T]. Returns [T / block]"""
        assert self.block_size is not None
        sums: Tensor = F.pad(line, (0, -len(line) % self.block_size)).unflatten(0, (-1, self.block_size)).sum(1)
        return sums


def root_divergence(p: Tensor, q: Tensor) -> float:
    """The root of the Jensen-Shannon divergence of two distributions, in nats. p, q: [n]"""
    middle = (p + q) / 2
    halves = [torch.xlogy(x, x / middle.clamp_min(1e-30)).sum() for x in (p, q)]
    return float(((halves[0] + halves[1]) / 2).clamp_min(0).sqrt())
