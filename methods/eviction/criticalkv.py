"""CriticalKV: weighs any scores by the norm of what an entry adds to the layer's output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from kvbench.constraints import Ge, Share
from kvbench.errors import UserError
from kvbench.kernels.blocks import fit_block
from kvbench.method import BudgetKind, Card, Method, Step, Upstream
from kvbench.methods.eviction.snapkv import SnapKV
from kvbench.selection import ScoredMethod, go_around, top_entries
from kvbench.store import LayerKV


@dataclass(frozen=True)
class CriticalScores(ScoredMethod):
    """Fills a share of the budget by the scores alone, and the rest by scores times the norm of the projected value."""

    first_stage: Share = 0.5
    """Share of the budget that the scores alone fill."""
    epsilon: Annotated[float, Ge(0)] = 1e-4
    """Added to the mean attention before it is weighed."""

    def score(self, kv: LayerKV, step: Step) -> Tensor:
        """Weighed scores; infinite for the first stage and for protected entries. [B, H_kv, n]"""
        scores = super().score(kv, step)  # type: ignore[safe-super]  # of the method that this one goes around
        if (scores < 0).any():
            raise refuse_signed(self.card.name)
        entries = self.entries_in(step.layer, step.window)
        assert entries is not None
        first = top_entries(scores, int(entries * self.first_stage))
        raised = scores + self.epsilon * self.summed(step, kv.keys.shape[1])
        weighed = raised * projected_norms(kv.values, step, self.card.name).mean(2)
        return weighed.masked_fill(scores == torch.inf, torch.inf).scatter(-1, first, torch.inf)


@dataclass(frozen=True)
class CriticalKV(CriticalScores, SnapKV):
    """SnapKV with scores weighed by the projected values; `x+criticalkv` weighs the scores of method x."""

    card: ClassVar[Card] = Card(
        name="criticalkv",
        version="2",
        title="Identify Critical KV Cache in LLM Inference from an Output Perturbation Perspective",
        idea="Dropping an entry changes the output by its attention times its projected value. "
        "Half of the budget goes to the most attended entries, the rest to those with the largest product.",
        arxiv="2502.03805",
        year=2025,
        family="eviction",
        stages=("compression",),
        budget=BudgetKind.STORED,
        heads="independent",
        upstream=Upstream(repo="NVIDIA/kvpress", commit="8bb29b9", license="Apache-2.0"),
        deviations=(
            "Scores are SnapKV's with its defaults here.",
            "The norm of a KV head is the mean over its query heads, as in kvpress.",
        ),
        limits=(
            "It needs the weights of the output projection in memory, in floating point.",
            "It refuses scores below zero, such as knorm's: a larger norm would make them worse.",
            ("The scores of expected-attention have the value's norm already; kvpress leaves it out before this one: "
            "`--set value_norm=false`."),
            ("With `+adakv` the first stage takes the same number of entries in every head; the authors allocate "
            "before both stages."),
        ),
    )

    @classmethod
    def over(cls, inner: type[Method]) -> type[Method]:
        """Create `inner+criticalkv`: the scores of another method, weighed (`UserError` if they may be negative)."""
        note = f"Scores are weighed by projected values in two stages, as in CriticalKV (arXiv {cls.card.arxiv})."
        if issubclass(inner, ScoredMethod) and inner.signed:
            raise refuse_signed(f"{inner.card.name}+{cls.card.name}")
        scorer, _, last = inner.card.name.rpartition("+")
        if last == "adakv" and not issubclass(inner, CriticalScores):
            raise UserError(
                f"{inner.card.name}+criticalkv makes no sense: adakv divides the budget by the scores that criticalkv "
                f"weighs. Put +adakv last: {scorer or 'snapkv'}+criticalkv+adakv."
            )
        return go_around(inner, CriticalScores, cls.card, note, revision=".2")


def refuse_signed(name: str) -> UserError:
    """The error of scores below zero. name: of the composition"""
    return UserError(
        f"{name} makes no sense: scores are multiplied by a norm, and those of the method are negative. Use one whose "
        "scores are attention, such as snapkv."
    )


def projected_norms(values: Tensor, step: Step, name: str, order: int = 1) -> Tensor:
    """The norm of each value times the output projection of each query head of its group. [B, H_kv, G, n]

    order: 1, the sum of absolute elements, or 2, the length. name: of the method, for the refusal.

    Raises:
        UserError: the layer's output projection is not known.
    """
    if step.output is None:
        raise UserError(
            f"{name} needs the weights of the output projection, and kvbench does not find them in layer {step.layer}: "
            "they are offloaded, quantized, or under a name that it does not know. Use a method without them, such as "
            "snapkv."
        )
    weight = step.output.unflatten(0, (values.shape[1], -1)).float()  # [H_kv, G, D_v, hidden]
    size = fit_block(values.shape[0] * weight.numel() // weight.shape[2], values)  # of all heads: fits the cache
    parts = []
    for block in values.float().split(size, dim=2):
        products = (block @ weight[:, i] for i in range(weight.shape[1]))
        norms = [x.abs_().sum(-1) if order == 1 else torch.linalg.vector_norm(x, order, dim=-1) for x in products]
        parts.append(torch.stack(norms, dim=2))
    return torch.cat(parts, dim=-1)
