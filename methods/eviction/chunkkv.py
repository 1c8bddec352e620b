"""ChunkKV: keeps whole chunks of neighboring tokens, the same in every head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench.constraints import Ge, Odd, Positive
from kvbench.errors import UserError
from kvbench.method import BudgetKind, Card, Method, Upstream
from kvbench.methods.eviction.criticalkv import CriticalScores
from kvbench.methods.eviction.snapkv import SnapKV
from kvbench.selection import ScoredMethod, go_around, rank
from kvbench.store import LayerKV

CUT = (
    "The budget is met exactly: of the last chunk that is kept, the first tokens stay. kvpress keeps a share of the "
    "chunks, whose tokens may be fewer than the budget, or more where a shorter last chunk is not kept."
)


@dataclass(frozen=True)
class ChunkSelection(ScoredMethod):
    """Keeps the chunks with the highest mean score over tokens and heads, all heads alike."""

    chunk: Positive = 10
    """Tokens per chunk."""

    def select(self, kv: LayerKV, scores: Tensor, entries: int) -> None:
        """Keep protected entries, then chunks by their mean score."""
        kv.keep(best_chunks(scores, self.chunk, entries)[:, None].expand(-1, kv.keys.shape[1], -1))


@dataclass(frozen=True)
class ChunkKV(ChunkSelection, SnapKV):
    """Keeps the observation window and the chunks that its queries put most attention on."""

    kernel: Annotated[int, Ge(1), Odd] = 1

    card: ClassVar[Card] = Card(
        name="chunkkv",
        title="ChunkKV: Semantic-Preserving KV Cache Compression for Efficient Long-Context LLM Inference",
        idea="Single tokens torn out of a sentence mean little. "
        "Whole chunks are ranked by the attention of the last tokens, so phrases are kept or dropped together.",
        arxiv="2502.00299",
        year=2025,
        family="eviction",
        stages=("compression",),
        budget=BudgetKind.STORED,
        heads="pooled",
        upstream=Upstream(repo="NVIDIA/kvpress", commit="8bb29b9", license="Apache-2.0"),
        deviations=(
            CUT,
            "A chunk has 10 tokens; kvpress's has 20.",
            ("The window is kept as it is, and a chunk that overlaps it is scored by its other tokens. In kvpress the "
            "window's tokens have the highest score, so that such a chunk mostly stays whole."),
            "Every layer chooses for itself; the paper's reuse of indices over layers saves time and is left out.",
        ),
        unverified=("window and kernel: the paper's window was not found; scores are not pooled, chunks do that.",),
        limits=("Entries are chosen by the last tokens: a question that is asked later does not affect the choice.",),
    )

    @classmethod
    def over(cls, inner: type[Method]) -> type[Method]:
        """Create `inner+chunkkv`: whole chunks by the scores of another method (`UserError` if heads fill a part)."""
        if issubclass(inner, CriticalScores):
            raise UserError(
                f"{inner.card.name}+chunkkv makes no sense: criticalkv fills a part of the budget in each head on its "
                "own, and chunkkv keeps the same entries in all heads. Leave one of the two out."
            )
        note = f"Whole chunks are kept, as in ChunkKV (arXiv {cls.card.arxiv}), by this method's scores."
        return go_around(inner, ChunkSelection, cls.card, note, CUT)


def best_chunks(scores: Tensor, chunk: int, entries: int) -> Tensor:
    """Ascending indices of protected entries and of the best chunks, the last one cut. [B, entries]

    scores: [B, H_kv, n], infinite for protected entries.
    """
    count = scores.shape[-1]
    protected = (scores == torch.inf).any(1)  # [B, n]
    totals = F.pad(scores.sum(1).masked_fill(protected, 0.0), (0, -count % chunk)).unflatten(-1, (-1, chunk))
    sizes = F.pad((~protected).float(), (0, -count % chunk)).unflatten(-1, (-1, chunk)).sum(-1)
    means = totals.sum(-1) / sizes.clamp_min(1)  # [B, chunks]
    ranks = rank(means)
    place = torch.arange(count, device=scores.device)
    order = (ranks[:, place // chunk] * count + place).masked_fill(protected, -1)
    return order.argsort(dim=-1, stable=True)[:, :entries].sort(dim=-1).values
