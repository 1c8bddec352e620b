"""Prompt lookup: the tokens that followed the last ones earlier in the text are proposed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from kvbench.constraints import Positive
from kvbench.method import BudgetKind, Card, Upstream
from kvbench.methods.lossless.proposed import Proposed

if TYPE_CHECKING:
    from kvbench.engine.session import Session


@dataclass(frozen=True)
class PromptLookup(Proposed):
    """Proposes what followed the latest earlier occurrence of the last tokens."""

    longest: Positive = 3
    """Most tokens that are looked up; fewer if these have not occurred."""

    card: ClassVar[Card] = Card(
        name="prompt-lookup",
        version="2",
        title="Prompt lookup decoding",
        idea="The last tokens of the text are looked up in the text before them, and what followed there is the draft. "
        "One pass over the full cache verifies it, so that the answer is that of the full cache.",
        arxiv=None,
        year=2023,
        family="lossless",
        stages=("generation",),
        budget=BudgetKind.NONE,
        heads="independent",
        upstream=Upstream(repo="apoorvumang/prompt-lookup-decoding", commit="cada4fe", license=None),
        deviations=(
            ("The latest occurrence is taken, and the tokens after it, however few; the author takes the first one "
            "that 10 tokens follow, and looks up a shorter end where there is none."),
            "Up to 8 tokens are proposed; the author proposes 10.",
        ),
        limits=(
            "It stores the full cache and the ids of all tokens: it saves passes, not memory.",
            ("Greedy decoding only. Answers equal those of the full cache in float32, and up to near ties in 16 bits, "
            "where a pass over several tokens rounds differently."),
        ),
    )

    def propose(self, session: Session, token: Tensor, count: int) -> Tensor:
        """The tokens that followed the last ones before; none without an occurrence. [B, at most count]"""
        texts = torch.cat([self.held(session).ids.to(token.device, torch.long), token[:, None]], dim=1)
        found = [look_up(text, self.longest, count) for text in texts]
        most = max(len(x) for x in found)
        # Zeros fill shorter drafts of a batch: each is rejected, unless the target chooses that token, too.
        return torch.stack([torch.cat([x, x.new_zeros(most - len(x))]) for x in found])


def look_up(text: Tensor, longest: int, count: int) -> Tensor:
    """At most `count` tokens after the latest earlier occurrence of the longest known end of a text [n]."""
    for size in range(min(longest, len(text) - 1), 0, -1):
        places = (text[:-1].unfold(0, size, 1) == text[-size:]).all(1).nonzero()[:, 0]
        if len(places):
            start = int(places[-1]) + size
            return text[start : start + count]
    return text[:0]
