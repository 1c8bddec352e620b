"""RelayCaching: entries of text that another prompt produced, corrected in the layers where they deviate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.constraints import Positive, Share
from kvbench.method import BudgetKind, Card, Step
from kvbench.techniques.reuse import (
    LIMITS,
    MixedPrompt,
    ReusedKV,
    ReuseMethod,
    attention_rows,
    find_source,
    run_earlier,
)

ROUNDING = 1e-6
"""Distances below this are none."""


@dataclass(frozen=True)
class RelayCaching(ReuseMethod):
    """Takes over entries as they were in the earlier prompt, and corrects tokens that deviate or matter most."""

    start: Share = 0.1
    """Layers below this share of the depth take over all entries."""
    detect: Share = 0.2
    """Depth of the layer that chooses tokens; those from `start` to it are computed whole."""
    end: Share = 0.9
    """Layers above this share of the depth take over all entries again."""
    deviation: float = 1.5
    """A document's token is computed again if its values deviate by more than this many times the documents' mean."""
    influence: float = 1.45
    """Or if the last tokens attend to it more than this many times the documents' mean."""
    suffix: Positive = 10
    """Last tokens whose attention counts."""
    card: ClassVar[Card] = Card(
        name="relaycaching",
        version="2",
        title="RelayCaching: reusing decoding-phase caches between agents",
        idea="Text that one agent wrote is read by the next, which can take over its entries. They deviate mainly in "
        "middle layers and on few tokens, and these are computed again.",
        arxiv="2603.13289",
        year=2026,
        family="reuse",
        stages=("generation", "loading"),
        budget=BudgetKind.NONE,
        heads="pooled",
        upstream=None,
        deviations=(
            "Tokens run through the first layers so that later ones can compute them; their entries there stay.",
        ),
        unverified=(
            "First layer, detection layer and last layer: the paper calibrates them for each model.",
            "The attention of the last tokens is that of the detection layer.",
        ),
        limits=(
            *LIMITS,
            ("With a hidden question the prompt's last tokens, whose attention counts, are text of the last document "
            "and not the question."),
        ),
    )

    def place(self, mixed: MixedPrompt) -> None:
        """Take over documents of earlier prompts, as they were there, and the instruction if one begins with it."""
        for i, (start, part) in enumerate(mixed.parts):
            source = find_source(mixed, i)
            if source is not None:
                prompt, place = source
                if place and not i:
                    continue  # behind other text it is not exact, and only documents are corrected
                first = sum(map(len, prompt[:place]))
                mixed.add(run_earlier(mixed, prompt), start, first=first, count=len(part))

    def run(self, mixed: MixedPrompt) -> Tensor:
        """Compute all tokens up to the detection layer, then those that it chooses, up to the last layer."""
        depth = len(mixed.layers) - 1
        first, check, last = (round(x * depth) for x in (self.start, self.detect, self.end))

        def narrow(step: Step, kv: ReusedKV) -> Tensor | None:
            if step.layer == last and last >= check:
                return mixed.fresh
            if step.layer != check:
                return None
            at_hand = mixed.reused.nonzero()[:, 0]
            at_hand = at_hand[at_hand >= len(mixed.reuse.parts[0])]  # the instruction is exact, and has the sink tokens
            old, new = (x[0].transpose(0, 1).flatten(1).float() for x in (kv.values, step.value))  # [N, H_kv * D_v]
            change = 1 - torch.cosine_similarity(old[at_hand], new[at_hand])
            change = change.where(change > ROUNDING, 0.0)
            tail = slice(mixed.length - min(self.suffix, mixed.length), None)
            weights = attention_rows(step, step.key, mixed.places, tail).sum((0, 1))[at_hand]
            chosen = (change > self.deviation * change.mean()) | (weights > self.influence * weights.mean())
            return mixed.with_fresh(at_hand[chosen])

        return mixed.run(mixed.places, narrow=narrow, writes=lambda layer: first <= layer <= last)
