"""Findings about attention: sparsity, heavy hitters, overlap of selections, page bounds, entropy, expected queries."""

from __future__ import annotations

from statistics import fmean, median

import torch
from torch import Tensor

from kvbench.reproduce.findings.numbers import jaccard, pearson, spearman, top_mask
from kvbench.reproduce.findings.observe import Layer, Observer, Values

NEGLIGIBLE = 0.01
"""H2O: attention below this share of the row's maximum counts as zero."""
WINDOW = 32
"""SnapKV's observation window."""
LATER = 256
"""Tokens after the window."""
PAGE = 16
"""Quest's page size."""
RECENT = 64
"""Rows at the end of the text that stand for decode steps."""
SINKS = 4


class Sparsity(Observer):
    """H2O, figure 2a: share of attention below 1 % of the row's maximum, in the second half of the text."""

    def __init__(self) -> None:
        self.shares: list[float] = []

    def see(self, layer: Layer) -> None:
        rows = layer.attention[:, layer.length // 2 :]
        allowed = torch.arange(layer.length // 2, layer.length) + 1
        small = (rows < NEGLIGIBLE * rows.amax(-1, keepdim=True)).sum(-1) - (layer.length - allowed)
        self.shares.append(float((small / allowed).mean()))

    def result(self) -> Values:
        return {"median_layer": median(self.shares), "least_layer": min(self.shares), "by_layer": self.shares}


class HeavyHitters(Observer):
    """H2O, figure 2b and 2d: column sums follow a power law, and sums so far choose as sums over the whole text do."""

    def __init__(self) -> None:
        self.fits: list[float] = []
        self.shares: list[float] = []
        self.overlaps: list[float] = []

    def see(self, layer: Layer) -> None:
        sums = layer.attention.sum(1).sort(dim=-1, descending=True).values  # [H_q, T]
        span = torch.arange(10, layer.length // 2)
        fit = pearson(torch.log(span + 1.0).expand(sums.shape[0], -1), sums[:, span].clamp_min(1e-12).log())
        self.fits.append(float(fit.square().mean()))
        self.shares.append(float((sums[:, : layer.length // 5].sum(-1) / sums.sum(-1)).mean()))
        half = layer.length // 2
        local, whole = (layer.attention[:, :rows, :half].sum(1) for rows in (half, layer.length))
        self.overlaps.append(float(jaccard(top_mask(local, 0.2), top_mask(whole, 0.2)).mean()))

    def result(self) -> Values:
        return {
            "power_law_r2": median(self.fits), "top_fifth_share": median(self.shares),
            "local_overlap": median(self.overlaps), "top_fifth_by_layer": self.shares,
        }


class ObservationWindow(Observer):
    """SnapKV, figures 2 and 3: a window's choice of prompt tokens against what later tokens attend to."""

    def __init__(self) -> None:
        self.hits: dict[int, list[float]] = {WINDOW: [], LATER: []}

    def see(self, layer: Layer) -> None:
        prompt = layer.length - LATER - WINDOW
        group = layer.attention.shape[0] // layer.key.shape[0]

        def choose(start: int) -> Tensor:
            summed = layer.attention[:, start : start + WINDOW, :prompt].sum(1)
            return top_mask(summed.unflatten(0, (-1, group)).sum(1), 0.1)

        chosen = choose(prompt)
        for last, hits in self.hits.items():
            wanted = choose(prompt + last)  # the last WINDOW of `last` later tokens
            hits.append(float((chosen & wanted).sum(-1).div(wanted.sum(-1)).mean()))

    def result(self) -> Values:
        early, late = self.hits[WINDOW], self.hits[LATER]
        return {"hit_rate": fmean(late), "drop": fmean(early) - fmean(late), "by_layer": late}


class Consecutive(Observer):
    """ShadowKV, LouisKV, IndexCache: overlap of the top tenth between decode steps and between layers."""

    def __init__(self) -> None:
        self.near: list[float] = []
        self.far: list[float] = []
        self.layers: list[Tensor] = []

    def see(self, layer: Layer) -> None:
        rows = layer.attention[:, -RECENT:, : layer.length - RECENT]
        chosen = top_mask(rows, 0.1)
        self.near.append(float(jaccard(chosen[:, :-1], chosen[:, 1:]).mean()))
        self.far.append(float(jaccard(chosen[:, :-WINDOW], chosen[:, WINDOW:]).mean()))
        self.layers.append(top_mask(rows.sum((0, 1)), 0.1))

    def result(self) -> Values:
        by_distance: dict[int, list[float]] = {}
        for i, first in enumerate(self.layers):
            for j in range(i + 1, len(self.layers)):
                by_distance.setdefault(j - i, []).append(float(jaccard(first, self.layers[j])))
        apart = [fmean(x) for distance, x in by_distance.items() if distance >= max(2, len(self.layers) // 3)]
        return {
            "next_step": median(self.near), "step_32": median(self.far),
            "next_layer": fmean(by_distance[1]), "distant_layers": fmean(apart),
        }


class PageBounds(Observer):
    """Quest: attention in the quarter of pages with the largest bounds, over that in the best quarter of pages."""

    def __init__(self) -> None:
        self.recall: list[float] = []

    def see(self, layer: Layer) -> None:
        pages = (layer.length - RECENT) // PAGE
        rows = layer.query[:, -RECENT:]
        keys = layer.key[:, : pages * PAGE].unflatten(1, (pages, PAGE))
        group = rows.shape[0] // keys.shape[0]
        low, high = (x.repeat_interleave(group, dim=0) for x in (keys.amin(2), keys.amax(2)))  # [H_q, P, D]
        bound = rows.clamp_min(0) @ high.mT + rows.clamp_max(0) @ low.mT  # [H_q, R, P]
        mass = layer.attention[:, -RECENT:, : pages * PAGE].unflatten(2, (pages, PAGE)).sum(-1)
        found, best = ((mass * top_mask(x, 0.25)).sum(-1) for x in (bound, mass))
        self.recall.append(float((found / best.clamp_min(1e-12)).mean()))

    def result(self) -> Values:
        return {
            "later_layers": fmean(self.recall[2:]), "first_layers": fmean(self.recall[:2]), "by_layer": self.recall
        }


class Entropy(Observer):
    """PyramidKV, CAKE: entropy of attention over its largest possible value, by depth."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def see(self, layer: Layer) -> None:
        rows = layer.attention[:, layer.length // 2 :]
        entropy = -(rows * rows.clamp_min(1e-30).log()).sum(-1)
        most = torch.log(torch.arange(layer.length // 2, layer.length) + 1.0)
        self.values.append(float((entropy / most).mean()))

    def result(self) -> Values:
        depth = torch.arange(len(self.values), dtype=torch.float64)
        return {
            "depth_correlation": float(spearman(depth, torch.tensor(self.values))), "by_layer": self.values,
        }


class ExpectedQueries(Observer):
    """Expected Attention: mean attention predicted from Gaussian queries of the first half, against the second half."""

    def __init__(self) -> None:
        self.fits: list[float] = []
        self.kurtosis: list[float] = []

    def see(self, layer: Layer) -> None:
        half, width = layer.length // 2, layer.query.shape[-1]
        past = layer.plain_query[:, SINKS:half].double()
        center = past.mean(1, keepdim=True)
        spread = (past - center).mT @ (past - center) / past.shape[1]  # [H_q, D, D]
        normal = (past - center) / (past - center).square().mean(1, keepdim=True).sqrt().clamp_min(1e-12)
        self.kurtosis.append(float((normal**4).mean() - 3))
        units = torch.eye(width)[None, :, None].expand(1, -1, layer.length - half, -1)
        turn = layer.step.rope.rotate(units, torch.arange(half, layer.length)[None]).double().mean(2)[0].T
        keys = layer.key[:, SINKS:half].double().repeat_interleave(past.shape[0] // layer.key.shape[0], dim=0)
        logits = (keys @ turn @ center.mT)[..., 0] * layer.step.scale
        logits = logits + ((keys @ (turn @ spread @ turn.T)) * keys).sum(-1) * layer.step.scale**2 / 2
        true = layer.attention[:, half:, SINKS:half].double().mean(1)
        self.fits.append(float(pearson(logits, true.clamp_min(1e-30).log()).mean()))

    def result(self) -> Values:
        return {"correlation": median(self.fits), "excess_kurtosis": median(self.kurtosis), "by_layer": self.fits}
