"""Elastic-Cache: rows are computed anew when, and from the layer on where, attention has drifted (arXiv 2510.14973)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.diffusion.policy import Denoising, PassPlan, Policy
from kvbench.diffusion.sampling import Sampling
from kvbench.errors import UserError
from kvbench.method import BudgetKind, Card, Step, Upstream
from kvbench.store.positions import PositionKV


@dataclass
class ElasticKV(PositionKV):
    """Beside keys and values every row's query and the layer's input, from which a row can be taken up again."""

    likeness: float = field(default=math.inf, init=False)
    """How alike the tracked rows' attention is to what it was in the last pass; infinite where none were tracked."""

    def put(self, name: str, positions: Tensor, rows: Tensor) -> None:
        """Keep rows by position along the axis before the last. rows: [..., m, D]"""
        if name not in self.state:
            self.state[name] = rows.new_zeros(*rows.shape[:-2], self.length, rows.shape[-1])
        self.state[name][..., positions[0], :] = rows

    def weigh(self, places: Tensor, scale: float) -> Tensor:
        """Attention weights of a few rows over all, which reads every key once more. places: [m]. [B, H_q, m, N]"""
        assert self.keys is not None
        self.read_bytes += self.keys.nbytes
        queries = self.state["query"][:, :, places]
        grouped = queries.unflatten(1, (self.keys.shape[1], -1))
        products = (grouped @ self.keys[:, :, None].transpose(3, 4)).float() * scale
        weights: Tensor = products.softmax(-1).flatten(1, 2)
        return weights


@dataclass(frozen=True)
class ElasticCache(Policy):
    """gamma: below this likeness the layers above are computed anew. window: masks computed in a step.

    tracked: rows watched per layer, those that the window attends to most. axis: along which likeness is a cosine; the
    code's `heads`, or the keys, as the paper is remembered to say.
    """

    gamma: float = 0.9
    window: int = 16
    tracked: int = 1
    axis: Literal["heads", "keys"] = "heads"

    card: ClassVar[Card] = Card(
        name="elastic-cache", title="Elastic-Cache", models="diffusion",
        idea="The attention of the most attended tokens shows whether cached rows are still good. When it has drifted "
             "in a layer, all layers above compute every row anew.",
        arxiv="2510.14973", year=2025, family="diffusion", stages=("generation",), budget=BudgetKind.NONE,
        heads="pooled", upstream=Upstream(repo="VILA-Lab/Elastic-Cache", commit=None, license=None),
        deviations=("tokens behind the first end of text are decoded too, where the reference leaves them masks",),
        unverified=("read in a fork (yxu-dev, 46c0bc3)", "the axis of the likeness: code and paper differ"),
        limits=("one sequence at a time", "the answer is one block: leave --gen block out",
                "gamma above 1 is not exact: rows outside the window take their stored input up again"),
    )

    def __post_init__(self) -> None:
        """Refuse settings without a meaning."""
        super().__post_init__()
        if self.window < 1 or self.tracked < 0:
            raise UserError(f"elastic-cache: window {self.window} must be 1 or more, tracked {self.tracked} 0 or more.")

    def store(self, length: int) -> PositionKV:
        """Rows with queries and inputs."""
        return ElasticKV(length)

    def check(self, sampling: Sampling, answer: int) -> None:
        """Refuse blocks, and more tokens per step than the window has.

        Raises:
            UserError: either.
        """
        if sampling.block < answer:
            raise UserError("elastic-cache has no blocks, its window moves instead: leave --gen block out.")
        most = math.ceil(answer / sampling.steps)
        if sampling.threshold is None and self.window < most:
            raise UserError(
                f"elastic-cache computes {self.window} masks in a step, and {most} are to be committed. Use more --gen "
                f"steps, or --set window={most} or more."
            )

    def begin(self, d: Denoising) -> None:
        """Refuse batches.

        Raises:
            UserError: there are several sequences.
        """
        if len(d.ids) > 1:
            raise UserError("elastic-cache works on one sequence at a time: layers are reset for all of them or none.")
        d.notes["tracked"] = torch.zeros_like(d.masked)

    def open(self, d: Denoising) -> Tensor:
        """The first masks, wherever they are."""
        return d.masked & (d.masked.cumsum(-1) <= self.window)

    def plan(self, d: Denoising) -> PassPlan:
        """All, then what is watched, what was just decoded, and the window."""
        if d.nfe == 0:
            return PassPlan()
        return PassPlan(compute=d.notes["tracked"] | (d.known & ~d.before) | d.predictors(self.open(d)))

    def run(self, d: Denoising, plan: PassPlan, rows: Tensor) -> Tensor:
        """The rows, and from the layer above a drift on all of them."""
        everything = d.positions[None]
        reset = -1 if plan.compute is None else len(d.stores)
        current = rows
        hidden = d.blocks.embed(d.ids.gather(1, rows))
        angles = d.blocks.angles(hidden, rows)
        watched, d.notes["tracked"] = d.notes["tracked"], torch.zeros_like(d.masked)
        for layer, kv in enumerate(d.stores):
            assert isinstance(kv, ElasticKV)
            kv.put("hidden", current, hidden)
            if layer == reset:
                hidden, current = kv.state["hidden"].clone(), everything
                angles = d.blocks.angles(hidden, current)
            kv.likeness = math.inf
            look = partial(self._attend, d, kv, watched if layer < reset else None)
            hidden = hidden + d.blocks.attention(layer, hidden, current, angles, look)
            if layer < reset and kv.likeness < self.gamma:
                reset = layer + 1
            hidden = hidden + d.blocks.mlp(layer, hidden)
        return hidden if current is rows else hidden[:, rows[0]]

    def _attend(self, d: Denoising, kv: ElasticKV, watched: Tensor | None, step: Step) -> Tensor:
        """Attention over all rows; watches the rows that are tracked and chooses the next ones."""
        places = torch.empty(0) if watched is None else watched[0].nonzero()[:, 0]
        before = None
        if len(places) and kv.keys is not None:
            before = kv.weigh(places, step.scale)
        kv.write(step)
        kv.put("query", step.positions, step.query)
        if before is not None:
            after, axis = kv.weigh(places, step.scale), 1 if self.axis == "heads" else 3
            kv.likeness = float(torch.cosine_similarity(before, after, dim=axis).mean())
        if self.tracked:
            window = d.predictors(self.open(d))[0].nonzero()[:, 0]
            mass = kv.weigh(window, step.scale).sum((0, 1, 2))  # [N]
            best = mass.masked_fill(d.masked[0], 0.0).topk(min(self.tracked, len(mass))).indices
            d.notes["tracked"][0, best] = True
        return kv.attend(step)
