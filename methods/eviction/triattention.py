"""TriAttention: while decoding, keeps keys that the mean query will attend to from later positions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import Tensor

from kvbench.constraints import Natural, Positive
from kvbench.method import BudgetKind, Card, Method, Step, Upstream, resolved
from kvbench.selection import PeriodicMethod, require_inverse_rotation
from kvbench.store import LayerKV
from kvbench.techniques.calibration import calibrate, calibrated

if TYPE_CHECKING:
    from kvbench.hf import Model


@dataclass(frozen=True)
class TriAttention(PeriodicMethod):
    """Keeps the entries that mean queries at later positions attend to most, after every `period` tokens."""

    period: Positive = 128
    farthest: Positive = 65536
    """Scores are means over later positions, 1, 2, 4 and so on, up to this, after the next token's."""
    pin_prompt: bool = True
    """Whether the prompt is kept, where the budget is larger than it."""
    recent: Natural = 0
    """Last tokens, which are always kept."""
    tokens: Positive = 2048
    """Tokens of text on which the queries are measured, before the run."""

    centers: str | None = resolved(by_bind=True)
    """SHA-256 of the measured queries of all layers."""

    card: ClassVar[Card] = Card(
        name="triattention",
        version="2",
        title="TriAttention: Efficient Long Reasoning with Trigonometric KV Compression",
        idea="Before rotation, the queries of a head lie close to one center, so rotation alone tells which distances "
        "they prefer. Keys are scored by the center at later positions, and by norms where queries scatter.",
        arxiv="2604.04921",
        year=2026,
        family="eviction",
        stages=("compression",),
        budget=BudgetKind.STORED,
        paper_budget="2048",
        calibration="query centers, in one pass",
        heads="independent",
        upstream=Upstream(repo="WeianMao/triattention", commit="092e4dc", license="Apache-2.0"),
        deviations=(
            ("Every KV head of every layer chooses for itself, which the authors' code offers; its scripts make one "
            "choice per KV head for all layers, by the mean over layers of each layer's largest score."),
            ("The prompt is compressed too, once, at its end, where it exceeds the budget. By default the authors keep "
            "it and evict generated tokens only."),
            "The authors add random numbers of up to 1e-6 to scores, so that none are equal; here none are added.",
            ("Centers are measured on Python's manual when a run starts; the authors' on other text, and by a script "
            "that leaves out the norm that Qwen3 applies to queries."),
        ),
        limits=(
            "Up to `period` entries are stored above the budget between two evictions; end_bytes counts them.",
            "It needs rotary embeddings that kvbench can invert.",
            "The centers, two vectors for each query head, are not counted as bytes of the cache.",
            "The manual's text differs between versions of Python; the result records a hash of the centers.",
        ),
    )

    def minimum_entries(self) -> int:
        """The recent entries and one to choose."""
        return self.recent + 1

    def bind(self, model: Model) -> Self:
        """Measure the centers of the queries, once per process and model (`UserError` where rotation is unknown)."""
        require_inverse_rotation(model, self.card.name)
        return replace(self, centers=calibrate(model, CenterRecorder(), self.tokens, find_centers))

    def score(self, kv: LayerKV, step: Step, entries: int) -> Tensor:
        """Expected products with later queries, standardized over what may go, largest of the group. [B, H_kv, n]"""
        assert kv.positions is not None and self.centers is not None and self.length is not None
        center, norm = calibrated(self.centers, step.layer).to(kv.keys.device)
        logits = expected_products(kv.keys, center, norm, step, self.farthest)  # [B, H_kv, G, n]
        kept = kv.positions >= step.seen - self.recent  # [B, H_kv, n]
        if self.pin_prompt and entries > self.length + self.recent:
            kept = kept | (kv.positions < self.length)
        return standardize(logits, ~kept[:, :, None]).amax(2).masked_fill(kept, torch.inf)


def standardize(logits: Tensor, counted: Tensor) -> Tensor:
    """Logits with mean 0 and deviation 1 over the entries that count. [B, H_kv, G, n]. counted: [B, H_kv, 1, n] bool"""
    number = counted.sum(-1, keepdim=True).clamp_min(1)
    centered = logits - logits.where(counted, 0).sum(-1, keepdim=True) / number
    spread = centered.where(counted, 0).square().sum(-1, keepdim=True).div(number).sqrt()
    return centered / spread.clamp_min(1e-6)


def expected_products(keys: Tensor, center: Tensor, norm: Tensor, step: Step, farthest: int) -> Tensor:
    """Mean product of each key with the center at later positions, and of norms beyond it. [B, H_kv, G, n]

    keys: rotated. [B, H_kv, n, D]. center, norm: of the queries [H_q, D].
    """
    distances = torch.tensor([1 << x for x in range(farthest.bit_length())], device=keys.device)
    later = (step.seen + distances)[None]
    rotated = step.rope.rotate(center[None, :, None].expand(-1, -1, len(distances), -1), later).mean(2)[0]  # [H_q, D]
    beyond = norm - pair_norms(center[None, :, None], step)[0, :, 0]  # where queries scatter around their center
    beyond = beyond * step.rope.scaling  # rotated queries have it
    group = center.shape[0] // keys.shape[1]
    query, extra = (x.float().unflatten(0, (-1, group)) for x in (rotated, beyond))  # [H_kv, G, D]
    norms = pair_norms(keys, step).float()
    pairs = torch.full((keys.shape[3],), 0.5, device=keys.device)  # both channels of a pair have its norm
    pairs[step.rope.width :] = 1.0
    products: Tensor = query @ keys.float().mT + (extra * pairs) @ norms.mT
    return products


def pair_norms(x: Tensor, step: Step) -> Tensor:
    """The norm of each channel with its partner in the rotation; of a channel without one, its size. [..., n, D]"""
    terms = step.rope.terms(step.positions[:, :1])
    squares = x.float().square()
    if terms is None:
        return squares.sqrt()
    partner = terms[2]
    squares[..., : step.rope.width] += squares[..., partner]
    return squares.sqrt()


@dataclass(frozen=True)
class CenterRecorder(Method):
    """The full cache; sums up the queries before rotation and the norms of their channel pairs."""

    def attend(self, kv: LayerKV, step: Step) -> Tensor:
        """Attention over every entry. [B, H_q, T, D_v]"""
        plain = step.rope.rotate(step.query, step.positions, inverse=True).float()
        for name, found in (("center", plain), ("norm", pair_norms(plain, step))):
            total = found[0].double().sum(1)  # [H_q, D]
            kv.state[name] = kv.state[name] + total if name in kv.state else total
        return kv.attend(step)


def find_centers(sums: dict[str, Tensor], tokens: int) -> Tensor:
    """The mean query of each head before rotation, and the mean norm of its channel pairs. [2, H_q, D] float32"""
    return (torch.stack([sums["center"], sums["norm"]]) / tokens).float()
