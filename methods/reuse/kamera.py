"""Kamera: a document's own entries, and a low-rank patch for the context in which it stood."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.constraints import Natural
from kvbench.engine.reuse import Ids, cut, run_prompt
from kvbench.method import BudgetKind, Card
from kvbench.techniques.reuse import LIMITS, ApartMethod, Chunk, MixedPrompt, find_source


def factor(change: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The best product of this rank. change: [1, H, T, D]. Returns [T, m] and [m, H * D] in float32."""
    left, sizes, right = torch.linalg.svd(change[0].transpose(0, 1).flatten(1).float(), full_matrices=False)
    return left[:, :rank] * sizes[:rank], right[:rank]


def patch(base: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Entries with a patch. base: [1, H, T, D]"""
    change = (left @ right).unflatten(1, (base.shape[1], base.shape[3])).transpose(0, 1)
    patched: Tensor = (base.float() + change).to(base.dtype)
    return patched


@dataclass(frozen=True)
class Kamera(ApartMethod):
    """Entries of a document alone plus the low-rank change that an earlier prompt made to them."""

    rank: Natural = 16
    card: ClassVar[Card] = Card(
        name="kamera",
        title="Kamera: position-free caches with a low-rank patch for their context",
        idea="A context changes the entries of a document by little more than a low-rank matrix per layer. The "
        "document's own entries, before rotation, are kept with that matrix, and moved by rotation.",
        arxiv="2606.23581",
        year=2026,
        family="reuse",
        stages=("generation", "loading"),
        budget=BudgetKind.NONE,
        heads="pooled",
        upstream=None,
        unverified=("The rank, and that the heads of a layer share a matrix: there is no public code.",),
        limits=(
            *LIMITS,
            "A patch is of one context, the earlier prompt that is most like this one up to the document.",
            ("Patches are in float32. That of T tokens takes more bytes than their entries where rank * (T + H * D) "
            "exceeds T * H * D, or half of it in 16 bits."),
        ),
    )

    def place(self, mixed: MixedPrompt) -> None:
        """Take over the documents of earlier prompts, run apart and patched for the context that they had there."""
        ran: dict[tuple[Ids, ...], Chunk] = {}
        for i, (start, part) in enumerate(mixed.parts):
            source = find_source(mixed, i)
            if source is None:
                continue
            prompt, place = source
            base = mixed.obtain(self.before(mixed) if i else (), part)
            context = tuple(x for other in prompt[:place] for x in other)
            if not i or not self.rank or context == self.before(mixed):
                mixed.add(base, start)
                continue
            make = partial(self._make, mixed, context, prompt, base, ran)
            notes = mixed.obtain(context, part, make, (len(self.before(mixed)), *self.before(mixed))).notes
            keys, values = (
                [patch(x, notes[f"{name} left {i}"], notes[f"{name} right {i}"]) for i, x in enumerate(held)]
                for name, held in (("key", base.keys), ("value", base.values))
            )
            mixed.add(Chunk(keys, values), start)

    def _make(
        self, mixed: MixedPrompt, context: Ids, prompt: tuple[Ids, ...], base: Chunk, ran: dict[tuple[Ids, ...], Chunk]
    ) -> Chunk:
        """The patch of a document behind a context, without entries. ran: prompts that were run for others before."""
        if prompt not in ran:
            ran[prompt] = run_prompt(mixed.model, [x for part in prompt for x in part])
        there, notes = cut(ran[prompt], len(context), base.length), {}
        for name, one, other in (("key", there.keys, base.keys), ("value", there.values, base.values)):
            for layer, (x, y) in enumerate(zip(one, other, strict=True)):
                left, right = factor(x.float() - y.float(), self.rank)
                notes[f"{name} left {layer}"], notes[f"{name} right {layer}"] = left, right
        nothing = cut(base, 0, 0)
        return Chunk(nothing.keys, nothing.values, notes)
