"""KVMerger: merges neighboring entries with nearly parallel keys into the one with the most attention."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench.budget import BUDGET_TOLERANCE, DEFAULT_BUDGET, solve, too_small
from kvbench.constraints import Ge, Gt, Share
from kvbench.errors import UndeclaredError, UserError
from kvbench.kernels.merge_sets import merge_sets
from kvbench.method import Budget, BudgetKind, Card, LayerShape, Method, Shape, Step, resolved
from kvbench.methods.merging.d2o import diffuse_layers
from kvbench.selection import top_entries
from kvbench.store import Fact, LayerKV

PAPER_SHARES = {0.5: (0.17, 0.12), 0.35: (0.08, 0.02)}
"""Shares of the entries that are never merged, by budget: the last ones, and those with the most attention."""
DEFAULT_SHARE = 0.5
"""The budget whose pair of shares mode=eps uses, which takes no budget."""
FIRST_SIGMA, REFINEMENTS = 5.0, 2
"""Start and number of rounds of the fixed point iteration."""
BIAS_BYTES = 4


@dataclass
class MergingKV(LayerKV):
    """Entries of which some are merged from several; `dropped` counts those merged into another.

    bias: each entry stores the logarithm of the number of entries that it was merged from.
    """

    bias: bool = False

    def bytes_for(self, layer: LayerShape, shape: Shape, entries: int) -> int:
        """Keys, values, offsets and, on merged layers, the bias."""
        bias = entries * layer.kv_heads * BIAS_BYTES if self.bias and entries < shape.entries(layer) else 0
        return super().bytes_for(layer, shape, entries) + bias

    def facts(self) -> dict[str, Fact]:
        """Facts of the effect check: every dropped entry was merged."""
        return {**super().facts(), "entries_merged": Fact(self.dropped)}


@dataclass(frozen=True)
class KVMerger(Method):
    """Merges neighbors with similar keys (cosine), weighted by a Gaussian around the pivot of each set."""

    mode: Literal["exact", "eps"] = "exact"
    """`exact`: join the most similar neighbors until the budget is met. `eps`: join all above the threshold."""
    eps: Annotated[float, Gt(0)] = 0.75
    """With `mode=eps`, neighbors whose keys have at least this cosine are joined."""
    recent: Share | None = None
    """Share of last entries that are never merged; None: the paper's share for the budget."""
    heavy: Share | None = None
    """Share of entries that are never merged because they get the most attention; None: the paper's for the budget."""
    sigma: Annotated[float, Gt(0)] | Literal["fixed_point"] = 5.0
    """Width of the Gaussian; `fixed_point`: per set, the mean of its weights divided by the square root of two."""
    value_mode: Literal["mean", "sum", "bias"] = "mean"
    """Value of a merged set of n: the weighted mean; n times the mean; or the mean, with log n added to the logit."""
    max_run: Annotated[int, Ge(2)] | None = None
    """Sets do not cross multiples of this number of entries; None: sets of any length."""
    skip: tuple[int, ...] | None = None
    """Layers that are not merged; None: 0, 1 and the last on models of 16 layers or more, none on others."""

    protected: tuple[float, float] | None = resolved()
    """`recent` and `heavy`, as resolved; None: both settings are given."""
    skipped: tuple[int, ...] | None = resolved()
    """Layers that are not merged, as resolved."""
    merged_rows: int | None = resolved()
    """Entries per KV head of a merged full-attention layer, such that all layers together meet the budget."""

    recompressible: ClassVar[str | None] = "merged entries are not merged again, and later entries stay as they are."
    card: ClassVar[Card] = Card(
        name="kvmerger",
        title="Model Tells You Where to Merge: Adaptive KV Cache Merging for LLMs on Long-Context Tasks",
        idea="Keys of neighboring tokens are often nearly parallel. "
        "Runs of them are merged into one entry, a Gaussian-weighted mean around the one with the most attention.",
        arxiv="2407.08454",
        year=2024,
        family="merging",
        stages=("compression",),
        budget=BudgetKind.STORED,
        paper_budget="50%",
        heads="independent",
        upstream=None,
        deviations=(
            ("The most similar neighbors are joined until the budget is met exactly. The paper does not say how its "
            "budgets are met; mode=eps is its threshold, which takes no budget."),
            ("Values are weighted means. The paper's equation 7 multiplies the mean by the number of entries, without "
            "more softmax weight: value_mode=sum. value_mode=bias multiplies the softmax weight instead, is exact for "
            "equal entries, and takes four more bytes per entry."),
            ("The paper gives the protected shares for budgets of 50 % and 35 %. Other budgets use the nearest pair, "
            "in proportion to the budget; mode=eps uses that of 50 %."),
            ("If the protected shares leave too few neighbors to meet the budget, both are lowered in proportion. This "
            "can happen with skipped layers, with max_run, or with larger shares than the paper's."),
            "In a sliding-window layer a merged entry has the position of its pivot.",
        ),
        unverified=(
            ("recent and heavy: the paper prints 0.17 % and 0.12 % for a budget of 50 %, 0.08 % and 0.02 % for 35 %, "
            "which is read here as 17 % and 12 %, 8 % and 2 %."),
            ("sigma: the paper's definition is circular; its ablation is best at 5. fixed_point takes two rounds from "
            "there."),
            ("skip: reported for models of 32 layers, whose first two and last layers merge little because their "
            "attention is diffuse; on models below 16 layers no layer is skipped by default."),
        ),
        limits=(
            ("A budget is met even if neighbors are not similar, and a low one leaves little choice: of the pairs that "
            "are not protected, 79 % are joined at 50 %, 73 % at 35 %, 82 % at 25 % and 93 % at 10 % (bundled model, "
            "1,024 tokens; at 25 % down to a cosine of 0.08), and more if layers are skipped. Only mode=eps never "
            "joins dissimilar neighbors."),
            "Merged entries are never merged again, and entries after the context stay as they are.",
            ("Keys are merged after rotation: over long runs the channels with fast rotation average out. max_run "
            "limits the length of runs."),
            "mode=eps takes no budget: the number of entries left depends on the text; see the measured bytes.",
            "Summing the attention of each entry needs a second pass over queries and keys, which counts as prefill.",
        ),
    )

    @property
    def budget_kind(self) -> BudgetKind:
        """Stored bytes; nothing with `mode=eps`, where the settings and the text decide what is stored."""
        return BudgetKind.BITS if self.mode == "eps" else self.card.budget

    def fit(self, budget: Budget | None, shape: Shape) -> Self:
        """Resolve the merged layers and their entries, so that the mean over all layers is the budget."""
        skipped = self._skipped(len(shape.layers))
        if self.mode == "eps":
            if len(skipped) == len(shape.layers):
                raise UserError(f"kvmerger: skip={list(skipped)} is every layer of the model. Leave one of them out.")
            if budget is not None:
                raise UserError(
                    f"kvmerger takes no budget with mode=eps, got {budget}: the threshold and the text decide how "
                    "many entries are left. Leave --budget out, or use --set mode=exact."
                )
            return replace(self, length=shape.length, skipped=skipped, protected=self._shares(DEFAULT_SHARE))
        fitted = replace(super().fit(budget, shape), skipped=skipped)
        if fitted.rows is None or fitted.rows >= shape.length:
            return replace(fitted, merged_rows=None, protected=None)  # of an earlier fit
        full, skipped_bytes = shape.full_bytes, sum(shape.layer_bytes(shape.layers[x]) for x in skipped)
        least = 1 + self._borders(shape.length)

        def needs(entries: int) -> int:  # bytes times the length, to stay whole
            return entries * (full - skipped_bytes) + skipped_bytes * shape.length

        entries = solve(needs, fitted.rows * full, range(least, shape.length))
        if entries is None:
            reachable = math.ceil(needs(least) / full)
            raise too_small("kvmerger", budget or DEFAULT_BUDGET, fitted.rows, shape.length, reachable)
        return replace(fitted, merged_rows=entries, protected=self._shares(fitted.rows / shape.length))

    def entries_in(self, layer: int, window: int | None) -> int | None:
        """The budget of a merged layer, None for a skipped one; sliding layers keep the same share of their window."""
        if self.merged_rows is None:
            return super().entries_in(layer, window)
        return None if self._skips(layer) else self.in_window(self.merged_rows, window)

    def identity(self, shape: Shape) -> bool:
        """Whether nothing is merged: at the full budget, or with a threshold that no cosine reaches."""
        return self.eps > 1 if self.mode == "eps" else super().identity(shape)

    def declared_bytes(self, shape: Shape) -> int:
        """Bytes of entries and offsets; with `mode=eps` they depend on the text (`UndeclaredError`)."""
        if self.mode == "eps":
            raise UndeclaredError("kvmerger cannot declare its bytes with mode=eps: the text decides what is left.")
        return super().declared_bytes(shape)

    def layer(self, index: int) -> LayerKV:
        """A store of entries and the attention that they receive, which determines the pivots."""
        return MergingKV(column_sums=not self._skips(index), ragged=True, bias=self.value_mode == "bias")

    def evict(self, kv: LayerKV, step: Step) -> None:
        """Merge once, after the attention of the context's last chunk, so that the prefill is exact."""
        if not step.moment.compresses:
            return
        kv.refuse_frozen()
        entries = self.entries_in(step.layer, step.window)
        if self._skips(step.layer) or (self.mode == "exact" and (entries is None or entries >= kv.n)):
            return
        joins = self.join(kv, entries)
        if joins.any():
            self._merge(kv, step, joins)

    def join(self, kv: LayerKV, entries: int | None) -> Tensor:
        """Mark the entries to merge with the next one. [B, H_kv, n - 1] bool

        entries: how many to leave per KV head; None: join all pairs above `eps`.
        """
        count = kv.n
        keys = kv.keys.float()
        similarity = F.cosine_similarity(keys[:, :, :-1], keys[:, :, 1:], dim=-1)
        protected = self._protected(kv, entries)
        allowed = ~(protected[..., :-1] | protected[..., 1:])
        if self.max_run is not None:
            allowed &= torch.arange(1, count, device=keys.device) % self.max_run != 0
        if entries is None:
            return allowed & (similarity >= self.eps)
        best = top_entries(similarity.masked_fill(~allowed, -torch.inf), count - entries)
        return torch.zeros_like(allowed).scatter_(-1, best, True)

    def _protected(self, kv: LayerKV, entries: int | None) -> Tensor:
        """Mark the protected entries: the last ones, and those with the most attention. [B, H_kv, n] bool"""
        recent, heavy = (int(x * kv.n) for x in self.protected or (self.recent or 0.0, self.heavy or 0.0))
        if entries is not None:  # a protected last entry blocks one join, another at most two
            available, needed = entries - 1 - self._borders(kv.n), recent + 2 * heavy
            if needed > available:
                recent, heavy = recent * available // needed, heavy * available // needed
        mass = kv.scores.clone()
        mass[..., kv.n - recent :] = -torch.inf
        protected = mass == -torch.inf
        return protected.scatter_(-1, top_entries(mass, heavy), True)

    def _shares(self, budget: float) -> tuple[float, float] | None:
        """The protected shares at a budget, by default the paper's; None if both settings are given."""
        nearest = min(PAPER_SHARES, key=lambda x: abs(x - budget))
        scale = 1.0 if abs(nearest - budget) <= BUDGET_TOLERANCE else budget / nearest  # budgets are rounded
        recent, heavy = (x * scale for x in PAPER_SHARES[nearest])
        pair = recent if self.recent is None else self.recent, heavy if self.heavy is None else self.heavy
        return None if pair == (self.recent, self.heavy) else pair

    def _merge(self, kv: LayerKV, step: Step, joins: Tensor) -> None:
        sigma, refine = (FIRST_SIGMA, REFINEMENTS) if self.sigma == "fixed_point" else (self.sigma, 0)
        merged = merge_sets(kv.keys, kv.values, kv.scores, joins, sigma=sigma, refine=refine)
        value, position, bias = merged.value, None, None
        if self.value_mode == "sum":
            value = (value.float() * merged.size[:, None]).to(value.dtype)
        elif self.value_mode == "bias":
            bias = merged.size.float().log()
        if step.window is not None or kv.track:
            places = kv.logical_positions().expand(*joins.shape[:2], -1).flatten(0, 1)
            heads = torch.arange(places.shape[0], device=places.device).repeat_interleave(merged.counts.flatten())
            position = places[heads, merged.pivot].to(torch.int32)
        kv.freeze(merged.key, value, merged.counts, position=position, bias=bias)

    def _skips(self, layer: int) -> bool:
        return self.skipped is not None and layer in self.skipped

    def _skipped(self, layers: int) -> tuple[int, ...]:
        asked = diffuse_layers(layers) if self.skip is None else self.skip
        if wrong := [x for x in asked if not -layers <= x < layers]:
            raise UserError(
                f"kvmerger: skip names layer {wrong[0]} of a model of {layers}. Allowed: {-layers} to {layers - 1}."
            )
        return tuple(sorted({x % layers for x in asked}))

    def _borders(self, entries: int) -> int:
        """Number of neighbors that `max_run` does not allow to join."""
        return 0 if self.max_run is None else (entries - 1) // self.max_run
