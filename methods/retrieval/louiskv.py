"""LouisKV: clusters of keys are chosen again only when the direction of the query changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.constraints import Ge, Le, Positive, Share
from kvbench.errors import UserError
from kvbench.kernels.ragged_attention import Partial
from kvbench.method import BudgetKind, Card, LayerShape, Method, Shape, Step, resolved
from kvbench.store import LayerKV
from kvbench.store.chosen import ChosenKV
from kvbench.techniques.calibration import calibrate, calibrated
from kvbench.techniques.clustering import cluster_segments
from kvbench.techniques.reading import ClusterMethod, mark_units

if TYPE_CHECKING:
    from kvbench.hf import Model

INDEX_BYTES = 4


@dataclass(frozen=True)
class LouisKV(ClusterMethod):
    """Reads, per KV head, the best clusters of the context's keys; a token like the one before reads the same ones."""

    threshold: Annotated[float, Ge(-1), Le(1)] | None = None
    """Mean cosine of a token's queries with those of the token before, below which clusters are chosen again; None:
    calibrated."""
    rate: Share = 0.125
    """Share of the tokens of a text that choose again with the calibrated threshold."""
    tokens: Positive = 2048
    """Tokens of text on which the threshold is calibrated, before the run."""
    sinks: Positive = 32
    """First entries, which are always read."""
    recent: Positive = 32
    """Last entries of the context, which are always read."""

    turn: float | None = resolved(by_bind=True)
    """The threshold, as given or calibrated."""

    card: ClassVar[Card] = Card(
        name="louiskv",
        title="LouisKV: Efficient KV Cache Retrieval for Long Input-Output Sequences",
        idea="Tokens in a row need the same entries until the direction of the query changes, so only then are entries "
        "chosen again. The units of choice are clusters of the prompt's keys, which lie scattered over the text.",
        arxiv="2510.11292",
        year=2025,
        version="2",
        family="retrieval",
        stages=("retrieval", "loading"),
        budget=BudgetKind.READ,
        paper_budget="512",
        calibration="the cosine of queries in a row, in one pass",
        heads="pooled",
        upstream=None,
        deviations=(
            ("The budget counts sinks and recent entries; the paper's counts the clusters' entries only."),
            ("Later entries are always read, in addition to the budget: the paper moves the oldest ones, in segments "
            "between two choices, out of a full buffer of unknown size."),
            "Each token of a question compares its queries with those of the token before it, as if it were decoded.",
            ("By default entries stay on the device. With tier=host they are on the host, as in the paper, and chosen "
            "ones are fetched for every token; the paper keeps those of the last token."),
        ),
        unverified=(
            ("No code was published when this was written, and we did not have the paper: the method follows summaries "
            "of it."),
            ("rate: the paper's threshold, 0.7 for Qwen3-8B, depends on the model; by the summaries about 300 samples "
            "gave it. Here one for all layers is calibrated on Python's manual, so that this share of the steps "
            "choose."),
            "tokens: chosen so that calibration takes seconds.",
            "iterations, sinks and recent: we did not have the paper's numbers.",
            "segment: k-means runs on at most 8,192 neighboring entries, which bounds its time.",
            "Queries are compared after rotation.",
            "The last cluster is read in part where the budget ends.",
        ),
        limits=(
            "It saves reads; the index is stored in addition to all entries.", "The prompt is run with full attention.",
            ("The manual's text differs between versions of Python, and other text chooses more or less often; the "
            "result has the threshold and the number of choices."),
        ),
    )

    @property
    def calibration(self) -> str | None:
        """Nothing where the threshold is given."""
        return self.card.calibration if self.threshold is None else None

    def bind(self, model: Model) -> Self:
        """Calibrate the threshold, unless it is given."""
        if self.threshold is not None:
            return replace(self, turn=self.threshold)
        found = calibrate(model, CosineRecorder(), self.tokens, lambda state, _: state["cosines"])
        cosines = [calibrated(found, i).cpu() for i, x in enumerate(model.layers) if x.window is None]
        return replace(self, turn=find_threshold(cosines, self.rate))

    def rebind(self, resolution: Mapping[str, object], shape: Shape) -> Self:
        """Take the threshold from a result (`UserError` unless it is a cosine)."""
        del shape
        turn = self.threshold if self.threshold is not None else resolution.get("turn")
        if turn is None:
            return self
        if isinstance(turn, bool) or not isinstance(turn, float | int) or not -1 <= turn <= 1:
            raise UserError(f"louiskv: turn {turn} must be a number from -1 to 1.")
        return replace(self, turn=turn)

    def start(self, kv: ChosenKV, step: Step) -> None:
        """Cluster the keys between sinks and recent entries, and put each cluster's entries next to each other."""
        keys = kv.keys[:, :, self.sinks : kv.n - self.recent]
        centers, labels = cluster_segments(keys, self.cluster, self.segment, self.iterations)
        offsets = self.order_by_cluster(kv, labels, centers.shape[2])
        kv.start({"centers": centers.to(kv.keys.dtype), "offsets": offsets})
        kv.state["query"] = torch.zeros_like(step.query[:, :, 0])
        kv.state["chosen"] = offsets.new_full((*labels.shape[:2], self.chosen), -1)

    def read(self, kv: ChosenKV, step: Step, seen: int) -> Partial:
        """Attention over sinks, chosen clusters, recent and later entries; clusters are chosen again where needed."""
        assert self.turn is not None
        query, before, chosen = step.query[:, :, 0], kv.state["query"], kv.state["chosen"]
        similar = F.cosine_similarity(query.float(), before.float(), dim=-1).mean(1)  # [B]
        again = (similar < self.turn) | (chosen[:, 0, 0] < 0)
        before.copy_(query)
        count = int(again.sum())
        if count:
            chosen[again] = self.choose(kv, query[again], again, step.scale)
        kv.reads["retrievals"] += count
        mask = torch.ones((*chosen.shape[:2], seen), dtype=torch.bool, device=chosen.device)
        mask[:, :, self.sinks : kv.indexed - self.recent] = False
        return kv.read(step, mask.scatter_(2, chosen.long(), True))

    def choose(self, kv: ChosenKV, query: Tensor, sequences: Tensor, scale: float) -> Tensor:
        """The entries of the clusters with the largest mean share over the group. query: [b, H_q, D]. [b, H_kv, C]"""
        centers, offsets = kv.scan(kv.index["centers"][sequences]), kv.scan(kv.index["offsets"][sequences])
        grouped = query.unflatten(1, (centers.shape[1], -1))
        shares = (grouped.float() @ centers.float().mT * scale).softmax(-1).mean(2)  # [b, H_kv, U]
        mask = mark_units(shares, offsets, kv.indexed - self.sinks - self.recent, self.chosen)
        found = mask.nonzero()[:, 2].view(*mask.shape[:2], -1) + self.sinks
        return found.to(offsets.dtype)

    def index_bytes(self, layer: LayerShape, shape: Shape) -> int:
        """Bytes of the clusters, of the chosen entries and of the last token's queries."""
        queries = layer.query_heads * layer.key_dim * shape.itemsize
        return self.scanned_bytes(layer, shape) + layer.kv_heads * self.chosen * INDEX_BYTES + queries

    def token_bytes(self, layer: LayerShape, shape: Shape) -> int:
        """Bytes that a token reads which chooses again."""
        return self.entry_bytes(layer, shape) + self.scanned_bytes(layer, shape)

    def least_token_bytes(self, layer: LayerShape, shape: Shape) -> int:
        """Bytes that a token reads which does not choose again."""
        return self.entry_bytes(layer, shape)


@dataclass(frozen=True)
class CosineRecorder(Method):
    """The full cache; keeps the mean cosine of every token's queries with those of the token before."""

    def attend(self, kv: LayerKV, step: Step) -> Tensor:
        """Attention over every entry. [B, H_q, T, D_v]"""
        queries = step.query[0].float()  # [H_q, T, D]
        if "query" in kv.state:
            queries = torch.cat([kv.state["query"], queries], dim=1)
        found = F.cosine_similarity(queries[:, 1:], queries[:, :-1], dim=-1).mean(0)
        kv.state["cosines"] = torch.cat([kv.state.get("cosines", found[:0]), found])
        kv.state["query"] = queries[:, -1:]
        return kv.attend(step)


def find_threshold(cosines: list[Tensor], rate: float) -> float:
    """The cosine below which this share of all layers' tokens lies; 1, so that all choose, without such layers."""
    if not cosines:
        return 1.0
    return round(float(torch.cat(cosines).quantile(rate)), 4)
