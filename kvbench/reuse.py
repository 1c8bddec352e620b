"""The base class of methods that reuse KV entries across prompts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from kvbench.engine.reuse import Mixed, refuse_windows
from kvbench.errors import UserError
from kvbench.method import Method, Moment, Step
from kvbench.store.chunks import Owner
from kvbench.store.reused import ReusedKV

if TYPE_CHECKING:
    from kvbench.engine.session import Session

__all__ = ["Behind", "Mixed", "ReuseMethod", "ReusedKV"]

Behind = Literal["nothing", "first token", "instruction"]
LIMITS = (
    "The task must name the parts of its prompt; the suite `reuse` does.",
    "A part is reused if it was a part of an earlier prompt. All others are computed.",
    "One prompt at a time, in one pass whatever the chunk size; no sliding windows.",
    ("Stored keys are in the model's element type and before rotation: in 16 bits, taking the rotation off and putting "
    "it on again rounds twice."),
)


@dataclass(frozen=True)
class ReuseMethod(Method):
    """Takes over the entries of the context's parts, run apart from each other, and runs the rest.

    A subclass overrides `place` for other entries, and `run` for other tokens to compute.
    """

    reads_parts: ClassVar[bool] = True
    behind: Behind = "first token"
    """The tokens before a document when it is run for its chunk: none, the prompt's first token, or its instruction."""

    def layer(self, index: int) -> ReusedKV:
        """Every entry."""
        del index
        return ReusedKV()

    def prefill(self, session: Session, chunks: Iterable[Tensor]) -> Tensor:
        """HOW A PROMPT IS RUN: take over entries, and compute the others. Without parts, all of it."""
        if session.reuse is None:
            return session.run_chunks(chunks, Moment.CONTEXT_END)
        refuse_windows(session.model)
        ids = torch.cat(list(chunks), dim=1)
        if len(ids) > 1:
            raise UserError(f"{self.card.name} runs one prompt at a time, not {len(ids)}.")
        mixed = Mixed(session, ids, session.reuse, self.owner(session), self.read)
        self.place(mixed)
        logits = self.run(mixed)
        mixed.finish()
        return logits

    def owner(self, session: Session) -> Owner:
        """Everything that the chunks of this run depend on besides their text."""
        model, reuse = session.model, session.reuse
        return Owner(
            f"{model.id} {model.sha256} {model.dtype}", f"{self.card.name} {self.card.version} {self.settings}",
            None if reuse is None else reuse.template,
        )

    def before(self, mixed: Mixed) -> tuple[int, ...]:
        """The tokens that a document follows when it is run for its chunk."""
        instruction = mixed.reuse.parts[0]
        return {"nothing": (), "first token": instruction[:1], "instruction": instruction}[self.behind]

    def place(self, mixed: Mixed) -> None:
        """TAKEN OVER: the parts that occur in earlier prompts, each run by itself."""
        known = mixed.reuse.known
        for i, (start, part) in enumerate(mixed.parts):
            if part in known:
                mixed.add(mixed.obtain(self.before(mixed) if i else (), part), start)

    def run(self, mixed: Mixed) -> Tensor:
        """COMPUTED: by default what was not taken over. Logits of the last token. [1, V]"""
        return mixed.run(mixed.fresh)

    def read(self, kv: ReusedKV, step: Step, places: Tensor) -> Tensor:
        """Attention of the prompt's computed tokens at these places [m]. [1, H_q, m, D_v]"""
        return kv.attend_at(step, places)
