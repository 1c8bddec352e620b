"""WindowKV: keeps contiguous windows of tokens, which groups of neighboring layers share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench.constraints import Gt, Le, Positive
from kvbench.method import Budget, BudgetKind, Card, Method, Shape, Step, Upstream, resolved
from kvbench.selection import hide_unseen, rank
from kvbench.store import LayerKV
from kvbench.store.scores import attention_mass_of
from kvbench.techniques.cascade import fill_water, round_shares


@dataclass(frozen=True)
class WindowKV(Method):
    """Keeps the last tokens and the windows that these attend to most, chosen by the first layer of each group."""

    window: Positive = 16
    """Last tokens, by whose queries windows are chosen, and which are always kept."""
    review: Positive = 8
    """Tokens per window."""
    best: Annotated[float, Gt(0), Le(1)] = 1.0
    """Share of a window's tokens, the most attended ones, whose mean is its score. All of them suit tasks that look for
    a passage, half of them tasks that need the whole text."""
    share: Positive = 8
    """Neighboring layers that share their windows."""
    beta: Positive = 14
    """The last group gets `share / beta` of the mean budget without the last tokens."""

    layer_rows: tuple[int, ...] | None = resolved()
    """Entries per KV head of each layer; 0 for layers with a sliding window, which have a budget of their own."""

    recompressible: ClassVar[str | None] = "layers of a group share windows of the context, which is chosen once."
    card: ClassVar[Card] = Card(
        name="windowkv",
        title="WindowKV: Task-Adaptive Group-Wise KV Cache Window Selection for Efficient LLM Inference",
        idea="Tokens make sense in sequence, so whole windows of the text are kept or dropped. "
        "Groups of layers share windows that their first layer chooses, and lower groups keep more.",
        arxiv="2503.17922",
        year=2025,
        family="allocation",
        stages=("compression",),
        budget=BudgetKind.STORED,
        paper_budget="2048",
        heads="pooled",
        upstream=Upstream(repo="optim996/WindowKV", commit="7513467", license=None),
        deviations=(
            ("The kind of task is a setting, `best`; the authors train a classifier. Their code maps questions to the "
            "mean of the best tokens and other tasks to the mean of all, the paper the other way round."),
            ("`best` does not change `window`; the authors' script has 16 last tokens for the mean of all and 32 for "
            "that of the best half."),
            ("Of a last window that is shorter, `best` takes a share; the authors' code takes as many tokens as of the "
            "other windows."),
            ("Budgets count the last tokens and add up to the requested one: of the last window that is kept, the "
            "first tokens stay. The authors' code adds the last tokens to its budgets and keeps whole windows only."),
            "A group may be smaller than `share`, where layers are left; the authors' code fails there.",
            "Sliding layers choose windows of their own.",
        ),
        limits=(
            "Entries are chosen by the last tokens: a question that is asked later does not affect the choice.",
            "A model of at most `share` layers has one group, whose layers keep equally many entries.",
        ),
    )

    def minimum_entries(self) -> int:
        """The last tokens and one entry to choose."""
        return self.window + 1

    def fit(self, budget: Budget | None, shape: Shape) -> Self:
        """Resolve the mean budget, then the budgets of the layers, which fall from group to group."""
        fitted = super().fit(budget, shape)
        full = [i for i, x in enumerate(shape.layers) if x.window is None]
        if fitted.rows is None or fitted.rows >= shape.length or not full:
            return replace(fitted, layer_rows=None)
        groups = -(-len(full) // self.share)
        low = min(1.0, self.share / self.beta)
        slope = [2 - low - (2 - 2 * low) * g / max(1, groups - 1) if groups > 1 else 1.0 for g in range(groups)]
        weights = torch.tensor([[slope[i // self.share] for i in range(len(full))]], dtype=torch.float64)
        total = (fitted.rows - self.window) * len(full)
        shares = round_shares(fill_water(weights, total, shape.length - self.window), total)[0].long().tolist()
        rows = dict(zip(full, shares, strict=True))
        return replace(fitted, layer_rows=tuple(
            rows[i] + self.window if i in rows else 0 for i in range(len(shape.layers))
        ))

    def entries_in(self, layer: int, window: int | None) -> int | None:
        """The layer's own budget; sliding layers keep the same share of their window."""
        if self.layer_rows is None or window is not None:
            return super().entries_in(layer, window)
        return self.layer_rows[layer]

    def layer(self, index: int) -> LayerKV:
        """A store that also keeps the last queries, until the compression."""
        return LayerKV(queries=self.window)

    def end_of_layer(self, layers: Sequence[LayerKV], step: Step) -> None:
        """Choose windows, in the first layer of a group, and keep them; other layers take its choice."""
        kv, entries = layers[step.layer], self.entries_in(step.layer, step.window)
        if entries is None or self.rows is None or self.rows >= step.seen:
            return
        if step.window is not None or self.layer_rows is None:
            order, group = self.rank(kv, step), []
        else:
            full = [i for i, x in enumerate(self.layer_rows) if x]
            place = full.index(step.layer)
            group = full[place - place % self.share :][: self.share]
            if step.layer == group[0]:
                kv.state["order"] = self.rank(kv, step)
            order = layers[group[0]].state["order"].to(kv.keys.device)  # a spread model has layers on several GPUs
        if entries < kv.n:
            kept = order[:, :entries].sort(dim=-1).values
            kv.keep(kept[:, None].expand(-1, kv.keys.shape[1], -1))
        if group and step.layer == group[-1]:
            del layers[group[0]].state["order"]

    def rank(self, kv: LayerKV, step: Step) -> Tensor:
        """Indices of all entries: the last tokens, then windows by their score, in order within. [B, n]

        Entries that no later token sees come last.
        """
        assert kv.recent_queries is not None
        mass = attention_mass_of(kv.recent_queries, kv, step)  # [B, H_q, n]
        before = max(0, kv.n - self.window)
        order = torch.ones(mass.shape[0], 1, kv.n, dtype=torch.float64, device=mass.device)
        if before:
            places = torch.arange(before, device=mass.device)
            scores = score_windows(mass[..., :before], self.review, self.best)
            ranks = rank(scores)  # [B, windows]
            order[:, 0, :before] = -(ranks[:, places // self.review] * kv.n + places).double()
        return hide_unseen(order, kv, step.window)[:, 0].argsort(dim=-1, descending=True, stable=True)


def score_windows(mass: Tensor, size: int, share: float) -> Tensor:
    """Mean over heads of the mean of the most attended tokens of each window. mass: [B, H_q, n] -> [B, windows]"""
    count = mass.shape[-1]
    padded = F.pad(mass, (0, -count % size), value=-torch.inf).unflatten(-1, (-1, size))
    ordered = padded.sort(dim=-1, descending=True).values
    sizes = (ordered > -torch.inf).sum(-1, keepdim=True)  # the last window may be shorter
    taken = (sizes * share).ceil()
    inside = torch.arange(size, device=mass.device) < taken
    means: Tensor = ordered.masked_fill(~inside, 0.0).sum(-1) / taken[..., 0]
    return means.mean(1)
