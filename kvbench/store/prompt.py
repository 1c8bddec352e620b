"""Every entry, and a count of how much of the prompt's attention was computed."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvbench.kernels.block_attention import block_attention
from kvbench.kernels.blocks import fit_block, float_products
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

    def visible(self, b: int | slice, head: int | slice, queries: Tensor, entries: Tensor) -> Tensor:
        """Whether queries at these positions read entries at those. Returns [s, n] bool, or [b, h, s, n] of slices"""
        read = self.blocks[b, head][..., queries // self.block, :][..., entries // self.block]
        if self.columns is not None:
            read = read | self.columns[b, head][..., None, entries]
        return read & (entries <= queries[:, None])

    def count(self, tokens: int) -> Tensor:
        """Pairs of a query and an entry that it reads, each once, over all heads. On the device, int64"""
        count = self.blocks.shape[2]
        sizes = torch.full((count,), self.block, device=self.blocks.device)
        sizes[-1] = last = tokens - self.block * (count - 1)
        before = torch.ones_like(self.blocks[0, 0]).tril(-1)
        own = (count - 1) * self.block * (self.block + 1) // 2 + last * (last + 1) // 2  # in every query's own block
        # Sums of products: CUDA has no matrix product of integers. No block before another is the last one.
        pairs = ((self.blocks & before).sum(3) * sizes * self.block).sum() + own * self.blocks[:, :, 0, 0].numel()
        if self.columns is not None:
            padded = torch.nn.functional.pad(self.columns, (0, count * self.block - tokens))
            counts = padded.unflatten(2, (-1, self.block)).sum(3).flatten(0, 1)  # [B * H_q, T / block]
            for heads, columns in zip(self.blocks.flatten(0, 1), counts, strict=True):
                pairs = pairs + (((~heads & before) * columns).sum(1) * sizes).sum()
        return pairs


@dataclass
class PromptKV(LayerKV):
    """Every entry. Of the context, each query reads the entries chosen for it; later queries read all."""

    pairs: int = field(default=0, init=False)
    """Pairs of a query and an entry that causal attention has."""
    sampled: int = field(default=0, init=False)
    """Queries, by head, whose lost mass was measured."""
    _counts: Tensor | None = field(default=None, init=False)
    """Pairs whose attention was computed, the sum of the lost mass in millionths, and the most of a query. [3] int64

    On the device until facts are read, so that no prefill waits for them.
    """

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
        queries = torch.linspace(0, tokens - 1, min(tokens, SAMPLED), device=step.query.device).round().long()
        lost = self._lose(step, chosen, queries)
        found = torch.stack([chosen.count(tokens), lost.sum(-1).long().sum(), lost.max().long()])
        if self._counts is not None:
            found = torch.cat([self._counts[:2] + found[:2], torch.maximum(self._counts[2:], found[2:])])
        self._counts = found
        self.pairs += batch * heads * (tokens * (tokens + 1) // 2)
        self.sampled += batch * heads * len(queries)

    def _lose(self, step: Step, chosen: Chosen, queries: Tensor) -> Tensor:
        """Mass that these queries lose, in millionths. [B, H_q, s] float32"""
        batch, heads, tokens, _ = step.query.shape
        entries = torch.arange(tokens, device=queries.device)
        kv_heads = self.keys.shape[1]
        group = heads // kv_heads
        lost = []
        size = fit_block(32 * batch * group * len(queries) * tokens, self.keys)  # small: a CPU's cache holds 100,000
        for low in range(0, kv_heads, size):
            some = slice(low * group, (low + size) * group)
            keys = self.keys[:, low : low + size]
            grouped = step.query[:, some, queries].unflatten(1, (keys.shape[1], -1)).flatten(2, 3)
            logits = float_products(grouped, keys).unflatten(2, (group, -1)).flatten(1, 2)  # [B, h, s, T]
            logits.mul_(step.scale)
            logits = step.cap(logits)
            logits.masked_fill_(entries > queries[:, None], -torch.inf)
            if step.sinks is not None:
                column = step.sinks[some].float().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
                logits = torch.cat([logits, column], dim=3)
            mass = logits.softmax(-1)[..., :tokens]
            lost.append(mass.masked_fill_(chosen.visible(slice(None), some, queries, entries), 0).sum(-1) * MILLION)
        return torch.cat(lost, dim=1)

    def facts(self) -> dict[str, Fact]:
        """Pairs computed and skipped, and the attention mass that a sample of the prompt's queries lost."""
        computed, lost, most = (0, 0, 0) if self._counts is None else self._counts.tolist()
        return {
            **super().facts(), "prompt_pairs_computed": Fact(computed),
            "prompt_pairs_skipped": Fact(self.pairs - computed, changed=True), "sampled_queries": Fact(self.sampled),
            "lost_mass_millionths": Fact(lost), "worst_lost_mass_millionths": Fact(most, maximum=True),
        }
