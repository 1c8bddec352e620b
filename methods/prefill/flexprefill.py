"""FlexPrefill: every head chooses its pattern for this prompt, and as many entries as its attention needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench.constraints import Positive, Share
from kvbench.method import BudgetKind, Card, Shape, Step, Upstream
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
    least: Positive = 1024
    """Tokens of whole columns, and as many of diagonals, that every head computes at least."""

    card: ClassVar[Card] = Card(
        name="flexprefill",
        title="FlexPrefill: A Context-Aware Sparse Attention Mechanism for Efficient Long-Sequence Inference",
        idea="The last queries show, for each head and prompt, whether pooled queries and keys predict attention. If "
        "so, blocks are chosen by them, else columns and diagonals; in both cases until a share of it is covered.",
        arxiv="2502.20766",
        year=2025,
        version="2",
        family="prefill",
        stages=("generation",),
        budget=BudgetKind.PROMPT,
        heads="independent",
        upstream=Upstream(
            repo="ByteDance-Seed/FlexPrefill", commit="a24b27bf117fd6ad4ba34b0db82c598e7786fd59", license="Apache-2.0"
        ),
        deviations=(
            ("Columns and diagonals are whole blocks, the fewest that cover `gamma`; the paper's are single ones. The "
            "authors' code takes as many blocks as the tokens that cover it fill, and counts the first block among "
            "them, so that above `least` a single heavy column elsewhere can be lost."),
            "Pooled blocks are the fewest that cover `gamma`; the authors' code leaves out the last one of these.",
            ("Diagonals are grouped in blocks from the nearest one on; the authors' code groups them from the most "
            "distant one, which differs where blocks do not divide the context."),
            ("Blocks of a short context are smaller than 128 tokens, and `least` stays in tokens: more of these blocks "
            "fill it."),
            "A largest number of tokens per head, an option of the authors' code that they do not use, is not there.",
        ),
        unverified=(
            ("gamma: as the authors run Yi-9B and Qwen2-7B; they run Llama-3.1-8B and GLM-4-9B at 0.95. least: as in "
            "all their scripts; their README has 512."),
        ),
        limits=(
            ("Contexts of up to `least` tokens are computed whole, as in the authors' code, and those of twice as many "
            "nearly so: by default the method has no effect at 1,024 tokens. The curated run there has least=256, a "
            "quarter of the context, as 1,024 tokens are of the authors' shortest."),
            "Blocks are chosen by logits without soft caps and learned sinks; the attention itself has them.",
            "It saves arithmetic in the prompt, not memory: every entry is stored, and decode steps read all of them.",
            "The context runs in one pass, whatever --chunk says.",
            ("The port in microsoft/MInference (fb56c91) hands the size of blocks to another parameter, "
            "`gqa_interleave`, by position."),
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
            pooled = self.by_pooling(pool_blocks(query, self.block_size), pooled_keys, scale)
            return pooled | self.by_lines(shares, 0)
        return self.by_lines(shares, self.gamma)

    def by_pooling(self, queries: Tensor, keys: Tensor, scale: float) -> Tensor:
        """The best blocks of all rows together. queries, keys: [T / block, D]"""
        logits = queries @ keys.mT * scale
        later = torch.ones_like(logits, dtype=torch.bool).triu(1)
        mass = logits.masked_fill(later, -torch.inf).softmax(-1)
        none = torch.zeros_like(later).flatten()
        return cover_mass(mass.flatten(), self.gamma, none).view_as(later)

    def by_lines(self, shares: Tensor, share: float) -> Tensor:
        """The best columns and diagonals of blocks. shares: attention of the last queries, [w, T]. share: to cover"""
        columns, diagonals = (
            self.take(self.sum_blocks(x), share) for x in (shares.mean(0), diagonal_sums(shares) / len(shares))
        )
        row = torch.arange(len(columns), device=shares.device)
        return columns | diagonals[(row[:, None] - row).clamp_min(0)]

    def take(self, sums: Tensor, share: float) -> Tensor:
        """The fewest lines with this share, and `least` tokens of the best ones, with the first. [T / block] bool"""
        found = cover_mass(sums, share, torch.zeros_like(sums, dtype=torch.bool))
        ranked = sums.clone()
        ranked[0] = torch.inf
        found[ranked.argsort(descending=True, stable=True)[: self.least_blocks]] = True
        return found

    @property
    def least_blocks(self) -> int:
        """Columns of blocks, and diagonals, that every head computes at least."""
        assert self.block_size is not None
        return -(-self.least // self.block_size)

    def identity(self, shape: Shape) -> bool:
        """Whether every block of a context of this length is computed."""
        assert self.block_size is not None
        return shape.length <= max(2, self.least_blocks) * self.block_size

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
