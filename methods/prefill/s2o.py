"""S2O: blocks are visited from the most promising one on, until one adds almost nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.constraints import Positive, Share
from kvbench.kernels.ragged_attention import Partial, merge_partials
from kvbench.method import BudgetKind, Card, Step
from kvbench.methods.prefill.patterns import pool_blocks
from kvbench.store.prompt import Chosen, PromptKV
from kvbench.techniques.sparse_prefill import SparsePrefillMethod


@dataclass(frozen=True)
class S2O(SparsePrefillMethod):
    """Each segment of queries stops at the first block that adds less than `tau` of the mass so far to every query."""

    tau: Share = 0.01
    """Share of the accumulated mass below which a block's mass ends the visit."""
    segment: Positive = 2
    """Blocks of queries that rank and stop together."""

    card: ClassVar[Card] = Card(
        name="s2o",
        version="2",
        title="S2O: Early Stopping for Sparse Attention via Online Permutation",
        idea="Earlier blocks are ranked by their mean key's product with a segment's mean query. The segment visits "
        "them in this order by index, and stops once a block adds almost nothing to the softmax.",
        arxiv="2602.22575",
        year=2026,
        family="prefill",
        stages=("generation",),
        budget=BudgetKind.PROMPT,
        heads="independent",
        upstream=None,
        deviations=(
            "The queries of a segment keep their order; the paper groups those with similar directions.",
        ),
        unverified=(
            ("No code was published when this was written, and we did not have the paper: the method follows summaries "
            "of it."),
            ("tau and segment: we did not have the paper's values; 0.001 to 0.01 is assumed for tau. With tau=0.05, "
            "the default of version 1, a sample of queries lost a third of its attention at 8,192 tokens on "
            "SmolLM2-135M (docs/performance.md)."),
            "A segment stops when the block adds less than tau for every one of its queries.",
        ),
        limits=(
            ("The rule to stop is greedy: a heavy block after a light one is lost. `worst_lost_mass_millionths` of the "
            "effect check shows it."),
            "It saves arithmetic in the prompt, not memory: every entry is stored, and decode steps read all of them.",
            "The context runs in one pass, whatever --chunk says.",
        ),
    )

    def attend_prompt(self, kv: PromptKV, step: Step) -> Tensor:
        """Attention segment by segment, all heads of a sequence at once; then counts what was visited."""
        assert self.block_size is not None
        batch, heads, tokens, _ = step.query.shape
        count = -(-tokens // self.block_size)
        blocks = torch.zeros((batch, heads, count, count), dtype=torch.bool, device=step.query.device)
        output = step.value.new_empty((batch, heads, tokens, step.value.shape[3]))
        size = self.segment * self.block_size
        for b in range(batch):
            for low in range(0, tokens, size):
                found, visited = self.visit(kv, step, b, low, min(low + size, tokens))
                output[b, :, low : low + size] = merge_partials([found], step.sinks)[0].to(output.dtype)
                rows = slice(low // self.block_size, low // self.block_size + self.segment)
                blocks[b, :, rows, : visited.shape[1]] = visited[:, None]
                blocks[b, :, rows, visited.shape[1] : rows.stop] = True
        kv.note(step, Chosen(self.block_size, blocks))
        return output

    def visit(self, kv: PromptKV, step: Step, b: int, low: int, stop: int) -> tuple[Partial, Tensor]:
        """Attention of the queries from `low` to `stop` of one sequence, and the earlier blocks that were visited.

        Returns [1, H_q, s, D_v], and [H_q, low / block] bool.
        """
        assert self.block_size is not None
        query = step.query[b, :, low:stop]  # [H_q, s, D]
        keys, values = kv.keys[b], kv.values[b]
        heads, group = len(query), len(query) // len(keys)
        own = torch.arange(heads, device=query.device) // group  # each query head's KV head
        logits = self.logits(query, keys[own, low:stop], step)
        later = torch.ones_like(logits[0], dtype=torch.bool).triu(1)
        logits.masked_fill_(later, -torch.inf)
        top = logits.amax(-1)
        weights = (logits - top[..., None]).exp()
        total, sums = weights.sum(-1), weights @ values[own, low:stop].float()
        count = low // self.block_size
        visited = torch.zeros((heads, count), dtype=torch.bool, device=query.device)
        active = torch.arange(heads if count else 0, device=query.device)
        if count:
            means = torch.stack([pool_blocks(x[:low], self.block_size) for x in keys])[own]  # [H_q, count, D]
            order = (means @ query.float().mean(1)[..., None])[..., 0].argsort(dim=-1, descending=True, stable=True)
            paged_keys, paged_values = (x[:, :low].unflatten(1, (count, -1)) for x in (keys, values))
        for place in range(count):
            block = order[active, place]
            visited[active, block] = True
            logits = self.logits(query[active], paged_keys[own[active], block], step)
            higher = torch.maximum(top[active], logits.amax(-1))
            shrink, weights = (top[active] - higher).exp(), (logits - higher[..., None]).exp()
            before, gain = total[active] * shrink, weights.sum(-1)
            total[active], top[active] = before + gain, higher
            more = weights @ paged_values[own[active], block].float()
            sums[active] = sums[active] * shrink[..., None] + more
            active = active[(gain >= self.tau * before).any(-1)]
            if not len(active):
                break
        return Partial((sums / total[..., None])[None], (top + total.log())[None]), visited

    def logits(self, query: Tensor, key: Tensor, step: Step) -> Tensor:
        """Scaled products. query: [h, s, D]. key: [h, n, D]. Returns [h, s, n] float32"""
        return step.cap(query.float() @ key.float().mT * step.scale)
