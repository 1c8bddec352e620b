"""XAttention: sums along antidiagonals tell which blocks of a prompt's attention hold most of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench.constraints import Positive, Share
from kvbench.errors import UserError
from kvbench.method import Budget, BudgetKind, Card, Shape, Step, Upstream
from kvbench.store.prompt import Chosen
from kvbench.techniques.sparse_prefill import SparsePrefillMethod, cover_mass, first_and_own

TILES = 256
"""Rows of tiles that are scored at a time, rounded to whole blocks."""


@dataclass(frozen=True)
class XAttention(SparsePrefillMethod):
    """Computes, for every block of queries, the fewest blocks with the share `threshold` of the estimated attention."""

    threshold: Share = 0.9
    """Share of a row's estimated attention that its blocks hold."""
    stride: Positive = 8
    """Queries and keys per tile, of which one antidiagonal is summed."""

    card: ClassVar[Card] = Card(
        name="xattention",
        title="XAttention: Block Sparse Attention with Antidiagonal Scoring",
        idea="The logits on the antidiagonal of a small tile touch every query and every key of it once, so their sum "
        "shows any vertical or diagonal pattern. Each block of queries computes only the best blocks by these sums.",
        arxiv="2503.16428",
        year=2025,
        family="prefill",
        stages=("generation",),
        budget=BudgetKind.PROMPT,
        heads="independent",
        upstream=Upstream(repo="mit-han-lab/x-attention", commit="e379887", license=None),
        deviations=(
            ("One threshold for all heads. The paper also has thresholds by head, found by dynamic programming on a "
            "calibration set."),
            ("A row computes the fewest blocks that hold the threshold, the first and the own one included. The "
            "authors' code computes one more in the rows of its first chunk, which is all of a context up to 16,384 "
            "tokens: xattn/src/utils.py, line 101, overwrites the mark of the first block."),
            ("Blocks of a context below 4,096 tokens are smaller than 128 tokens, and tiles are no larger than its "
            "blocks."),
        ),
        limits=(
            "Blocks are chosen by logits without soft caps and learned sinks; the attention itself has them.",
            "It saves arithmetic in the prompt, not memory: every entry is stored, and decode steps read all of them.",
            "The context runs in one pass, whatever --chunk says.",
        ),
    )

    def fit(self, budget: Budget | None, shape: Shape) -> Self:
        """Resolve the size of blocks; refuse tiles that do not fill them (`UserError`)."""
        fitted = super().fit(budget, shape)
        assert fitted.block_size is not None
        if fitted.block_size % min(self.stride, fitted.block_size):
            raise UserError(
                f"xattention: blocks of {fitted.block_size} tokens are not whole tiles of stride={self.stride}. Use a "
                "stride that divides them."
            )
        return fitted

    def choose(self, query: Tensor, key: Tensor, step: Step) -> Chosen:
        """The first block, the own one and those with the largest antidiagonal sums, row by row."""
        assert self.block_size is not None
        batch, heads, tokens, _ = query.shape
        count = -(-tokens // self.block_size)
        always = first_and_own(count, query)
        blocks = torch.empty((batch, heads, count, count), dtype=torch.bool, device=query.device)
        for b in range(batch):
            for head in range(heads):
                mass = self.estimate(query[b, head], key[b, head * key.shape[1] // heads], step.scale)
                blocks[b, head] = cover_mass(mass, self.threshold, always)
        return Chosen(self.block_size, blocks)

    def estimate(self, query: Tensor, key: Tensor, scale: float) -> Tensor:
        """Estimated attention by block of one head. query: [T, D]. key: [T, D]. Returns [T / block, T / block]"""
        assert self.block_size is not None
        stride = min(self.stride, self.block_size)
        count, per_block = -(-len(query) // self.block_size), self.block_size // stride
        pad = (0, 0, 0, count * self.block_size - len(query))
        keys = F.pad(key.float(), pad).unflatten(0, (-1, stride)).flatten(1)  # [tiles, stride * D]
        queries = F.pad(query, pad).unflatten(0, (-1, stride)).flip(1).flatten(1)  # its last query meets the first key
        tile = torch.arange(len(keys), device=query.device)
        rows = []
        for part in tile.split(-(-TILES // per_block) * per_block):
            logits = queries[part].float() @ keys.mT * (scale / stride)
            shares = logits.masked_fill(tile > part[:, None], -torch.inf).softmax(-1)
            shares[part * stride >= len(query)] = 0  # tiles without queries
            rows.append(shares.unflatten(1, (count, per_block)).sum(2).unflatten(0, (-1, per_block)).sum(1))
        return torch.cat(rows)
