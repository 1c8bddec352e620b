"""Every entry, and a count of how much of the prompt's attention was computed."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvbench.kernels.block_attention import block_attention
from kvbench.kernels.blocks import float_products
from kvbench.step import Step
from kvbench.store.facts import Fact
from kvbench.store.layer import LayerKV

SAMPLED = 32
"""Queries per head whose lost attention mass is measured."""
MILLION = 1_000_000


@dataclass(frozen=True)
class Chosen:
    """The entries that every block of a prompt's queries reads."""

    block: int
    """Tokens per block."""
    blocks: Tensor
    """Of queries and entries; each block of queries reads its own one. [B, H_q, T / block, T / block] bool"""
    columns: Tensor | None = None
    """Entries that every later query reads, inside these blocks or not. [B, H_q, T] bool"""

    def visible(self, b: int, head: int, queries: Tensor, entries: Tensor) -> Tensor:
        """Whether queries at these positions read entries at those. Returns [s, n] bool"""
        read = self.blocks[b, head][queries // self.block][:, entries // self.block]
        if self.columns is not None:
            read = read | self.columns[b, head, entries]
        return read & (entries <= queries[:, None])

    def count(self, tokens: int) -> int:
        """Pairs of a query and an entry that it reads, each once, over all heads."""
        sizes = torch.full((self.blocks.shape[2],), self.block, device=self.blocks.device)
        sizes[-1] = tokens - self.block * (len(sizes) - 1)
        before = torch.ones_like(self.blocks[0, 0]).tril(-1)
        # sums of products: CUDA has no matrix product of integers
        pairs = int((sizes * (sizes + 1)).sum()) // 2 * self.blocks[:, :, 0, 0].numel()  # every query's own block
        for heads in self.blocks.flatten(0, 1):
            pairs += int((((heads & before) * sizes).sum(1) * sizes).sum())
        if self.columns is not None:
            padded = torch.nn.functional.pad(self.columns, (0, int(sizes.shape[0]) * self.block - tokens))
            counts = padded.unflatten(2, (-1, self.block)).sum(3).flatten(0, 1)  # [B * H_q, T / block]
            for heads, columns in zip(self.blocks.flatten(0, 1), counts, strict=True):
                pairs += int((((~heads & before) * columns).sum(1) * sizes).sum())
        return pairs


@dataclass
class PromptKV(LayerKV):
    """Every entry. Of the context, each query reads the entries chosen for it; later queries read all."""

    computed: int = field(default=0, init=False)
    """Pairs of a query and an entry whose attention was computed."""
    skipped: int = field(default=0, init=False)
    """Pairs that causal attention has in addition."""
    sampled: int = field(default=0, init=False)
    """Queries, by head, whose lost mass was measured."""
    lost: int = field(default=0, init=False)
    """Sum of their lost mass, in millionths."""
    most_lost: int = field(default=0, init=False)

    def attend_chosen(self, step: Step, chosen: Chosen) -> Tensor:
        """Attention of a whole prompt over the chosen entries. [B, H_q, T, D_v]"""
        self.note(step, chosen)
        return block_attention(
            step.query, self.keys, self.values, chosen.blocks, chosen.columns, block=chosen.block, scale=step.scale,
            softcap=step.softcap, sinks=step.sinks,
        )

    def note(self, step: Step, chosen: Chosen) -> None:
        """Count what these entries are of causal attention, and measure the mass that a sample of queries loses."""
        batch, heads, tokens, _ = step.query.shape
        assert tokens == self.n == step.seen, "entries are chosen for a whole prompt"
        pairs = chosen.count(tokens)
        self.computed += pairs
        self.skipped += batch * heads * (tokens * (tokens + 1) // 2) - pairs
        queries = torch.linspace(0, tokens - 1, min(tokens, SAMPLED), device=step.query.device).round().long()
        entries = torch.arange(tokens, device=queries.device)
        group = heads // self.keys.shape[1]
        for b in range(batch):
            for head in range(heads):
                key = self.keys[b, head // group]
                logits = float_products(step.query[b, head, queries], key) * step.scale  # [s, T]
                if step.softcap is not None:
                    logits = step.softcap * torch.tanh(logits / step.softcap)
                logits.masked_fill_(entries > queries[:, None], -torch.inf)
                if step.sinks is not None:
                    logits = torch.cat([logits, step.sinks[head].float().expand(len(queries), 1)], dim=1)
                mass = logits.softmax(-1)[:, :tokens]
                lost = (mass * ~chosen.visible(b, head, queries, entries)).sum(-1) * MILLION
                self.sampled += len(queries)
                self.lost += int(lost.sum())
                self.most_lost = max(self.most_lost, int(lost.max()))

    def facts(self) -> dict[str, Fact]:
        """Pairs computed and skipped, and the attention mass that a sample of the prompt's queries lost."""
        return {
            **super().facts(), "prompt_pairs_computed": Fact(self.computed),
            "prompt_pairs_skipped": Fact(self.skipped, changed=True), "sampled_queries": Fact(self.sampled),
            "lost_mass_millionths": Fact(self.lost), "worst_lost_mass_millionths": Fact(self.most_lost, maximum=True),
        }
