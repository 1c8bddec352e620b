"""KVMerger: runs of neighboring entries with nearly parallel keys become one entry around the most attended of them."""

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
from kvbench.selection import top_entries
from kvbench.store import Fact, LayerKV

PAPER_SKIP = (0, 1, -1)
PAPER_SHARES = {0.5: (0.17, 0.12), 0.35: (0.08, 0.02)}
"""Of the entries, those that are never merged, by budget: the last ones, and the most attended of the others."""
DEFAULT_SHARE = 0.5
"""Whose pair a threshold has, which takes no budget."""
DEEP = 16
"""Layers from which on a model skips the paper's three: of fewer layers they would be too many."""
FIRST_SIGMA, REFINEMENTS = 5.0, 2
"""Of the fixed point."""
BIAS_BYTES = 4


@dataclass
class MergingKV(LayerKV):
    """Entries of which some stand for several; `dropped` counts those that were merged into another.

    bias: each entry stores the logarithm of the number of entries that it stands for.
    """

    bias: bool = False

    def bytes_for(self, layer: LayerShape, shape: Shape, entries: int) -> int:
        """Keys, values, offsets and, on merged layers, the bias."""
        bias = entries * layer.kv_heads * BIAS_BYTES if self.bias and entries < shape.rows(layer) else 0
        return super().bytes_for(layer, shape, entries) + bias

    def facts(self) -> dict[str, Fact]:
        """Entries that are held no more, all of them merged."""
        return {**super().facts(), "entries_merged": Fact(self.dropped)}


