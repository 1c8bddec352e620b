"""Findings about KV entries: outlier channels, singular values, similarity of neighbors, rotation before rounding."""

from __future__ import annotations

import functools
import math
from statistics import fmean, median

import torch
from torch import Tensor

from kvbench.reproduce.findings.numbers import spearman
from kvbench.reproduce.findings.observe import Layer, Observer, Values, mix

BITS = 2
GROUP = 32
RANK_SHARE = 30 / 192
"""ShadowKV's rank over the channels of all heads, as 160 of 1,024."""
RECENT = 64
CODEBOOK_BITS = (1, 2, 3, 4)


class OutlierChannels(Observer):
    """KIVI, figure 2 and table 3: outlier channels of keys and values, and 2-bit errors by grouping."""

    def __init__(self) -> None:
        self.rows: dict[str, list[float]] = {
            x: [] for x in ("key_outlier", "value_outlier", "key_channel", "key_token", "value_channel", "value_token")
        }

    def see(self, layer: Layer) -> None:
        for name, x in (("key", layer.key), ("value", layer.value)):
            size = x.abs().mean(1)  # [H_kv, D]
            self.rows[f"{name}_outlier"].append(float((size.amax(-1) / size.median(-1).values).mean()))
        length = layer.length // GROUP * GROUP
        key, value = layer.key[:, :length], layer.value[:, :length]
        for name, dim in (("channel", 1), ("token", 2)):
            self.rows[f"key_{name}"].append(float((quantize(key, dim) - key).norm() / key.norm()))
            weights = layer.attention[:, -RECENT:, :length]
            exact, rough = mix(weights, value), mix(weights, quantize(value, dim))
            self.rows[f"value_{name}"].append(float((rough - exact).norm() / exact.norm()))

    def result(self) -> Values:
        found = {name: median(x) for name, x in self.rows.items()}
        return {
            "key_outlier": found["key_outlier"], "value_outlier": found["value_outlier"],
            "outlier_ratio": found["key_outlier"] / found["value_outlier"],
            "key_token_over_channel": found["key_token"] / found["key_channel"],
            "value_channel_over_token": found["value_channel"] / found["value_token"],
        }


def quantize(x: Tensor, dim: int) -> Tensor:
    """Round to 2 bits in groups of 32 along a dimension, with a minimum and a step per group."""
    moved = x.movedim(dim, -1)
    groups = moved.unflatten(-1, (-1, GROUP))
    low, high = groups.aminmax(dim=-1, keepdim=True)
    step = ((high - low) / (2**BITS - 1)).clamp_min(1e-12)
    rounded: Tensor = ((groups - low) / step).round() * step + low
    return rounded.flatten(-2).movedim(-1, dim)


class SingularValues(Observer):
    """ShadowKV, figure 1: energy at a low rank of keys before and after rotation and of values, over all heads.

    The subspace of the second half of the text is compared with that of the first half, and with that of another text.

    Args:
        reference: subspaces of the other text by layer; None: this text is to be the reference of others.
    """

    def __init__(self, reference: dict[int, Tensor] | None = None) -> None:
        self.reference = reference or {}
        self.plain: list[float] = []
        self.rotated: list[float] = []
        self.value: list[float] = []
        self.within: list[float] = []
        self.across: list[float] = []

    def see(self, layer: Layer) -> None:
        rank = max(1, round(layer.key.shape[0] * layer.key.shape[2] * RANK_SHARE))
        halves = [basis(x, rank) for x in flatten(layer.plain_key).chunk(2)]
        self.reference.setdefault(layer.index, halves[0])
        self.within.append(overlap(halves[1], halves[0]))
        self.across.append(overlap(halves[1], self.reference[layer.index]))
        for found, x in ((self.plain, layer.plain_key), (self.rotated, layer.key), (self.value, layer.value)):
            energy = torch.linalg.svdvals(flatten(x)).square()
            found.append(float(energy[:rank].sum() / energy.sum()))

    def result(self) -> Values:
        pairs = list(zip(self.plain, self.rotated, self.value, strict=True))
        return {
            "over_rotated": fmean([float(a > b) for a, b, _ in pairs]),
            "over_values": fmean([float(a > c) for a, _, c in pairs]),
            "within_less_across": fmean(self.within) - fmean(self.across),
            "plain": fmean(self.plain), "rotated": fmean(self.rotated), "value": fmean(self.value),
            "plain_by_layer": self.plain, "rotated_by_layer": self.rotated, "value_by_layer": self.value,
        }


