"""Findings about later tokens that read a part of the cache: some heads, some entries, some layers, some elements."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from statistics import fmean, pstdev

import torch
from torch import Tensor

from kvbench.hf import Model
from kvbench.reproduce.findings.numbers import divergence, fit_line, top_mask
from kvbench.reproduce.findings.observe import Layer, Values, attend, causal_mask, mix, observe, run_layers
from kvbench.reproduce.findings.passes import drop_smallest

HEAD_SHARES = (0.15, 0.25, 0.5)
"""Shares of the KV heads that read everything: RazorAttention's, and DuoAttention's without and with grouped heads."""
SINKS, WINDOW = 4, 64
"""Entries that the other heads read, or the layer that drops its entries."""
KEPT = 0.25
"""Share of the context's entries in the compressed cache of `diverge`."""
OBSERVED = 32
"""Last queries of the context that choose them; also the last entries that `prune_cache` leaves whole."""
PARTS = 4
"""Parts of the later tokens, whose spread is that within a layer."""


def repeat_span(ids: Sequence[int]) -> tuple[list[int], int]:
    """Distinct tokens of a text in random order, a quarter of the text, and the span again; and the span's length."""
    span = list(dict.fromkeys(ids))
    random.Random(str(span)).shuffle(span)
    span = span[: len(ids) // 8]
    return [*span, *ids[: len(ids) // 4], *span], len(span)


class RetrievalScores:
    """RazorAttention: attention to the same token of the first span, and to the one after it, by KV head."""

    def __init__(self, span: int) -> None:
        self.span = span
        self.scores: list[Tensor] = []

    def see(self, layer: Layer) -> None:
        rows = layer.attention[:, -self.span : -1, : self.span]  # [H_q, span - 1, span]
        found = sum(rows.diagonal(offset, -2, -1).mean(-1) for offset in (0, 1))
        assert isinstance(found, Tensor)
        self.scores.append(found.unflatten(0, (layer.key.shape[0], -1)).amax(-1))


def rank_heads(model: Model, ids: Sequence[int]) -> list[tuple[int, int]]:
    """KV heads as (layer, head), those that retrieve the repeated span of a text first."""
    tokens, span = repeat_span(ids)
    scores = RetrievalScores(span)
    observe(model, tokens, [scores.see])
    every = [(float(x), i, head) for i, layer in enumerate(scores.scores) for head, x in enumerate(layer)]
    return [(i, head) for _, i, head in sorted(every, reverse=True)]


def retrieve(model: Model, ids: Sequence[int], ranked: Sequence[tuple[int, int]]) -> Values:
    """DuoAttention, RazorAttention: recall of a repeated span if only some KV heads read more than sinks and window."""
    tokens, span = repeat_span(ids)
    place = torch.arange(len(tokens))
    near = causal_mask(len(tokens)) & ((place[:, None] - place < WINDOW) | (place < SINKS))

    def recall(heads: Sequence[tuple[int, int]]) -> float:
        def compute(layer: Layer) -> Tensor:
            whole = torch.tensor([(layer.index, x) in heads for x in range(layer.key.shape[0])])
            whole = whole.repeat_interleave(layer.query.shape[0] // layer.key.shape[0])
            allowed = torch.where(whole[:, None, None], causal_mask(layer.length), near)
            return mix(attend(layer.query, layer.key, layer.step.scale, allowed), layer.value)

        logs = run_layers(model, tokens, compute, keep=span)
        return float((logs[:-1].argmax(-1) == torch.tensor(tokens[1 - span :])).float().mean())

    shuffled = list(ranked)
    random.Random(str(tokens)).shuffle(shuffled)
    full = recall(ranked)
    of_full = {x: recall(ranked[: round(x * len(ranked))]) / max(full, 1 / span) for x in HEAD_SHARES}
    at_random = recall(shuffled[: len(ranked) // 2]) / max(full, 1 / span)
    found: Values = {"full": full, "random_50%": at_random, "best_less_random": of_full[0.5] - at_random}
    return found | {f"heads_{share:.0%}": x for share, x in of_full.items()}


def diverge(model: Model, ids: Sequence[int]) -> Values:
    """VeriCache, figure 4: divergence of a compressed cache over later tokens, and agreement with the full cache."""
    context = len(ids) * 3 // 4
    later = len(ids) - context
    exact = run_layers(model, ids, lambda x: mix(x.attention, x.value), keep=later)

    def compute(layer: Layer) -> Tensor:
        heads = layer.key.shape[0]
        mass = layer.attention[:, context - OBSERVED : context, :context].sum(1).unflatten(0, (heads, -1)).sum(1)
        mass[:, context - OBSERVED :] = torch.inf
        allowed = causal_mask(layer.length).repeat(heads, 1, 1)
        allowed[:, context:, :context] = top_mask(mass, KEPT)[:, None]
        allowed = allowed.repeat_interleave(layer.query.shape[0] // heads, dim=0)
        return mix(attend(layer.query, layer.key, layer.step.scale, allowed), layer.value)

    rough = run_layers(model, ids, compute, keep=later)
    steps = divergence(exact, rough)
    agrees = (exact.argmax(-1) == rough.argmax(-1)).float()
    quarter = later // 4
    return {
        "linear_fit": float(fit_line(steps.cumsum(0))),
        "late_over_early": float(steps[-quarter:].mean() / steps[:quarter].mean().clamp_min(1e-12)),
        "nats_per_step": float(steps.mean()), "agreement": float(agrees.mean()),
        "agreement_drop": float(agrees[:OBSERVED].mean() - agrees[-OBSERVED:].mean()),
    }


def drop_layers(model: Model, ids: Sequence[int]) -> Values:
    """EpiCache: shift of later keys where one layer drops its entries, by that layer."""
    context = len(ids) * 2 // 3
    place = torch.arange(len(ids))
    dropped = causal_mask(len(ids))
    dropped[context:] &= (place[context:, None] - place < WINDOW) | (place < SINKS) | (place >= context)

    def run(gone: int | None) -> list[Tensor]:
        keys: list[Tensor] = []

        def compute(layer: Layer) -> Tensor:
            keys.append(layer.key[:, context:])
            allowed = dropped if layer.index == gone else causal_mask(layer.length)
            return mix(attend(layer.query, layer.key, layer.step.scale, allowed), layer.value)

        run_layers(model, ids, compute, keep=1)
        return keys

    exact = run(None)
    parts = []
    for gone in range(len(exact) - 1):  # the last layer has no keys after it
        later = zip(run(gone)[gone + 1 :], exact[gone + 1 :], strict=True)
        shifts = torch.stack([1 - torch.cosine_similarity(a, b, dim=-1).mean(0) for a, b in later]).mean(0)
        parts.append([float(x.mean()) for x in shifts.chunk(PARTS)])
    by_layer = [fmean(x) for x in parts]
    return {
        "between_over_within": pstdev(by_layer) / max(fmean(map(pstdev, parts)), 1e-12), "by_layer": by_layer,
    }


def prune_cache(model: Model, ids: Sequence[int]) -> Values:
    """Mustafar: KL divergence of later tokens that read pruned entries, except the last 32, which are whole."""
    context = len(ids) // 2
    later = len(ids) - context
    exact = run_layers(model, ids, lambda x: mix(x.attention, x.value), keep=later)
    place = torch.arange(len(ids))
    recent = place[:, None] - place < OBSERVED

    def measure(share: float, *, channels: bool) -> float:
        def compute(layer: Layer) -> Tensor:
            key, value = (drop_smallest(x, share, channels=channels) for x in (layer.key, layer.value))
            group = layer.query.shape[0] // layer.key.shape[0]
            whole, pruned = (
                layer.query[:, context:] @ x.repeat_interleave(group, dim=0).mT * layer.step.scale
                for x in (layer.key, key)
            )
            logits = torch.where(recent[context:], whole, pruned)
            weights = logits.masked_fill(~causal_mask(layer.length)[context:], -torch.inf).softmax(-1)
            near = weights * recent[context:]
            read = mix(near, layer.value) + mix(weights - near, value)
            return torch.cat([mix(layer.attention[:, :context], layer.value), read], dim=2)

        return float(divergence(exact, run_layers(model, ids, compute, keep=later)).mean())

    cases = itertools.product((0.5, 0.7), (False, True))
    return {
        f"{'channels' if channels else 'elements'}_{share:.0%}": measure(share, channels=channels)
        for share, channels in cases
    }
