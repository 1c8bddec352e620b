"""The base class of methods that reuse KV entries across prompts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from kvbench.engine.reuse import Ids, MixedPrompt, refuse_unfit
from kvbench.errors import UserError
from kvbench.method import Method, Moment, Step
from kvbench.store.chunks import Chunk, Owner
from kvbench.store.reused import ReusedKV

if TYPE_CHECKING:
    from kvbench.engine.session import Session

__all__ = [
    "ApartMethod", "Behind", "Chunk", "MixedPrompt", "ReuseMethod", "ReusedKV", "attention_rows", "find_source",
    "run_earlier",
]

Behind = Literal["nothing", "first token", "instruction"]
LIMITS = (
    "The task must name the parts of its prompt; the suite `reuse` does.",
    "A part is reused if it was a part of an earlier prompt. All others are computed.",
    "One prompt at a time, in one pass whatever the chunk size; no sliding windows, no learned positions.",
    ("The prompt's last token is always computed, and sees all before it. With a hidden question it may be the last of "
    "a document, whose entry it replaces."),
    ("Stored keys are in the model's element type and before rotation: in 16 bits, taking the rotation off and putting "
    "it on again rounds twice."),
)


@dataclass(frozen=True)
class ReuseMethod(Method):
    """Takes over entries of earlier prompts, and computes the rest of a prompt.

    A subclass says in `place` which entries these are, and in `run` which of them are computed all the same.
    """

    reads_parts: ClassVar[bool] = True
    recompressible: ClassVar[str | None] = "every entry is stored, and nothing is compressed."

    def layer(self, index: int) -> ReusedKV:
        """Every entry."""
        del index
        return ReusedKV()

    def prefill(self, session: Session, chunks: Iterable[Tensor]) -> Tensor:
        """Take over entries, and compute the others; without parts, compute all of them."""
        if session.reuse is None:
            return session.run_chunks(chunks, Moment.CONTEXT_END)
        refuse_unfit(session.model)
        ids = torch.cat(list(chunks), dim=1)
        if len(ids) > 1:
            raise UserError(f"{self.card.name} runs one prompt at a time, not {len(ids)}. Pass one prompt.")
        mixed = MixedPrompt(session, ids, session.reuse, self.owner(session))
        self.place(mixed)
        logits = self.run(mixed)
        mixed.finish()
        return logits

    def owner(self, session: Session) -> Owner:
        """Everything that the chunks of this run depend on besides their text."""
        model, reuse = session.model, session.reuse
        return Owner(
            f"{model.id} {model.sha256} {model.dtype}", f"{self.card.name} {self.card.version} {self.settings}",
            *((None, "") if reuse is None else (reuse.template, reuse.origin)),
        )

    @abstractmethod
    def place(self, mixed: MixedPrompt) -> None:
        """Add the chunks that are taken over to the prompt."""

    def run(self, mixed: MixedPrompt) -> Tensor:
        """Compute the tokens that were not taken over. Logits of the last token. [1, V]"""
        return mixed.run(mixed.fresh)


@dataclass(frozen=True)
class ApartMethod(ReuseMethod):
    """Takes over the parts that occur in earlier prompts, each run by itself."""

    behind: Behind = "first token"
    """The tokens before a document when it is run for its chunk: none, the prompt's first token, or its instruction."""

    def before(self, mixed: MixedPrompt) -> tuple[int, ...]:
        """The tokens that a document follows when it is run for its chunk."""
        instruction = mixed.reuse.parts[0]
        return {"nothing": (), "first token": instruction[:1], "instruction": instruction}[self.behind]

    def place(self, mixed: MixedPrompt) -> None:
        """Take over the parts that occur in earlier prompts, each run by itself."""
        known = mixed.reuse.known
        for i, (start, part) in enumerate(mixed.parts):
            if part in known:
                mixed.add(mixed.obtain(self.before(mixed) if i else (), part), start)


def attention_rows(step: Step, keys: Tensor, places: Tensor | None, rows: slice) -> Tensor:
    """Attention weights of some of a step's tokens over the entries up to their places. [H_q, t, N] float32

    keys: [1, H_kv, N, D]. places: of all of the step's tokens [m]; None: they read every entry. rows: the few tokens
    whose weights are wanted.
    """
    query = step.query[0, :, rows].unflatten(0, (keys.shape[1], -1))  # [H_kv, G, t, D]
    if keys.itemsize > 2:
        logits = (query @ keys[0, :, None].mT).float() * step.scale
    else:  # 16 bits would round large logits; by KV head, so that no float32 copy of all keys exists
        logits = torch.cat([q[None].float() @ k[None].float().mT for q, k in zip(query, keys[0], strict=True)])
        logits *= step.scale
    logits = step.cap(logits)
    if places is not None:
        later = torch.arange(keys.shape[2], device=keys.device) > places[rows, None]
        logits = logits.masked_fill(later, -torch.inf)
    weights: Tensor = logits.softmax(-1).flatten(0, 1)
    return weights


def run_earlier(mixed: MixedPrompt, prompt: tuple[Ids, ...]) -> Chunk:
    """The entries of an earlier prompt, all of which runs if they are not in the store."""
    return mixed.obtain((), [x for part in prompt for x in part])


def find_source(mixed: MixedPrompt, index: int) -> tuple[tuple[Ids, ...], int] | None:
    """The earlier prompt with a part, and the part's number there; None: no prompt has it.

    Of several, the one in which most of the parts before it are the same; then the latest.
    """
    parts, found = mixed.reuse.parts, []
    for age, prompt in enumerate(mixed.reuse.earlier):
        if parts[index] in prompt:
            place = prompt.index(parts[index])
            same = sum(x == y for x, y in zip(prompt[:place][::-1], parts[:index][::-1], strict=False))
            found.append((same - abs(place - index), age, prompt, place))
    if not found:
        return None
    _, _, prompt, place = max(found, key=lambda x: x[:2])
    return prompt, place