def flatten(x: Tensor) -> Tensor:
    """All heads as channels. [H, T, D] -> [T, H * D]"""
    return x.transpose(0, 1).flatten(1)


def basis(x: Tensor, rank: int) -> Tensor:
    """The leading right singular vectors. [T, C] -> [C, rank]"""
    rows: Tensor = torch.linalg.svd(x, full_matrices=False).Vh
    return rows[:rank].T


def overlap(first: Tensor, other: Tensor) -> float:
    """Mean squared cosine of the angles between two subspaces: 1 if they are equal."""
    return float((first.T @ other).square().sum() / first.shape[1])


class KeySimilarity(Observer):
    """KVMerger and KeyDiff: neighboring keys are similar, values are not; keys unlike the mean key are attended."""

    def __init__(self) -> None:
        self.keys: list[float] = []
        self.values: list[float] = []
        self.distinct: list[float] = []

    def see(self, layer: Layer) -> None:
        for found, x in ((self.keys, layer.key), (self.values, layer.value)):
            found.append(float(torch.cosine_similarity(x[:, :-1], x[:, 1:], dim=-1).mean()))
        unit = torch.nn.functional.normalize(layer.key, dim=-1)
        likeness = torch.cosine_similarity(layer.key, unit.mean(1, keepdim=True), dim=-1)  # [H_kv, T]
        group = layer.attention.shape[0] // layer.key.shape[0]
        half = layer.length // 2
        attended = layer.attention[:, half:, :half].sum(1).unflatten(0, (-1, group)).sum(1)
        self.distinct.append(float(spearman(-likeness[:, :half], attended).mean()))

    def result(self) -> Values:
        return {
            "key_less_value": fmean(self.keys) - fmean(self.values), "distinct_attended": median(self.distinct),
            "by_layer": self.keys,
        }


class RotatedRounding(Observer):
    """TurboQuant: error of a Gaussian codebook on randomly rotated keys and values, over the Gaussian's own error."""

    def __init__(self) -> None:
        self.rotated: dict[int, list[float]] = {x: [] for x in CODEBOOK_BITS}
        self.plain: dict[int, list[float]] = {x: [] for x in CODEBOOK_BITS}

    def see(self, layer: Layer) -> None:
        for x in (layer.key, layer.value):
            width = x.shape[-1]
            scaled = x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12) * math.sqrt(width)
            turned = scaled @ random_rotation(width)
            for bits in CODEBOOK_BITS:
                levels, error = gaussian_codebook(bits)
                for found, y in ((self.rotated, turned), (self.plain, scaled)):
                    rounded = levels[torch.bucketize(y.contiguous(), (levels[1:] + levels[:-1]) / 2)]
                    found[bits].append(float((rounded - y).square().mean()) / error)

    def result(self) -> Values:
        found: Values = {f"rotated_{bits}": fmean(x) for bits, x in self.rotated.items()}
        found.update({f"plain_{bits}": fmean(x) for bits, x in self.plain.items()})
        found["worst_rotated"] = max(abs(fmean(x) - 1) for x in self.rotated.values())
        found["plain_over_rotated"] = min(
            fmean(self.plain[x]) / fmean(self.rotated[x]) for x in CODEBOOK_BITS if x > 1
        )
        return found


@functools.cache
def random_rotation(width: int) -> Tensor:
    """A random orthogonal matrix, always the same."""
    generator = torch.Generator().manual_seed(0)
    turned: Tensor = torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64)).Q
    return turned.float()


@functools.cache
def gaussian_codebook(bits: int) -> tuple[Tensor, float]:
    """Levels with the smallest mean squared error for a standard normal number (Lloyd and Max), and that error."""
    x = torch.linspace(-6, 6, 24001, dtype=torch.float64)
    weight = torch.exp(-x.square() / 2)
    weight /= weight.sum()
    levels = torch.linspace(-2, 2, 2**bits, dtype=torch.float64)
    for _ in range(2000):
        place = torch.bucketize(x, (levels[1:] + levels[:-1]) / 2)
        total = torch.zeros_like(levels).index_add_(0, place, weight)
        before, levels = levels, torch.zeros_like(levels).index_add_(0, place, weight * x) / total
        if torch.equal(before, levels):
            break
    place = torch.bucketize(x, (levels[1:] + levels[:-1]) / 2)
    return levels.float(), float((weight * (x - levels[place]).square()).sum())
