"""Findings that compare forward passes: sinks and windows, edited prompts, reused chunks, pruned entries."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from statistics import fmean, median

import torch
from torch import Tensor

from kvbench.hf import Model
from kvbench.reproduce.findings.numbers import divergence, spearman
from kvbench.reproduce.findings.observe import Layer, Values, attend, causal_mask, mix, run_layers

CACHED_SHARE = 0.25
"""Share of the text that a query attends to in `stream`, sinks included."""
SINKS = (0, 1, 2, 4, 8)
DELETED = 32
"""Tokens that `edit` deletes from the middle."""
SPARSITIES = (0.5, 0.7)
CHUNKS = 8
"""Parts of the text in `recompute`; all but the last quarter of them are reused."""
CHECK_LAYER = 1
"""The layer whose values choose tokens in `recompute`."""
RATIOS = (0.0, 0.05, 0.15, 0.3, 0.5)


def stream(model: Model, ids: Sequence[int], newline: int) -> Values:
    """StreamingLLM, tables 1 and 2: perplexity with a window, with sinks and a window, and with all tokens."""
    cached = int(len(ids) * CACHED_SHARE)
    full = _perplexity(model, ids, cached, None)
    by_sinks = {x: _perplexity(model, ids, cached, x) for x in SINKS}
    replaced = [*[newline] * 4, *ids]
    lines = _perplexity(model, replaced, cached, 4, skip=4)
    gain = by_sinks[0] - by_sinks[4]
    return {
        "full": full, **{f"sinks_{sinks}": x for sinks, x in by_sinks.items()},
        "window_over_sinks": by_sinks[0] / by_sinks[4],
        "sinks_over_full": by_sinks[4] / full,
        "newlines_over_sinks": lines / by_sinks[4],
        "first_sink_gain": (by_sinks[0] - by_sinks[1]) / gain,
        "gain_from_4_to_8": (by_sinks[4] - by_sinks[8]) / gain,
    }


def _perplexity(model: Model, ids: Sequence[int], cached: int, sinks: int | None, skip: int = 0) -> float:
    """Of the second half of the text, each token predicted from the first `sinks` tokens and the last ones before it.

    cached: tokens that are attended to; all, where `sinks` is None. skip: tokens that stand before the text.
    """
    length = len(ids)
    allowed = causal_mask(length)
    if sinks is not None:
        place = torch.arange(length)
        recent = place[:, None] - place < cached - sinks
        allowed &= recent | (place < sinks)
    start = 2 * cached + skip
    logs = run_layers(
        model, ids, lambda x: mix(attend(x.query, x.key, x.step.scale, allowed), x.value), keep=length - start
    )
    wanted = torch.tensor(ids[start + 1 :])
    return float(logs[:-1].gather(1, wanted[:, None]).mean().neg().exp())


def _collect(model: Model, ids: Sequence[int], first_position: int = 0) -> list[Layer]:
    """Layers of an exact forward pass, without their attention."""
    layers: list[Layer] = []

    def compute(layer: Layer) -> Tensor:
        layers.append(layer)
        found = mix(layer.attention, layer.value)
        del layer.attention
        return found

    run_layers(model, ids, compute, keep=1, first_position=first_position)
    return layers


def edit(model: Model, ids: Sequence[int]) -> Values:
    """PIE: keys after a deletion, moved to their new positions or not, against those of the edited prompt."""
    start = len(ids) // 2
    whole, edited = _collect(model, ids), _collect(model, [*ids[:start], *ids[start + DELETED :]])
    moved, left = [], []
    for old, new in zip(whole, edited, strict=True):
        key = old.step.key[:, :, start + DELETED :]
        distance = torch.full((1, key.shape[2]), -DELETED)
        turned = old.step.rope.shift(key, distance)[0]
        wanted = new.key[:, start:]
        moved.append(float(torch.cosine_similarity(turned, wanted, dim=-1).mean()))
        left.append(float(torch.cosine_similarity(key[0], wanted, dim=-1).mean()))
    return {"moved": fmean(moved), "not_moved": fmean(left), "least_moved": min(moved)}


def reuse(model: Model, ids: Sequence[int]) -> Values:
    """CacheBlend, figures 6 to 8: deviation of the second half's entries where it was run alone at its positions."""
    start = len(ids) // 2
    whole, alone = _collect(model, ids), _collect(model, ids[start:], first_position=start)
    deviations = []
    for old, new in zip(whole, alone, strict=True):
        key, value = (a[:, start:] - b for a, b in ((old.key, new.key), (old.value, new.value)))
        deviations.append((key.square().sum((0, 2)) + value.square().sum((0, 2))).sqrt())
    later = deviations[1:]  # layer 0 does not depend on the text before
    top = [x.sort(descending=True).values for x in later]
    near = [float(spearman(a, b)) for a, b in itertools.pairwise(later)]
    return {
        "top_share": median([float(x[: round(0.15 * len(x))].sum() / x.sum()) for x in top]),
        "next_layer": median(near),
    }


