"""The prompt without its documents: the lower end of the scale on which reuse is measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from kvbench.method import BudgetKind, Card, Method, Moment
from kvbench.store.reused import ReusedKV

if TYPE_CHECKING:
    from kvbench.engine.session import Session


@dataclass(frozen=True)
class NoContext(Method):
    """Runs the instruction and what follows the documents, and never sees a document."""

    reads_parts: ClassVar[bool] = True
    recompressible: ClassVar[str | None] = "every entry of what is run is stored."
    card: ClassVar[Card] = Card(
        name="no-context",
        version="2",
        title="The prompt without its documents",
        idea="The model answers from the instruction and the question alone. A method that reuses documents should be "
        "between this and a full prefill.",
        arxiv=None,
        year=None,
        family="reuse",
        stages=(),
        budget=BudgetKind.NONE,
        heads="independent",
        upstream=None,
        limits=("The task must name the parts of its prompt; the suite `reuse` does.",),
    )

    def layer(self, index: int) -> ReusedKV:
        """Every entry of what is run."""
        del index
        return ReusedKV()

    def skipped_tokens(self, parts: Sequence[int]) -> int:
        """Those of the documents."""
        return sum(parts[1:])

    def prefill(self, session: Session, chunks: Iterable[Tensor]) -> Tensor:
        """Run the prompt without the documents."""
        if session.reuse is None:
            return session.run_chunks(chunks, Moment.CONTEXT_END)
        ids = torch.cat(list(chunks), dim=1)
        first, *documents = session.reuse.parts
        skipped = sum(map(len, documents))
        kept = torch.cat([ids[:, : len(first)], ids[:, len(first) + skipped :]], dim=1)
        logits = session.run_chunks([kept], Moment.CONTEXT_END)
        session.seen, session.behind = ids.shape[1], skipped  # the conversation has them, and no position is left out
        for kv in session.layers:
            assert isinstance(kv, ReusedKV)
            kv.seen = session.seen
            kv.dropped, kv.computed = skipped * kv.keys.shape[1], kept.shape[1]
        session.exact = not skipped
        return logits
