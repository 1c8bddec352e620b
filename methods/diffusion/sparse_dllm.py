"""Sparse-dLLM: outside the current block, only entries that the block attends to are kept (arXiv 2508.02558)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.constraints import Ge, Gt, Le, Natural, Odd
from kvbench.diffusion.policy import Denoising, PassPlan, Policy
from kvbench.method import BudgetKind, Card, Step, Upstream
from kvbench.store.positions import PositionKV


@dataclass
class KeptKV(PositionKV):
    """Entries outside a block that were kept, in any order, which full attention does not depend on."""

    kept: tuple[Tensor, Tensor] | None = field(default=None, init=False)  # keys, values [B, H_kv, n, D]

    def nbytes(self) -> int:
        """Bytes of the kept entries; those of the block are recomputed by every pass."""
        return 0 if self.kept is None else sum(x.untyped_storage().nbytes() for x in self.kept)


@dataclass(frozen=True)
class SparseDllm(Policy):
    """keep: share of the entries outside the block. pool: width of the max pooling of scores.

    delay: the full pass whose entries are kept, counted from 0 at the start of a block. by_head: select per KV head.
    """

    keep: Annotated[float, Gt(0), Le(1)] = 0.5
    pool: Annotated[int, Ge(1), Odd] = 3
    delay: Natural = 1
    by_head: bool = False

    card: ClassVar[Card] = Card(
        name="sparse-dllm", title="Sparse-dLLM", models="diffusion",
        idea="After the first full passes of a block, only entries outside it that its queries attend to are kept. "
             "The block attends to these and itself until it is complete.",
        arxiv="2508.02558", year=2025, family="diffusion", stages=("generation", "compression"),
        budget=BudgetKind.NONE, heads="pooled",
        upstream=Upstream(repo="OpenMOSS/Sparse-dLLM", commit="3fd8986", license=None),
        deviations=(
            ("with a shifted head the position before the block is computed as a part of the block; the reference "
            "commits the block's first token, and no other, from the block's first full pass, whatever its confidence"),
        ),
        unverified=("by_head is dLLM-Serve's head_select, known from its code only",),
    )

    def store(self, length: int) -> PositionKV:
        """A store of entries in any order."""
        return KeptKV(length)

    def begin(self, d: Denoising) -> None:
        """Drop the entries kept for the last block."""
        for kv in d.stores:
            assert isinstance(kv, KeptKV)
            kv.kept = None

    def plan(self, d: Denoising) -> PassPlan:
        """All tokens up to the selecting pass, then the block."""
        return PassPlan() if d.step <= self.delay else PassPlan(compute=self._block(d))

    def look(self, d: Denoising, kv: PositionKV, plan: PassPlan, step: Step) -> Tensor:
        """Full passes attend to themselves, the others to the kept entries and themselves."""
        assert isinstance(kv, KeptKV)
        if plan.compute is None:
            if d.step == self.delay:
                kv.kept = self._choose(d, kv, step)
            return kv.attend_over(step, step.key, step.value)
        assert kv.kept is not None
        keys, values = (torch.cat([old, new], dim=2) for old, new in zip(kv.kept, (step.key, step.value), strict=True))
        return kv.attend_over(step, keys, values)

    def _block(self, d: Denoising) -> Tensor:
        block = d.within(d.start, d.end).expand_as(d.ids)
        return block | d.predictors(block)

    def _choose(self, d: Denoising, kv: KeptKV, step: Step) -> tuple[Tensor, Tensor]:
        """The entries outside the block whose keys have the greatest products with the block's mean query."""
        block = self._block(d)[0]
        query = step.query[:, :, block].float().mean(2)  # [B, H_q, D]
        heads = step.key.shape[1]
        query = query.view(len(query), heads, -1, query.shape[-1])
        outside = [x[:, :, ~block] for x in (step.key, step.value)]
        kv.read_bytes += outside[0].nbytes  # in addition to the attention's reads
        products = query @ outside[0].float().transpose(2, 3)  # [B, H_kv, G, R]
        scores = products.amax(2) if self.by_head else products.mean((1, 2), keepdim=True)[:, 0].expand(-1, heads, -1)
        if scores.shape[-1]:  # empty if the block is the whole sequence
            scores = F.max_pool1d(scores, self.pool, stride=1, padding=self.pool // 2)
        count = int(self.keep * scores.shape[-1])
        if self.by_head:
            count = min(max(count, 1), scores.shape[-1])  # dLLM-Serve keeps one entry at least
        index = scores.topk(count, dim=-1).indices[..., None]
        keys, values = (x.gather(2, index.expand(-1, -1, -1, x.shape[-1])) for x in outside)
        return keys, values


@dataclass(frozen=True)
class DllmServe(SparseDllm):
    """As sparse-dllm, with a selection of its own in every KV head."""

    by_head: bool = True

    card: ClassVar[Card] = Card(
        name="dllm-serve", title="dLLM-Serve: Taming the Memory Footprint Crisis", models="diffusion",
        idea="Sparse-dLLM's cache with a selection for every KV head: its entries are scored by the block's mean "
             "queries of its own query heads. All heads keep equally many, so attention stays a dense operation.",
        arxiv="2512.17077", year=2025, family="diffusion", stages=("generation", "compression"),
        budget=BudgetKind.NONE, heads="independent",
        upstream=Upstream(repo="chosen-ox/dLLM-Serve", commit="aefbf0a", license="MIT"),
        deviations=(
            ("only the sparse cache; the engine's scheduler is not a part of a cache policy, and the output head runs "
            "on open positions in every policy here"),
            "queries times keys are not divided by the root of the width, which changes no order",
            ("with a shifted head the position before the block is computed as a part of the block; the engine leaves "
            "it out once entries are kept, and predicts the block's first token from that token's own output"),
        ),
        limits=("by_head=false is sparse-dllm",),
    )