def recompute(model: Model, ids: Sequence[int]) -> Values:
    """CacheBlend: divergence of the last quarter where chunks before it are reused and a share is computed again."""
    size = len(ids) // CHUNKS
    count = size * (CHUNKS * 3 // 4)
    exact = run_layers(model, ids, lambda x: mix(x.attention, x.value), keep=len(ids) - count)
    apart = [_collect(model, ids[:size]), *(  # each behind the text's first token, and at its place
        _collect(model, [ids[0], *ids[start : start + size]], start - 1) for start in range(size, count, size)
    )]
    held = [
        (torch.cat([x.key[:, -size:] for x in layer], dim=1), torch.cat([x.value[:, -size:] for x in layer], dim=1))
        for layer in zip(*apart, strict=True)
    ]

    def measure(ratio: float) -> float:
        reused = torch.ones(count, 1, dtype=torch.bool)

        def compute(layer: Layer) -> Tensor:
            key, value = held[layer.index]
            if layer.index == CHECK_LAYER:
                deviation = (layer.value[:, :count] - value).square().sum((0, 2))
                reused[deviation.topk(int(ratio * count)).indices] = False
            if layer.index <= CHECK_LAYER:
                return mix(layer.attention, layer.value)
            key, value = (
                torch.cat([torch.where(reused, old, new[:, :count]), new[:, count:]], dim=1)
                for old, new in ((key, layer.key), (value, layer.value))
            )
            return mix(attend(layer.query, key, layer.step.scale, causal_mask(layer.length)), value)

        rough = run_layers(model, ids, compute, keep=len(ids) - count)
        return float(divergence(exact, rough).mean())

    found = {f"kl_{ratio:.0%}": measure(ratio) for ratio in RATIOS}
    return {**found, "removed_by_15%": 1 - found["kl_15%"] / found["kl_0%"]}


def prune(model: Model, ids: Sequence[int]) -> Values:
    """Mustafar and ThinK: KL divergence where the smallest elements of each entry are zero, or whole channels."""
    keep = len(ids) // 2
    exact = run_layers(model, ids, lambda x: mix(x.attention, x.value), keep=keep)

    def measure(share: float, *, channels: bool) -> float:
        def compute(layer: Layer) -> Tensor:
            key, value = (drop_smallest(x, share, channels=channels) for x in (layer.key, layer.value))
            return mix(attend(layer.query, key, layer.step.scale, causal_mask(layer.length)), value)

        rough = run_layers(model, ids, compute, keep=keep)
        return float(divergence(exact, rough).mean())

    found: Values = {f"elements_{share:.0%}": measure(share, channels=False) for share in SPARSITIES}
    found["channels_50%"] = measure(0.5, channels=True)
    return found


def drop_smallest(x: Tensor, share: float, *, channels: bool) -> Tensor:
    """Zero the smallest elements of each token's vector, or the channels with the smallest norm. [H, T, D]"""
    size = x.norm(dim=1, keepdim=True).expand_as(x) if channels else x.abs()
    dropped = size.argsort(dim=-1, stable=True)[..., : int(share * x.shape[-1])]
    return x.scatter(-1, dropped, 0.0)
