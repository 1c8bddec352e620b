"""FINCH: keeps the entries that the question at the end of the prompt attends to, and moves them together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import torch
from torch import Tensor

from kvbench.constraints import Positive
from kvbench.errors import UserError
from kvbench.method import BudgetKind, Card, Step, Upstream
from kvbench.selection import ScoredMethod, group_mean, protect_last, top_entries
from kvbench.store import LayerKV
from kvbench.store.scores import window_weights_of

if TYPE_CHECKING:
    from kvbench.hf import Model


@dataclass(frozen=True)
class Finch(ScoredMethod):
    """Keeps, per KV head, the question and the entries with most of its attention, at consecutive positions."""

    window: Positive = 32
    """Last tokens of the prompt that stand for the question; they are always kept."""
    positions: Literal["consecutive", "original"] = "consecutive"
    """Positions of the kept keys for distances: moved together, ending at the prompt's last, or those in the text."""

    recompressible: ClassVar[str | None] = "moved keys have left their places in the text."
    card: ClassVar[Card] = Card(
        name="finch",
        title="FINCH: Prompt-guided Key-Value Cache Compression for Large Language Models",
        idea="The question attends to the parts of the document that it needs. "
        "The most attended entries are kept and moved together, so that long documents fit a short range of positions.",
        arxiv="2408.00167",
        year=2024,
        family="eviction",
        stages=("compression",),
        budget=BudgetKind.STORED,
        heads="independent",
        upstream=Upstream(repo="NVIDIA/kvpress", commit="8bb29b9", license="Apache-2.0"),
        deviations=(
            ("The document is run as a whole and compressed once. The paper runs it in chunks, each with the question, "
            "and compresses after each."),
            ("The question is the last `window` tokens. kvpress marks its start with an extra token, which the model "
            "does not see."),
            ("Kept keys end at the prompt's last position, and later tokens follow them. kvpress moves them to the "
            "first positions, which leaves a gap before later tokens."),
            "Sliding layers keep original positions.",
        ),
        unverified=(
            ("Each query's weights are multiplied by the number of keys it sees; kvpress multiplies them by one less, "
            "the query's position."),
        ),
        limits=("With a hidden question the last tokens are not the question.",),
    )

    def minimum_entries(self) -> int:
        """The window and one entry to choose."""
        return self.window + 1

    def bind(self, model: Model) -> Self:
        """Refuse to move keys of a model that does not allow it (`UserError`)."""
        if self.positions == "consecutive" and not all(rope.trusted and rope.movable for rope in model.ropes):
            raise UserError(
                f"finch with positions=consecutive moves keys, and those of {model.id} cannot be moved: its positions "
                "are learned, or its rotation is not understood. Use --set positions=original."
            )
        return self

    def layer(self, index: int) -> LayerKV:
        """A store that also keeps the last queries, until the compression."""
        return LayerKV(queries=self.window)

    def score(self, kv: LayerKV, step: Step) -> Tensor:
        """Mean attention of the question, weighed by the keys that each query sees; infinite for it. [B, H_kv, n]"""
        assert kv.recent_queries is not None
        count = kv.recent_queries.shape[2]
        seen = torch.arange(step.seen - count + 1, step.seen + 1, device=kv.keys.device)[:, None]
        mass = torch.cat([(x * seen).mean(3) for x in window_weights_of(kv.recent_queries, kv, step)], dim=-1)
        return protect_last(group_mean(mass.flatten(1, 2), kv.keys.shape[1]), self.window)

    def select(self, kv: LayerKV, scores: Tensor, entries: int) -> None:
        """Keep the best entries of every head, and note their places."""
        kept = top_entries(scores, entries)
        kv.keep(kept)
        kv.state["kept"] = kept

    def evict(self, kv: LayerKV, step: Step) -> None:
        """Compress once, then move the kept keys together."""
        super().evict(kv, step)
        kept = kv.state.pop("kept", None)
        if kept is not None and self.positions == "consecutive" and step.window is None:
            goal = torch.arange(step.seen - kv.n, step.seen, device=kept.device)
            heads = kv.keys.flatten(0, 1)[:, None]  # distances differ by head
            kv.keys.copy_(step.rope.shift(heads, (goal - kept).flatten(0, 1)).view_as(kv.keys))
