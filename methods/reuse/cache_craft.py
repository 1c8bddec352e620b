"""Cache-Craft: entries from another prompt, of which as many are computed again as that prompt's prefix differs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from kvbench.constraints import Ge
from kvbench.engine.reuse import Ids, run_prompt
from kvbench.method import BudgetKind, Card, Step
from kvbench.store import LayerKV
from kvbench.techniques.reuse import LIMITS, Chunk, MixedPrompt, ReuseMethod, attention_rows

BLOCK = 256
"""Queries whose attention weights exist at once."""
MASS = "mass"
"""Attention from each token to each part of its prompt, mean over layers and heads. [N, parts]"""


def find_share(masses: list[float], sizes: list[int], old: tuple[Ids, ...], new: tuple[Ids, ...]) -> float:
    """The share of a document to compute again before alpha, CCI (1 - beta'); equations 3 to 12.

    masses: attention from the document to each part before it and to itself, summed over its tokens.
    sizes: tokens of these parts. old, new: the parts before it where it was run, and here.
    """
    *inter, intra = masses
    size = sizes[-1]
    mean = sum(x / (size * n) for x, n in zip(inter, sizes, strict=False))
    influence = 1 / (1 + math.exp(-mean / (intra / size**2))) if intra else 1.0
    common = [i for i, part in enumerate(old) if part in new]
    total = sum(inter)
    overlap = sum(inter[i] for i in common) / total if total else 1.0
    ranks = [new.index(old[i]) for i in common]
    pairs = list(combinations(ranks, 2))
    disorder = sum(x > y for x, y in pairs) / len(pairs) if pairs else 0.0
    return influence * (1 - overlap * (1 - disorder))


@dataclass(frozen=True)
class CacheCraft(ReuseMethod):
    """Takes documents from the earlier prompts in which they depended least on what is different now."""

    alpha: Annotated[float, Ge(0)] = 1.0
    """Factor of the share that is computed again."""
    card: ClassVar[Card] = Card(
        name="cache-craft",
        title="Cache-Craft: managing chunk-caches for efficient retrieval-augmented generation",
        idea="A document's entries are kept with the attention that it paid to the parts before it. The share of it "
        "that is computed again grows with that attention and with how much the parts before it have changed.",
        arxiv="2502.15734",
        year=2025,
        family="reuse",
        stages=("generation", "loading"),
        budget=BudgetKind.NONE,
        heads="pooled",
        upstream=None,
        deviations=(
            "Documents on which the question does not focus are computed again like others.",
            "All variants of a document are kept: those of every earlier prompt of the example.",
        ),
        unverified=(
            "alpha: the paper chooses it on validation data.",
            ("A token's attention to its own document includes itself. Two implementations of others differ in this; "
            "we did not have the paper's equation."),
        ),
        limits=(*LIMITS, "Attention weights are computed a second time while an earlier prompt runs, in blocks."),
    )

    def place(self, mixed: MixedPrompt) -> None:
        """Take over each part from the earlier prompt with the least to compute.

        Its tokens that paid most attention to the parts before it are computed.
        """
        for i, (start, part) in enumerate(mixed.parts):
            best: tuple[float, Chunk, int, Tensor] | None = None
            for prompt in mixed.reuse.earlier:
                if part in prompt:
                    place = prompt.index(part)
                    chunk = self._measure(mixed, prompt)
                    first = sum(map(len, prompt[:place]))
                    mass = chunk.notes[MASS][first : first + len(part), : place + 1]
                    sizes = [len(x) for x in prompt[: place + 1]]
                    share = self.alpha * find_share(
                        mass.sum(0).tolist(), sizes, prompt[:place], mixed.reuse.parts[:i]
                    )
                    if best is None or share < best[0]:
                        best = share, chunk, first, mass[:, :-1].sum(-1)
            if best is not None:
                share, chunk, first, paid = best
                mixed.add(chunk, start, first=first, count=len(part))
                mixed.renew(start + paid.topk(math.ceil(min(1.0, share) * len(part))).indices)

    def _measure(self, mixed: MixedPrompt, prompt: tuple[Ids, ...]) -> Chunk:
        """An earlier prompt's entries, with the attention between its parts."""
        sizes = [len(part) for part in prompt]
        masses: list[Tensor] = []

        def look(step: Step, kv: LayerKV) -> None:
            places = torch.arange(step.key.shape[2], device=step.key.device)
            rows = []
            for low in range(0, len(places), BLOCK):
                weights = attention_rows(step, kv.keys, places, slice(low, low + BLOCK)).mean(0)
                rows.append(torch.stack([x.sum(-1) for x in weights.split(sizes, dim=-1)], dim=-1))
            masses.append(torch.cat(rows))

        def make() -> Chunk:
            chunk = run_prompt(mixed.model, ids, look)
            return Chunk(chunk.keys, chunk.values, {MASS: torch.stack(masses).mean(0)})

        ids = [x for part in prompt for x in part]
        return mixed.obtain((), ids, make, sizes)
