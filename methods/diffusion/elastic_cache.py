"""Elastic-Cache: recomputes the cache when attention has drifted, from the drifted layer on (arXiv 2510.14973)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.constraints import Natural, Positive
from kvbench.diffusion.policy import Denoising, PassPlan, Policy, require_single
from kvbench.diffusion.sampling import Sampling
from kvbench.kernels.blocks import float_products
from kvbench.method import BudgetKind, Card, Step, Upstream
from kvbench.store.positions import PositionKV


@dataclass
class ElasticKV(PositionKV):
    """Keys and values, and every token's query and layer input, from which its computation can resume."""

    similarity: float = field(default=math.inf, init=False)
    """Similarity of the tracked tokens' attention to that of the last pass; infinite if none are tracked."""

    def put(self, name: str, positions: Tensor, tensor: Tensor) -> None:
        """Store a tensor by position along its second-to-last axis. tensor: [..., m, D]"""
        if name not in self.state:
            self.state[name] = tensor.new_zeros(*tensor.shape[:-2], self.length, tensor.shape[-1])
        self.state[name][..., positions[0], :] = tensor

    def weigh(self, index: Tensor, scale: float) -> Tensor:
        """Attention weights of a few tokens over all, reading every key once more. index: [m]. [B, H_q, m, N]"""
        assert self.keys is not None
        self.read_bytes += self.keys.nbytes
        queries = self.state["query"][:, :, index]
        grouped = queries.unflatten(1, (self.keys.shape[1], -1))
        products = float_products(grouped, self.keys[:, :, None]) * scale
        weights: Tensor = products.softmax(-1).flatten(1, 2)
        return weights


@dataclass(frozen=True)
class ElasticCache(Policy):
    """gamma: below this similarity, the layers above are recomputed. window: masks computed in a step.

    tracked: tokens tracked per layer, those that the window attends to most. axis: the axis of the cosine similarity:
    `heads` as in the code, or `keys`, which the paper may mean.
    """

    gamma: float = 0.9
    window: Positive = 16
    tracked: Natural = 1
    axis: Literal["heads", "keys"] = "heads"

    card: ClassVar[Card] = Card(
        name="elastic-cache", title="Elastic-Cache", models="diffusion",
        idea="The attention of the most attended tokens shows whether cached entries are valid. When it has drifted "
             "in a layer, all layers above recompute every token.",
        arxiv="2510.14973", year=2025, family="diffusion", stages=("generation",), budget=BudgetKind.NONE,
        heads="pooled", upstream=Upstream(repo="VILA-Lab/Elastic-Cache", commit=None, license=None),
        deviations=("tokens after the first end of text are decoded, too; the reference leaves them masked",),
        unverified=("read in a fork (yxu-dev, 46c0bc3)", "the axis of the similarity: code and paper differ"),
        limits=("one sequence at a time", "the answer is one block: leave --gen block out",
                "gamma above 1 is not exact: tokens outside the window resume from their stored inputs"),
    )

    def store(self, length: int) -> PositionKV:
        """A store that also has queries and layer inputs."""
        return ElasticKV(length)

    def check(self, sampling: Sampling, answer: int) -> None:
        """Refuse blocks, and more tokens per step than the window has.

        Raises:
            UserError: the answer has several blocks, or a step commits more tokens than the window.
        """
        sampling.require_one_block("elastic-cache", answer)
        sampling.require_masks("elastic-cache", "window", self.window, answer)

    def begin(self, d: Denoising) -> None:
        """Require a single sequence.

        Raises:
            UserError: there are several sequences.
        """
        require_single(d, self.card.name, "it recomputes whole layers")
        d.notes["tracked"] = torch.zeros_like(d.masked)

    def open(self, d: Denoising) -> Tensor:
        """The first masks of the answer."""
        return d.masked & (d.masked.cumsum(-1) <= self.window)

    def plan(self, d: Denoising) -> PassPlan:
        """All tokens, then the tracked ones, those just decoded, and the window."""
        if d.nfe == 0:
            return PassPlan()
        return PassPlan(compute=d.notes["tracked"] | (d.known & ~d.before) | d.predictors(self.open(d)))

    def run(self, d: Denoising, plan: PassPlan, index: Tensor) -> Tensor:
        """The selected tokens, and all tokens from the layer above a drift on."""
        everything = d.positions[None]
        reset = -1 if plan.compute is None else len(d.stores)
        current = index
        hidden = d.blocks.embed(d.ids.gather(1, index))
        angles = d.blocks.angles(hidden, index)
        tracked, d.notes["tracked"] = d.notes["tracked"], torch.zeros_like(d.masked)
        for layer, kv in enumerate(d.stores):
            assert isinstance(kv, ElasticKV)
            kv.put("hidden", current, hidden)
            if layer == reset:
                hidden, current = kv.state["hidden"].clone(), everything
                angles = d.blocks.angles(hidden, current)
            kv.similarity = math.inf
            look = partial(self._attend, d, kv, tracked if layer < reset else None)
            hidden = hidden + d.blocks.attention(layer, hidden, current, angles, look)
            if layer < reset and kv.similarity < self.gamma:
                reset = layer + 1
            hidden = hidden + d.blocks.mlp(layer, hidden)
        return hidden if current is index else hidden[:, index[0]]

    def _attend(self, d: Denoising, kv: ElasticKV, tracked: Tensor | None, step: Step) -> Tensor:
        """Attention over all entries; measures the drift of the tracked tokens and selects the next ones."""
        index = torch.empty(0) if tracked is None else tracked[0].nonzero()[:, 0]
        before = None
        if len(index) and kv.keys is not None:
            before = kv.weigh(index, step.scale)
        kv.write(step)
        kv.put("query", step.positions, step.query)
        if before is not None:
            after, axis = kv.weigh(index, step.scale), 1 if self.axis == "heads" else 3
            kv.similarity = float(torch.cosine_similarity(before, after, dim=axis).mean())
        if self.tracked:
            window = d.predictors(self.open(d))[0].nonzero()[:, 0]
            mass = kv.weigh(window, step.scale).sum((0, 1, 2))  # [N]
            best = mass.masked_fill(d.masked[0], 0.0).topk(min(self.tracked, len(mass))).indices
            d.notes["tracked"][0, best] = True
        return kv.attend(step)
