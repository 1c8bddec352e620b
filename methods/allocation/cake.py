"""CAKE: layers compete for one budget by how dispersed and how unsteady their attention is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from kvbench.constraints import Ge, Gt, Odd
from kvbench.method import BudgetKind, Card, Step, Upstream
from kvbench.selection import group_mean, pool_before
from kvbench.store import LayerKV
from kvbench.store.scores import window_weights_of
from kvbench.techniques.cascade import CascadeMethod, fill_water, round_shares


@dataclass(frozen=True)
class CAKE(CascadeMethod):
    """Keeps the observation window and entries by mean and variance of its attention; layers share one budget."""

    window: Annotated[int, Ge(2)] = 32
    kernel: Annotated[int, Ge(1), Odd] = 5
    gamma: Annotated[float, Ge(0)] = 200.0
    """Weight of the variance over the window's queries in the score of an entry."""
    dispersion: Annotated[float, Gt(0)] = 1.0
    """Temperature of the entropy in a layer's preference, tau1 of the paper."""
    shift: Annotated[float, Gt(0)] = 1.0
    """Temperature of the variance in a layer's preference, tau2 of the paper."""

    card: ClassVar[Card] = Card(
        name="cake",
        title="CAKE: Cascading and Adaptive KV Cache Eviction with Layer Preferences",
        idea="A layer whose attention is spread over many entries, or shifts from query to query, needs more of them. "
        "Layers share one budget by this preference, and earlier layers are trimmed as later ones arrive.",
        arxiv="2503.12491",
        year=2025,
        family="allocation",
        stages=("compression",),
        budget=BudgetKind.STORED,
        paper_budget="1024",
        heads="pooled",
        upstream=Upstream(repo="antgroup/cakekv", commit="c4675ce", license=None),
        deviations=(
            ("Shares are in exact proportion to the preferences, up to all entries of a layer, and add up to the "
            "budget. The authors' code spreads what a full layer leaves evenly, so that with cascading a budget can "
            "grow when a later layer arrives, and the total falls short."),
            "Entropy, mean and variance are float32; the authors' code takes mean and variance in the model's type.",
            "A budget just below the context is met too; the authors' code keeps everything up to a window above it.",
            "Entries after the context are kept. The authors' code also evicts an entry in every step.",
            "Layers with a sliding window keep an equal share of it each.",
            ("`dispersion` and `shift` are 1, as in the authors' code for a model without values of its own. It has "
            "values for five models at two budgets, such as 1.6 and 0.4 for Llama-3.1-8B at 1,024 entries."),
        ),
        limits=("Entries are chosen by the last tokens: a question that is asked later does not affect the choice.",),
    )

    def minimum_entries(self) -> int:
        """The window and one entry to choose."""
        return self.window + 1

    def layer(self, index: int) -> LayerKV:
        """A store that also keeps the last queries, until the compression."""
        return LayerKV(queries=self.window)

    def score(self, kv: LayerKV, step: Step) -> Tensor:
        """Pooled mean and variance of the window's attention; infinite in the window. [B, H_kv, n]

        The layer's preference comes from the same attention and waits in the store.
        """
        assert kv.recent_queries is not None
        before = max(0, kv.n - kv.recent_queries.shape[2])
        entropy = variance = torch.zeros(len(kv.keys), dtype=torch.float64, device=kv.keys.device)
        found, start = [], 0
        for weights in window_weights_of(kv.recent_queries, kv, step):
            mean, spread = mean_and_variance(weights)
            found.append(mean + self.gamma * spread)
            inner = max(0, before - start)
            seen = weights[..., :inner]
            entropy = entropy - (seen * (seen + 1e-10).log()).sum((1, 2, 3, 4)).double()
            variance = variance + spread[..., :inner].sum((1, 2, 3)).double()
            start += weights.shape[-1]
        if self.pooled is not None and step.layer in self.pooled:
            # As a logarithm: the powers of small settings exceed float64.
            kv.state["preference"] = entropy.clamp_min(0).log() / self.dispersion + variance.log() / self.shift
        scores = torch.cat(found, dim=-1).flatten(1, 2)  # [B, H_q, n]
        return group_mean(pool_before(scores, self.window, self.kernel, "avg"), kv.keys.shape[1])

    def measure(self, kv: LayerKV, step: Step, scores: Tensor) -> Tensor:
        """The layer's preference: the log of entropy and variance before the window, to their powers. [B]"""
        return kv.state.pop("preference")

    def divide(self, measures: Tensor, total: int, stored: int) -> Tensor:
        """The window, and a share of the rest in proportion to the preference. [B, layers]"""
        assert self.pooled is not None
        rest, most = total - self.window * len(self.pooled), stored - self.window
        weights = (measures - measures.amax(1, keepdim=True)).exp().nan_to_num(1.0)  # -inf in all layers: equal
        shares = fill_water(weights, rest, most)
        complete = measures.shape[1] == len(self.pooled)
        return self.window + (round_shares(shares, rest) if complete else shares)


def mean_and_variance(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Over the window's queries, in two passes; torch's own variance takes ten times as long. [B, H_kv, G, w, n]

    Returns [B, H_kv, G, n] each; the variance is the unbiased one, 0 for a single query.
    """
    mean = weights.mean(3, keepdim=True)
    deviation = weights - mean
    return mean.squeeze(3), deviation.mul_(deviation).sum(3) / max(1, weights.shape[3] - 1)