@dataclass(frozen=True)
class KVMerger(Method):
    """Merges neighbors by the cosine of their keys, weighted by a Gaussian around each set's pivot."""

    mode: Literal["exact", "eps"] = "exact"
    """`exact`: as many joins as the budget asks for, the most similar first. `eps`: all above the threshold."""
    eps: Annotated[float, Gt(0)] = 0.75
    """Under `eps`: neighbors whose keys have this cosine or more are joined."""
    recent: Share | None = None
    """Share of the entries, the last ones, that are never merged; None: the paper's for the budget."""
    heavy: Share | None = None
    """Share of the entries, those with the most attention among the others, that are never merged; None: likewise."""
    sigma: Annotated[float, Gt(0)] | Literal["fixed_point"] = 5.0
    """Width of the Gaussian; `fixed_point`: each set's own, the mean of its weights over the square root of two."""
    value_mode: Literal["mean", "sum", "bias"] = "mean"
    """A set's value: the weighted mean; the mean times the rows; the mean, and the log of the rows on the logit."""
    max_run: Annotated[int, Ge(2)] | None = None
    """No set crosses a multiple of that many entries; None: sets of any length."""
    skip: tuple[int, ...] | None = None
    """Layers that are not merged; None: 0, 1 and the last on models of 16 layers or more, none on others."""

    protected: tuple[float, float] | None = resolved()
    """`recent` and `heavy`, as resolved; None: both are set."""
    skipped: tuple[int, ...] | None = resolved()
    """Layers that are not merged."""
    merged_rows: int | None = resolved()
    """Entries per KV head of a full-attention layer that is merged: what the skipped layers leave of the budget."""

    recompressible: ClassVar[str | None] = "merged entries are frozen: what comes later stays as it is."
    card: ClassVar[Card] = Card(
        name="kvmerger",
        title="Model Tells You Where to Merge: Adaptive KV Cache Merging for LLMs on Long-Context Tasks",
        idea="Keys of neighboring tokens are often nearly parallel. "
        "Runs of them become one entry, a Gaussian-weighted mean around the entry with the most attention.",
        arxiv="2407.08454",
        year=2024,
        family="merging",
        stages=("compression",),
        budget=BudgetKind.STORED,
        paper_budget="50%",
        heads="independent",
        upstream=None,
        deviations=(
            ("The budget is met exactly: the most similar neighbors are joined until so many rows are left. The paper "
            "does not say how its budgets are met; mode=eps is its threshold, which takes no budget."),
            ("Values are weighted means. The paper's equation 7 multiplies them by the number of entries under one "
            "softmax weight: value_mode=sum. value_mode=bias gives the entry the weight of so many, is exact for equal "
            "entries, and takes four bytes more per entry."),
            ("The paper protects two pairs of shares of the rows, for budgets of 50 % and 35 %. Another budget has the "
            "nearest pair, in proportion to the budget; mode=eps that of 50 %."),
            ("Where the protected shares leave too few neighbors to join for the budget, both are lowered in "
            "proportion: with skipped layers, max_run, or larger shares than the paper's."),
            "A merged entry stands at its pivot's position where a window counts.",
        ),
        unverified=(
            ("recent and heavy: the paper prints 0.17 % and 0.12 % for a budget of 50 %, 0.08 % and 0.02 % for 35 %, "
            "read here as 17 % and 12 %, 8 % and 2 %."),
            ("sigma: the paper's definition is circular; 5 is where its ablation is best. fixed_point takes two rounds "
            "from there."),
            ("skip: reported for models of 32 layers, whose first two and last merge little because their attention is "
            "diffuse; on models below 16 layers nothing is skipped unless it is set."),
        ),
        limits=(
            ("A budget is met whether neighbors are alike or not, and a low one leaves little choice: of the pairs "
            "that are not protected 79 % are joined at 50 %, 73 % at 35 %, 82 % at 25 % and 93 % at 10 % (bundled "
            "model, 1,024 tokens; at 25 % down to a cosine of 0.08), and more where layers are skipped. Only mode=eps "
            "joins nothing but what is alike."),
            "Entries that were merged are never merged again, and what comes after the context stays as it is.",
            ("Keys are merged with their rotation inside: over long runs what turns fast averages out. max_run bounds "
            "them."),
            "mode=eps takes no budget: the text decides what is left, and only the measured bytes say how much.",
            "The column sums need a second pass over queries and keys, which counts as prefill.",
        ),
    )

    @property
    def budget_kind(self) -> BudgetKind:
        """Stored bytes; nothing with `mode=eps`, where the settings and the text decide what is stored."""
        return BudgetKind.BITS if self.mode == "eps" else self.card.budget

    def fit(self, budget: Budget | None, shape: Shape) -> Self:
        """Which layers are merged, and to how many entries, so that the mean over all layers is the budget."""
        skipped = self._skipped(len(shape.layers))
        if self.mode == "eps":
            if len(skipped) == len(shape.layers):
                raise UserError(f"kvmerger: skip={list(skipped)} is every layer of the model. Merge one of them.")
            if budget is not None:
                raise UserError(
                    f"kvmerger takes no budget with mode=eps, got {budget}: the threshold and the text decide what is "
                    "left. Leave --budget out, or use --set mode=exact."
                )
            return replace(self, length=shape.length, skipped=skipped, protected=self._shares(DEFAULT_SHARE))
        fitted = replace(super().fit(budget, shape), skipped=skipped)
        if fitted.rows is None or fitted.rows >= shape.length:
            return fitted
        dense, whole = shape.full_bytes, sum(shape.layer_bytes(shape.layers[x]) for x in skipped)
        least = 1 + self._borders(shape.length)

        def needs(entries: int) -> int:  # times the length
            return entries * (dense - whole) + whole * shape.length

        rows = solve(needs, fitted.rows * dense, range(least, shape.length))
        if rows is None:
            reachable = math.ceil(needs(least) / dense)
            raise too_small("kvmerger", budget or DEFAULT_BUDGET, fitted.rows, shape.length, reachable)
        return replace(fitted, merged_rows=rows, protected=self._shares(fitted.rows / shape.length))

    def entries_in(self, layer: int, window: int | None) -> int | None:
        """What the skipped layers leave of the budget; sliding layers keep the same share of what they hold."""
        if self.merged_rows is None:
            return super().entries_in(layer, window)
        return None if self._skips(layer) else self.in_window(self.merged_rows, window)

    def identity(self, shape: Shape) -> bool:
        """The whole budget, or a threshold that no cosine reaches."""
        return self.eps > 1 if self.mode == "eps" else super().identity(shape)

    def declared_bytes(self, shape: Shape) -> int:
        """Entries and offsets, but the text decides how many where a threshold does."""
        if self.mode == "eps":
            raise UndeclaredError("kvmerger cannot say with mode=eps how many bytes it will hold: the text decides.")
        return super().declared_bytes(shape)

    def layer(self, index: int) -> LayerKV:
        """Entries with the attention that they received, which chooses the pivots."""
        return MergingKV(column_sums=not self._skips(index), ragged=True, bias=self.value_mode == "bias")

    def evict(self, kv: LayerKV, step: Step) -> None:
        """Once, after the attention of the context's last chunk, so that the prefill itself is exact."""
        if not step.moment.compresses:
            return
        kv.refuse_frozen()
        rows = self.entries_in(step.layer, step.window)
        if self._skips(step.layer) or (self.mode == "exact" and (rows is None or rows >= kv.n)):
            return
        joins = self.join(kv, rows)
        if joins.any():
            self._merge(kv, step, joins)

    def join(self, kv: LayerKV, rows: int | None) -> Tensor:
        """Which entries are merged with the next; `rows` is how many to leave, None: `eps` decides. [B, H_kv, n - 1]"""
        count = kv.n
        keys = kv.keys.float()
        similarity = F.cosine_similarity(keys[:, :, :-1], keys[:, :, 1:], dim=-1)
        protected = self._protected(kv, rows)
        allowed = ~(protected[..., :-1] | protected[..., 1:])
        if self.max_run is not None:
            allowed &= torch.arange(1, count, device=keys.device) % self.max_run != 0
        if rows is None:
            return allowed & (similarity >= self.eps)
        best = top_entries(similarity.masked_fill(~allowed, -torch.inf), count - rows)
        return torch.zeros_like(allowed).scatter_(-1, best, True)

    def _protected(self, kv: LayerKV, rows: int | None) -> Tensor:
        """Which entries stay as they are: the last, and of the others those with the most attention. [B, H_kv, n]"""
        recent, heavy = (int(x * kv.n) for x in self.protected or (self.recent or 0.0, self.heavy or 0.0))
        if rows is not None:  # the last take one neighbor each out of reach, the others at most two
            room, needed = rows - 1 - self._borders(kv.n), recent + 2 * heavy
            if needed > room:
                recent, heavy = recent * room // needed, heavy * room // needed
        mass = kv.scores.clone()
        mass[..., kv.n - recent :] = -torch.inf
        protected = mass == -torch.inf
        return protected.scatter_(-1, top_entries(mass, heavy), True)

    def _shares(self, budget: float) -> tuple[float, float] | None:
        """The protected shares at a budget of that many entries, the paper's where they are not set; None: both are."""
        nearest = min(PAPER_SHARES, key=lambda x: abs(x - budget))
        scale = 1.0 if abs(nearest - budget) <= BUDGET_TOLERANCE else budget / nearest  # entries are whole
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
        asked = (PAPER_SKIP if layers >= DEEP else ()) if self.skip is None else self.skip
        if wrong := [x for x in asked if not -layers <= x < layers]:
            raise UserError(
                f"kvmerger: skip names layer {wrong[0]} of a model of {layers}. Allowed: {-layers} to {layers - 1}."
            )
        return tuple(sorted({x % layers for x in asked}))

    def _borders(self, rows: int) -> int:
        """Neighbors of that many entries that `max_run` keeps apart."""
        return 0 if self.max_run is None else (rows - 1) // self.max_run

