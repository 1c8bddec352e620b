"""ShadowKV: low-rank keys stay, values go to the host, and each token brings back the chunks that it looks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

import torch.nn.functional as F
from torch import Tensor

from kvbench.constraints import Natural, Positive
from kvbench.errors import UserError
from kvbench.method import Budget, BudgetKind, Card, LayerShape, Method, Shape, Step, Upstream, resolved
from kvbench.store import LayerKV
from kvbench.store.lowrank import Factoring, LowRankKV

if TYPE_CHECKING:
    from kvbench.hf import Model

PAPER_RANK, NARROWEST = 160, 256
"""The rank that the paper gives all its models, and the width of the narrowest one's keys (GLM-4-9B)."""
PAPER_OUTLIERS, PAPER_BUDGET = 48, 2048


@dataclass(frozen=True)
class ShadowKV(Method):
    """Selects, per KV head and token, the chunks whose mean key some head of the group attends to most."""

    chunk: Positive = 8
    """Entries per chunk."""
    rank: Positive | None = None
    """Of the keys before rotation, all heads together; none: the paper's 160, less where keys are narrower than 256."""
    local_chunks: Natural = 4
    """Last chunks of the context that stay exact, and what is left after them."""
    outlier_chunks: Natural | None = None
    """Chunks per KV head that stay exact because their mean says least; none: the paper's 48 for 2,048 entries, in
    proportion to the budget."""

    key_rank: int | None = resolved()
    """The rank, as resolved."""
    outliers: int | None = resolved()
    """The outlier chunks, as resolved."""

    card: ClassVar[Card] = Card(
        name="shadowkv",
        title="ShadowKV: KV Cache in Shadows for High-Throughput Long-Context LLM Inference",
        idea="Before rotation the keys of one prompt are of low rank, so their factors are all that the GPU keeps; "
        "values wait on the host. The mean key of each chunk tells which chunks a token needs rebuilt and fetched.",
        arxiv="2410.21465",
        year=2024,
        family="retrieval",
        stages=("compression", "retrieval", "loading"),
        budget=BudgetKind.READ,
        paper_budget="2048",
        heads="pooled",
        upstream=Upstream(repo="bytedance/ShadowKV", commit=None, license=None),
        deviations=(
            ("A question's tokens select one by one, as if they were decoded, so that nothing depends on how a "
            "question is cut; the authors' code adds the scores of all its tokens up to one selection."),
            ("The factors come from the eigenvectors of the keys' Gram matrix: the same subspace as the decomposition "
            "of the keys themselves, with the scale in the factors of the entries."),
            "Outlier chunks are not on the host as well: they stay exact and are never selected.",
            "Scores are scaled as the model's attention is; the authors' code divides by the root of 128 always.",
        ),
        unverified=(
            ("rank: 160 where the keys of a layer are 256 wide over all heads, as the paper's narrowest are, or wider; "
            "below that the same share of the width, five eighths."),
            ("outlier_chunks: in proportion to the budget, as the authors' CPU class has it at 1,024 and 2,048 rows; "
            "their GPU class always has 48."),
        ),
        limits=(
            ("The budget counts the rows selected per token. Outlier chunks, the context's last rows and all later "
            "entries are read next to them."),
            ("A context whose chunks could all be selected is held dense: these are declared settings of no loss, and "
            "the effect counts them (`n_identity`, `layers_dense`)."),
            "Sliding-window layers stay exact. Generated entries and later questions are not compressed.",
            "Needs rotary embeddings that kvbench understands.",
            ("On a CPU the host is simulated, and a step is slower than a dense one: turning thousands of rebuilt keys "
            "to their positions costs more there than reading them would. Chunks that are selected again are free."),
        ),
    )

    recompressible: ClassVar[str | None] = "the keys of a context are factored once: later entries stay exact."
    graphable: ClassVar[str | None] = "the host must know which values to send, so a step waits for what it selected."

    def minimum_entries(self) -> int:
        """One chunk."""
        return self.chunk

    def bind(self, model: Model) -> Self:
        """Refuse a model whose rotation cannot be taken off its keys."""
        if not all(rope.trusted for rope in model.ropes):
            raise UserError(
                f"shadowkv takes the rotation off keys, and that of {model.id} is not understood on every layer. "
                "Use a method that leaves it on, such as quest."
            )
        return self

    def fit(self, budget: Budget | None, shape: Shape) -> Self:
        """Resolve the budget, and from it and the model's widths the rank and the outlier chunks."""
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
                "shadowkv leaves sliding-window layers dense, and this model has no others: nothing would happen. Use "
                "a method that selects in them, such as quest."
            )
        return fitted

    def factoring(self, length: int) -> Factoring | None:
        """How a context is divided; None: a token could select every chunk, so all entries stay exact."""
        if self.rows is None or self.outliers is None or self.key_rank is None:
            return None
        chunks, slots = length // self.chunk - self.local_chunks, self.rows // self.chunk
        if chunks - self.outliers <= slots:
            return None
        return Factoring(self.chunk, chunks, self.outliers, slots, self.key_rank)

    def identity(self, shape: Shape) -> bool:
        """Everything stays exact at the full budget, and where the budget reaches every chunk."""
        return self.factoring(shape.length) is None

    def layer(self, index: int) -> LayerKV:
        """Exact entries that are factored at the end of the context."""
        return LowRankKV()

    def evict(self, kv: LayerKV, step: Step) -> None:
        """At the end of the context: choose outliers, and store the other chunks as factors and values on the host."""
        if not step.moment.compresses or step.window is not None or not isinstance(kv, LowRankKV):
            return
        if kv.selective:
            raise UserError(
                "shadowkv factors the keys of a context once: later entries stay exact. Leave --recompress out."
            )
        if (plan := self.factoring(kv.n)) is not None:
            inside = kv.keys[:, :, : plan.chunks * plan.size]
            kv.factorize(step.rope, *find_outliers(inside, plan.size, plan.outliers), plan)

    def attend(self, kv: LayerKV, step: Step) -> Tensor:
        """Attention over exact entries and the chunks that each token selects."""
        if not isinstance(kv, LowRankKV) or not kv.selective:
            return kv.attend(step)
        assert self.rows is not None
        return kv.attend_chunks(step, select_chunks(step.query, kv.landmarks, step.scale, self.rows // self.chunk))

    def declared_bytes(self, shape: Shape) -> int:
        """Factored layers, and the others as they are."""
        return self._sum(shape, Factoring.stored_bytes, shape.layer_bytes)

    def declared_read_bytes(self, shape: Shape) -> int:
        """A step that finds none of its chunks in a slot."""
        return self._sum(shape, Factoring.read_bytes, shape.layer_bytes)

    def declared_host_bytes(self, shape: Shape) -> int:
        """Values of the chunks that are stored apart."""
        return self._sum(shape, Factoring.host_bytes, lambda _: 0)

    def _sum(
        self, shape: Shape, factored: Callable[[Factoring, LayerShape, Shape], int], exact: Callable[[LayerShape], int]
    ) -> int:
        plan = self.factoring(shape.length)
        return sum(exact(x) if plan is None or x.window is not None else factored(plan, x, shape) for x in shape.layers)


def find_outliers(keys: Tensor, chunk: int, count: int) -> tuple[Tensor, Tensor]:
    """The mean key of each chunk, and the chunks with a key that is least like it. [B, H_kv, c, D], [B, H_kv, count]

    keys: [B, H_kv, c * chunk, D], rotated.
    """
    chunks = keys.float().unflatten(2, (-1, chunk))
    landmarks = chunks.mean(3)
    likeness = F.cosine_similarity(chunks, landmarks[:, :, :, None], dim=-1).amin(-1)  # [B, H_kv, c]
    return landmarks, likeness.topk(count, dim=-1, largest=False).indices.sort(-1).values


def select_chunks(query: Tensor, landmarks: Tensor, scale: float, count: int) -> Tensor:
    """The chunks of each KV head that some head of its group gives the largest share. [B, H_kv, T, count]

    query: [B, H_q, T, D]. landmarks: [B, H_kv, J, D].
    """
    grouped = query.unflatten(1, (landmarks.shape[1], -1)).flatten(2, 3)  # [B, H_kv, G * T, D]
    logits = (landmarks @ grouped.mT).float().mT.unflatten(2, (-1, query.shape[2])) * scale  # [B, H_kv, G, T, J]
    share: Tensor = logits.softmax(-1).amax(2)
    return share.topk(count, dim=-1).indices
