"""DapQ: scores entries by queries at the positions where the answer will stand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import torch
from torch import Tensor

from kvbench.constraints import Ge, Natural, Odd, Positive
from kvbench.engine.timing import now
from kvbench.errors import UserError
from kvbench.method import BudgetKind, Card, Method, Moment, Step
from kvbench.selection import Pool, group_mean, hide_unseen, pool_scores, protect_last, top_entries
from kvbench.store import LayerKV
from kvbench.store.scores import attention_mass_of

if TYPE_CHECKING:
    from kvbench.engine.session import Session


@dataclass(frozen=True)
class DapQ(Method):
    """Keeps, per KV head, the entries that pseudo tokens after the prompt put most attention on."""

    pseudo: Positive = 32
    """Tokens that are run after the prompt, to score its entries, and leave nothing behind."""
    prefix: Natural = 4
    """Number of them that repeat the first tokens of the prompt; the others repeat its last ones."""
    recent: Natural = 0
    """Last entries, which are always kept."""
    kernel: Annotated[int, Ge(1), Odd] = 7
    pool: Pool = "max"

    recompressible: ClassVar[str | None] = "its pseudo tokens follow the context only, and later entries stay."
    card: ClassVar[Card] = Card(
        name="dapq",
        title="Where Matters More Than What: Decoding-Aligned KV Cache Compression via Position-Aware Pseudo Queries",
        idea="The position of a query decides more about its attention than its content. "
        "So arbitrary tokens are run at the positions of the coming answer, and their queries choose the entries.",
        arxiv="2603.11564",
        year=2026,
        family="eviction",
        stages=("compression",),
        budget=BudgetKind.STORED,
        paper_budget="256",
        heads="independent",
        upstream=None,
        deviations=(
            ("The pseudo tokens are run after the prompt on a fork of its cache. The paper appends them to the prompt; "
            "because attention is causal, both give the same queries and the same first token."),
        ),
        unverified=(
            "No code was released, and we did not have the paper: the method follows summaries of it.",
            "Attention is averaged over pseudo tokens and over the query heads of a KV head.",
            "kernel, pool: SnapKV's.",
            "recent: the summaries name no last tokens that are always kept.",
            "prefix: the summaries name 4 and 28 tokens, or 2 and 30, as good content.",
        ),
        limits=(
            "The context and its pseudo tokens must fit the positions of the model.",
            "The pseudo tokens take one more forward pass, which counts as compression time.",
        ),
    )

    def __post_init__(self) -> None:
        """Refuse more repeated first tokens than pseudo tokens (`UserError`)."""
        super().__post_init__()
        if self.prefix > self.pseudo:
            raise UserError(
                f"dapq: prefix={self.prefix} is more than pseudo={self.pseudo}, which counts it. Use a smaller one."
            )

    def minimum_entries(self) -> int:
        """The recent entries and one to choose."""
        return self.recent + 1

    def prefill(self, session: Session, chunks: Iterable[Tensor]) -> Tensor:
        """Run the context, run the pseudo tokens on a fork to score its entries, then drop entries. [B, V]"""
        parts = list(chunks)
        ids = torch.cat(parts, dim=1)
        if self.rows is None or self.rows >= ids.shape[1]:
            return super().prefill(session, parts)
        probe = self.pseudo_ids(ids)
        if ids.shape[1] + probe.shape[1] > session.model.max_length:
            raise UserError(
                f"dapq runs {probe.shape[1]} tokens after a context of {ids.shape[1]}, and model {session.model.id} "
                f"takes at most {session.model.max_length} positions. Use a smaller --length."
            )
        for store in session.layers:
            store.capacity += probe.shape[1]  # so that the pseudo tokens are appended without a copy
        logits = super().prefill(session, parts)
        started = now(session.model.device)
        with session.fork() as branch:
            branch.method = PseudoPass(ids.shape[1])
            branch.run_chunks(probe.split(session.chunk or probe.shape[1], dim=1), Moment.TURN_END)
            masses = [store.state["mass"] / probe.shape[1] for store in branch.layers]
            session.credit(branch)
        for index, (store, mass) in enumerate(zip(session.layers, masses, strict=True)):
            store.capacity -= probe.shape[1]
            window = session.model.layers[index].window
            entries = self.entries_in(index, window)
            if entries is not None and entries < store.n:
                scores = pool_scores(group_mean(mass, store.keys.shape[1]), self.kernel, self.pool)
                store.keep(top_entries(hide_unseen(protect_last(scores, self.recent), store, window), entries))
        session.compress_seconds += now(session.model.device) - started
        return logits

    def pseudo_ids(self, ids: Tensor) -> Tensor:
        """The first tokens of the prompt, then its last ones. [B, pseudo], or all of a shorter prompt"""
        count = min(self.pseudo, ids.shape[1])
        prefix = min(self.prefix, count)
        return torch.cat([ids[:, :prefix], ids[:, ids.shape[1] - (count - prefix) :]], dim=1)


@dataclass(frozen=True)
class PseudoPass(Method):
    """The pass of the pseudo tokens: sums up their attention to the entries of the context."""

    context: int = 0
    """Tokens of the context."""

    def attend(self, kv: LayerKV, step: Step) -> Tensor:
        """Attention over every entry, normalized over earlier pseudo tokens too. [B, H_q, T, D_v]"""
        mass = attention_mass_of(step.query, kv, step)[..., : kv.n - (step.seen - self.context)]
        kv.state["mass"] = kv.state["mass"] + mass if "mass" in kv.state else mass
        return kv.attend(step)
