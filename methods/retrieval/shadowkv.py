"""ShadowKV: keys are stored at low rank and values on the host; each token restores the chunks that it selects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

import torch.nn.functional as F
from torch import Tensor

from kvbench.constraints import Natural, Positive
from kvbench.errors import UserError
from kvbench.method import Budget, BudgetKind, Card, LayerShape, Method, Shape, Step, Upstream, resolved
from kvbench.selection import require_inverse_rotation
from kvbench.store import LayerKV
from kvbench.store.lowrank import Factoring, LowRankKV

if TYPE_CHECKING:
    from kvbench.hf import Model

PAPER_RANK, NARROWEST = 160, 256
"""The rank that the paper uses for all models, and the smallest key width among them, over all heads (GLM-4-9B)."""
PAPER_OUTLIERS, PAPER_BUDGET = 48, 2048


@dataclass(frozen=True)
class ShadowKV(Method):
    """Selects, per KV head and token, the chunks whose mean keys get the most attention from any head of the group."""

    chunk: Positive = 8
    """Entries per chunk."""
    rank: Positive | None = None
    """Rank of the keys of all heads before rotation. None: the paper's 160, less if keys are narrower than 256."""
    local_chunks: Natural = 4
    """Number of last whole chunks of the context that stay exact; the entries after them stay exact too."""
    outlier_chunks: Natural | None = None
    """Chunks per KV head that stay exact because their mean key represents them worst. None: in proportion to the
    budget, 48 for 2,048 entries as in the paper."""

    key_rank: int | None = resolved()
    """The rank, as resolved."""
    outliers: int | None = resolved()
    """The number of outlier chunks, as resolved."""

    card: ClassVar[Card] = Card(
        name="shadowkv",
        version="2",
        title="ShadowKV: KV Cache in Shadows for High-Throughput Long-Context LLM Inference",
        idea="Before rotation the keys of one prompt have low rank, so the GPU keeps only their factors, and values "
        "go to the host. From the mean key of each chunk a token selects the chunks to rebuild and fetch.",
        arxiv="2410.21465",
        year=2024,
        family="retrieval",
        stages=("compression", "retrieval", "loading"),
        budget=BudgetKind.READ,
        paper_budget="2048",
        heads="pooled",
        upstream=Upstream(repo="bytedance/ShadowKV", commit="a21f5a9", license="Apache-2.0"),
        deviations=(
            ("The keys of the context's chunks are factored together, those of outlier chunks included; the authors' "
            "code also factors the keys of the last entries, which stay exact in both."),
            ("Each token of a question selects its own chunks, as if it were decoded, so that results do not depend on "
            "how a question is split; the authors' code sums the scores of all tokens for one selection."),
            ("The factors come from the eigenvectors of the keys' Gram matrix. They span the same subspace as the "
            "singular vectors of the keys; the factors of the entries contain the scale."),
            "Outlier chunks are not copied to the host: they stay exact on the device and are never selected.",
            "Scores are scaled as in the model's attention; the authors' code always divides by the root of 128.",
        ),
        unverified=(
            ("rank: 160 if the keys of a layer are 256 or more wide over all heads (256 is the smallest width in the "
            "paper); five eighths of the width, the same share, if they are narrower."),
            ("outlier_chunks: in proportion to the budget, as in the authors' CPU class at 1,024 and 2,048 entries; "
            "their GPU class always uses 48."),
        ),
        limits=(
            ("The budget counts the entries selected per token. Outlier chunks, the last entries of the context and "
            "all later entries are read in addition."),
            ("A context whose chunks could all be selected is stored exactly. Such settings are declared lossless, and "
            "the effect check counts them (`n_identity`, `layers_dense`)."),
            "Sliding-window layers stay exact. Generated tokens and later questions are not compressed.",
            "It needs rotary embeddings that kvbench can invert.",
            ("On a CPU the host is simulated, and a step is slower than with the full cache: rotating thousands of "
            "rebuilt keys to their positions costs more than reading them. Chunks selected again cost nothing."),
        ),
    )

    recompressible: ClassVar[str | None] = "the keys of a context are factored once, and later entries stay exact."
    graphable: ClassVar[str | None] = "the host must know which values to send, so each step waits for its selection."

    def minimum_entries(self) -> int:
        """One chunk."""
        return self.chunk

    def bind(self, model: Model) -> Self:
        """Refuse a model whose rotary embedding cannot be inverted (`UserError`)."""
        require_inverse_rotation(model, "shadowkv")
        return self

    def fit(self, budget: Budget | None, shape: Shape) -> Self:
        """Resolve the budget, the rank and the number of outlier chunks."""
        fitted = super().fit(budget, shape)
        width = min((x.kv_heads * x.key_dim for x in shape.layers if x.window is None), default=NARROWEST)
        usual = max(1, min(PAPER_RANK, width * PAPER_RANK // NARROWEST))
        if self.rank is not None and self.rank > width:
            raise UserError(
                f"shadowkv: rank {self.rank} is above the key width of the model, {width} over all heads of a layer. "
                f"Use --set rank=1 to {width}, or leave it out for {usual}."
            )
        outliers = self.outlier_chunks
        if outliers is None and fitted.rows is not None:
            outliers = round(fitted.rows * PAPER_OUTLIERS / PAPER_BUDGET)
        fitted = replace(fitted, key_rank=usual if self.rank is None else self.rank, outliers=outliers)
        if not fitted.identity(shape) and all(x.window is not None for x in shape.layers):
            raise UserError(
                "shadowkv keeps sliding-window layers exact, and this model has no others: it would have no effect. "
                "Use a method that selects in them, such as quest."
            )
        return fitted

    def factoring(self, length: int) -> Factoring | None:
        """How a context is divided, or None if a token could select every chunk, so that all entries stay exact."""
        if self.rows is None or self.outliers is None or self.key_rank is None:
            return None
        chunks, slots = length // self.chunk - self.local_chunks, self.rows // self.chunk
        if chunks - self.outliers <= slots:
            return None
        return Factoring(self.chunk, chunks, self.outliers, slots, self.key_rank)

    def identity(self, shape: Shape) -> bool:
        """Whether everything stays exact: at the full budget, or if a token could select every chunk."""
        return self.factoring(shape.length) is None

    def layer(self, index: int) -> LayerKV:
        """A store of exact entries that `evict` factors at the end of the context."""
        return LowRankKV()

    def evict(self, kv: LayerKV, step: Step) -> None:
        """At the end of the context: choose outliers, and store the other chunks as factors and values on the host."""
        if not step.moment.compresses or step.window is not None or not isinstance(kv, LowRankKV):
            return
        if kv.selective:
            raise UserError(
                "shadowkv factors the keys of a context once, and later entries stay exact. Leave --recompress out."
            )
        if (plan := self.factoring(kv.n)) is not None:
            inside = kv.keys[:, :, : plan.chunks * plan.size]
            kv.factorize(step.rope, *find_outliers(inside, plan.size, plan.outliers), plan)

    def attend(self, kv: LayerKV, step: Step) -> Tensor:
        """Attention over exact entries and the chunks that each token selects. [B, H_q, T, D_v]"""
        if not isinstance(kv, LowRankKV) or not kv.selective:
            return kv.attend(step)
        assert self.rows is not None
        return kv.attend_chunks(step, select_chunks(step.query, kv.landmarks, step.scale, self.rows // self.chunk))

    def declared_bytes(self, shape: Shape) -> int:
        """Bytes of factored layers, and of the others in full."""
        return self._sum(shape, Factoring.stored_bytes, shape.layer_bytes)

    def copied_bytes(self, shape: Shape) -> int:
        """Bytes of the slots, which are written in place."""
        return self._sum(shape, Factoring.slot_bytes, lambda _: 0)

    def declared_read_bytes(self, shape: Shape) -> int:
        """Bytes that a step reads if none of its chunks is in a slot already."""
        return self._sum(shape, Factoring.read_bytes, shape.layer_bytes)

    def least_read_bytes(self, shape: Shape) -> int:
        """Bytes that a step reads if all of its chunks are in slots already."""
        return self._sum(shape, Factoring.least_read_bytes, shape.layer_bytes)

    def declared_host_bytes(self, shape: Shape) -> int:
        """Bytes of the values on the host."""
        return self._sum(shape, Factoring.host_bytes, lambda _: 0)

    def _sum(
        self, shape: Shape, factored: Callable[[Factoring, LayerShape, Shape], int], exact: Callable[[LayerShape], int]
    ) -> int:
        plan = self.factoring(shape.length)
        return sum(exact(x) if plan is None or x.window is not None else factored(plan, x, shape) for x in shape.layers)


def find_outliers(keys: Tensor, chunk: int, count: int) -> tuple[Tensor, Tensor]:
    """The mean key of each chunk, and the chunks with the keys least similar to it. [B, H_kv, c, D], [B, H_kv, count]

    keys: [B, H_kv, c * chunk, D], rotated.
    """
    chunks = keys.float().unflatten(2, (-1, chunk))
    landmarks = chunks.mean(3)
    similarity = F.cosine_similarity(chunks, landmarks[:, :, :, None], dim=-1).amin(-1)  # [B, H_kv, c]
    return landmarks, similarity.topk(count, dim=-1, largest=False).indices.sort(-1).values


def select_chunks(query: Tensor, landmarks: Tensor, scale: float, count: int) -> Tensor:
    """The chunks with the largest share of attention in any head of the group. [B, H_kv, T, count]

    query: [B, H_q, T, D]. landmarks: [B, H_kv, J, D].
    """
    grouped = query.unflatten(1, (landmarks.shape[1], -1)).flatten(2, 3)  # [B, H_kv, G * T, D]
    products = (landmarks.float() @ grouped.float().mT).mT  # [B, H_kv, G * T, J]
    logits = products.unflatten(2, (-1, query.shape[2])) * scale
    share: Tensor = logits.softmax(-1).amax(2)
    return share.topk(count, dim=-1).indices
