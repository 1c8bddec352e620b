"""Random eviction while decoding: the control that every method with eviction while decoding should beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.constraints import Natural
from kvbench.method import BudgetKind, Card, Step
from kvbench.selection import RollingMethod, mark_recent
from kvbench.store import LayerKV

SEEDS = 1 << 64
"""Torch takes seeds below this number. A setting of eight digits, such as a date, would give a greater one."""


@dataclass(frozen=True)
class RandomDecode(RollingMethod):
    """Keeps to the budget in every step: drops random entries, but none of the prompt and none of the last tokens."""

    window: Natural = 32
    """Last tokens, which are always kept."""
    seed: int = 0

    card: ClassVar[Card] = Card(
        name="random-decode",
        title="Random Attention: Rethinking KV Cache Eviction for Efficient Reasoning",
        idea="The prompt stays, and each head drops a random generated entry whenever it is over its budget. "
        "It is the control for every method that evicts while decoding.",
        arxiv="2609.03430",
        year=2026,
        family="eviction",
        stages=("compression",),
        budget=BudgetKind.STORED,
        heads="indexed",
        upstream=None,
        deviations=(
            ("Each step drops what is over the budget, which the last `window` tokens are a part of. The paper keeps "
            "the last 64 in addition to the budget, and draws once in 64 steps."),
        ),
        limits=(
            ("A prompt that leaves no more than `window` entries of the budget cannot be pinned: it is evicted at "
            "random too, as by `random`. Pass a budget in tokens that is larger than the prompt and the window."),
        ),
    )

    def minimum_entries(self) -> int:
        """The window and one entry to choose."""
        return self.window + 1

    def layer(self, index: int) -> LayerKV:
        """A store with positions, in which entries are dropped in place."""
        return LayerKV(track=True, bounded=True)

    def score(self, kv: LayerKV, step: Step, entries: int) -> Tensor:
        """Random numbers by head and position, new in every step; infinite for prompt and window. [B, H_kv, n]"""
        assert kv.positions is not None and self.length is not None
        number = (self.seed * 1_000_003 + step.layer) * 1_000_003 + step.seen
        generator = torch.Generator().manual_seed(number % SEEDS)
        numbers = torch.rand(kv.keys.shape[1], step.seen, generator=generator).to(kv.keys.device)
        scores = numbers.expand(kv.keys.shape[0], -1, -1).gather(-1, kv.positions.long())
        kept = mark_recent(kv, step, self.window)
        if entries > self.length + self.window:
            kept = kept | (kv.positions < self.length)
        return scores.masked_fill(kept, torch.inf)
