"""Q-Filters: scores keys by their projection on the main direction of the head's queries."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import Tensor

from kvbench.constraints import Positive
from kvbench.method import BudgetKind, Card, Method, Step, Upstream, resolved
from kvbench.selection import ScoredMethod
from kvbench.store import LayerKV
from kvbench.techniques.calibration import calibrate, calibrated

if TYPE_CHECKING:
    from kvbench.hf import Model


@dataclass(frozen=True)
class QFilter(ScoredMethod):
    """Keeps, per KV head, the entries whose keys point most along the main direction of the queries."""

    tokens: Positive = 2048
    """Tokens of text on which the directions are measured, before the run."""

    filters: str | None = resolved(by_bind=True)
    """SHA-256 of the directions of all layers."""

    signed: ClassVar[bool] = True
    card: ClassVar[Card] = Card(
        name="qfilter",
        title="Q-Filters: Leveraging QK Geometry for Efficient KV Cache Compression",
        idea="The queries of a head share one main direction. "
        "A key's projection on it predicts the attention from any query, and needs no query and no attention weights.",
        arxiv="2503.02812",
        year=2025,
        family="eviction",
        stages=("compression",),
        budget=BudgetKind.STORED,
        calibration="query directions, in one pass",
        heads="independent",
        upstream=Upstream(repo="NVIDIA/kvpress", commit="8bb29b9", license="Apache-2.0"),
        deviations=(
            ("Directions are measured on Python's manual when a run starts, which takes one forward pass; the authors "
            "publish those of some models, measured on other text. kvpress loads them, with the opposite sign."),
            "Compressed once, at the end of the context.",
            ("A direction points to the side of the queries' sum, and a group takes the mean of its heads. The authors "
            "take the side of most queries."),
        ),
        unverified=("tokens: chosen so that calibration takes seconds; the authors take 3,000 samples.",),
        limits=(
            "The manual's text differs between versions of Python; the result records a hash of the directions.",
            "The directions, a vector for each KV head, are not counted as bytes of the cache.",
        ),
    )

    def bind(self, model: Model) -> Self:
        """Measure the main directions of the queries, once per process and model."""
        return replace(self, filters=calibrate(model, QueryRecorder(), self.tokens, main_directions))

    def score(self, kv: LayerKV, step: Step) -> Tensor:
        """Projection of each key on the direction of its head. [B, H_kv, n]"""
        assert self.filters is not None
        directions = calibrated(self.filters, step.layer).to(kv.keys.device)  # [H_kv, D]
        return (kv.keys.float() @ directions[..., None])[..., 0]


@dataclass(frozen=True)
class QueryRecorder(Method):
    """The full cache; sums up the queries and their outer products."""

    def attend(self, kv: LayerKV, step: Step) -> Tensor:
        """Attention over every entry. [B, H_q, T, D_v]"""
        query = step.query[0].double().unflatten(0, (step.key.shape[1], -1))  # [H_kv, G, T, D]
        for name, found in (("query", query.sum(2)), ("outer", query.mT @ query)):
            kv.state[name] = kv.state[name] + found if name in kv.state else found
        return kv.attend(step)


def main_directions(sums: dict[str, Tensor], tokens: int) -> Tensor:
    """First right singular vector of each query head's queries, averaged over groups. [H_kv, D] float32

    sums: of the queries by KV head [H_kv, G, D], and of their outer products [H_kv, G, D, D].
    """
    del tokens  # directions have no scale
    first = torch.linalg.eigh(sums["outer"]).eigenvectors[..., -1]
    first = first * torch.where((first * sums["query"]).sum(-1, keepdim=True) < 0, -1.0, 1.0)
    mean = first.mean(1)
    unit: Tensor = mean / mean.norm(dim=-1, keepdim=True).clamp_min(1e-12)
    return unit.float()
