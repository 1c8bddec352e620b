"""Base class of methods that compute a part of the prompt's attention, and the choice of blocks by their mass."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

import torch

from kvbench.constraints import Positive
from kvbench.errors import UserError
from kvbench.method import Budget, Method, Moment, Shape, resolved
from kvbench.store.prompt import Chosen, PromptKV

if TYPE_CHECKING:
    from torch import Tensor

    from kvbench.engine.session import Session
    from kvbench.step import Step
    from kvbench.store import LayerKV

BLOCKS = 32
"""Blocks of a context that is shorter than as many blocks of the published size."""


@dataclass(frozen=True)
class SparsePrefillMethod(Method):
    """Chooses, for every block of a prompt's queries, the entries that they read; the others are never multiplied.

    The context is run in one pass, because later queries decide for earlier ones. Questions and decode steps read
    every entry, and sliding-window layers stay exact.
    """

    block: Positive | None = None
    """Tokens per block. None: the published size, and a power of two near a 32nd of the context if that is less."""

    block_size: int | None = resolved()
    """Tokens per block, as resolved."""

    published_block: ClassVar[int] = 128
    inexact_prefill: ClassVar[str | None] = "a part of the prompt's attention is left out."
    recompressible: ClassVar[str | None] = "it changes how the context is run, and stores every entry."
    replays_context: ClassVar[bool] = False

    @abstractmethod
    def choose(self, query: Tensor, key: Tensor, step: Step) -> Chosen:
        """The entries that the queries of a prompt read, before any is read.

        A method that decides while it reads overrides `attend_prompt` instead. query: [B, H_q, T, D].
        key: [B, H_kv, T, D].
        """

    def minimum_entries(self) -> int:
        """Tokens of the shortest context in which blocks are left out."""
        return BLOCKS

    def fit(self, budget: Budget | None, shape: Shape) -> Self:
        """Resolve the size of blocks; refuse a model of which every layer stays exact (`UserError`)."""
        if all(x.window is not None for x in shape.layers):
            raise UserError(
                f"{self.card.name} keeps sliding-window layers exact, and this model has no others: it would have no "
                "effect. Use a model with full attention."
            )
        found = self.block
        if found is None:
            found = min(self.published_block, 1 << max(0, (shape.length // BLOCKS).bit_length() - 1))
        return replace(super().fit(budget, shape), length=shape.length, block_size=found)

    def layer(self, index: int) -> LayerKV:
        """A store that counts the prompt's attention."""
        del index
        return PromptKV()

    def prefill(self, session: Session, chunks: Iterable[Tensor]) -> Tensor:
        """Run the context in one pass. [B, V]"""
        return session.run_chunks([torch.cat(list(chunks), dim=1)], Moment.CONTEXT_END)

    def attend(self, kv: LayerKV, step: Step) -> Tensor:
        """Attention over chosen entries in the context, and over every entry later. [B, H_q, T, D_v]"""
        if not isinstance(kv, PromptKV) or not step.moment.in_context or step.window is not None:
            return kv.attend(step)
        return self.attend_prompt(kv, step)

    def attend_prompt(self, kv: PromptKV, step: Step) -> Tensor:
        """Attention of the prompt over the entries that the method chooses. [B, H_q, T, D_v]"""
        return kv.attend_chosen(step, self.choose(step.query, kv.keys, step))

    def scaled(self, tokens: int, published_length: int) -> int:
        """As large a part of this context as `tokens` were of the published one; at least one, at most `tokens`."""
        assert self.length is not None
        return min(tokens, max(1, round(tokens * self.length / published_length)))


def first_and_own(count: int, like: Tensor) -> Tensor:
    """The first block and the own one of every block of queries. [count, count] bool"""
    always = torch.eye(count, dtype=torch.bool, device=like.device)
    always[:, 0] = True
    return always


def cover_mass(mass: Tensor, share: float, always: Tensor) -> Tensor:
    """The fewest blocks of every row that hold this share of its mass, those marked `always` first. [..., n] bool

    mass: [..., n], at least 0. always: the same shape, or one that expands to it.
    """
    always = always.expand_as(mass)
    if share >= 1:  # whatever rounding does to sums
        return torch.ones_like(always)
    order = mass.masked_fill(always, torch.inf).argsort(dim=-1, descending=True, stable=True)
    ordered = mass.gather(-1, order)
    before = ordered.cumsum(-1) - ordered
    taken = before < share * mass.sum(-1, keepdim=True)
    return torch.zeros_like(always).scatter_(-1, order, taken) | always
