"""RazorAttention: heads that look back keep every entry, the others the first, the last, and the mean of the rest."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from kvbench.constraints import Ge, Natural, Positive, Share
from kvbench.method import BudgetKind, Card
from kvbench.methods.heads.groups import LEAST_SHARE, Head, HeadMethod, by_score
from kvbench.methods.heads.profile import HeadProfile, find_profile

if TYPE_CHECKING:
    from kvbench.hf import Model


@dataclass(frozen=True)
class RazorAttention(HeadMethod):
    """Echo and induction heads keep every entry; the others sinks, recent entries and one compensation token."""

    sinks: Natural = 4
    induction: Share = 0.14
    """Share of all KV heads that keep every entry for their induction score."""
    echo: Share = 0.01
    """Share of all KV heads that keep every entry for their echo score."""
    buffer: Positive = 4000
    """Fewest recent entries under `--budget paper`."""
    compression: Annotated[float, Ge(1)] = 5.0
    """Under `--budget paper` recent rows are the context's length divided by this, where that is more than `buffer`."""

    card: ClassVar[Card] = Card(
        name="razor-attention",
        title="RazorAttention: Efficient KV Cache Compression Through Retrieval Heads",
        idea="Only a few heads look through the whole context: those that return to earlier copies of what they read. "
        "They keep every entry; the others keep sinks, recent entries and one token that stands for all they dropped.",
        arxiv="2407.15891",
        year=2024,
        family="heads",
        stages=("compression",),
        budget=BudgetKind.STORED,
        paper_budget="15 % of the heads keep every row, the others sinks and max(buffer, length / compression) rows",
        heads="indexed",
        upstream=None,
        deviations=(
            ("The heads' shares amount to at least one head each, and echo heads are chosen among those that induction "
            "did not choose, so that bytes do not depend on how far the two agree."),
            ("A budget is the paper's only as --budget paper. Another is spent on as many retrieval heads, up to the "
            "paper's shares, as leave the others a fifth of the mean entries per head; the rest widens their windows."),
            ("The window has the width that the context's length gives it and slides with every token: what leaves it "
            "goes into the mean. The paper's formula would let it grow with the answer."),
            ("Scores are attention mass summed over earlier copies, of all queries that have one; tokens of a copy are "
            "all different."),
        ),
        unverified=(
            "buffer=4000 and compression=5 are quoted from memory of the paper.",
            ("Models with fewer than 10,001 positions are profiled on 40 probes of 64 tokens in four copies, not on "
            "one of 2,500."),
        ),
        limits=(
            "The middle of the text is gone for all heads but the retrieval heads.",
            ("A model that does not copy random tokens, as the bundled one does not, shows no retrieval heads to the "
            "probe: its ranking is noise there."),
            "The mean of rotated keys loses what turns fast: it stands for content, hardly for places.",
            ("Sliding layers whose window is shorter than the context have no compensation token and no sinks: what "
            "leaves it is out of sight. Those with a longer window have both; once the conversation outgrows it, the "
            "token counts for as many entries as are still in sight, and its mean stays that of all."),
            ("Models without rotary embeddings are profiled in the same way; the paper reads ALiBi's slopes "
            "instead."),
        ),
    )

    compensate: ClassVar[bool] = True

    def minimum_entries(self) -> int:
        """The sinks, a recent entry, and the mean, which takes two entries in 16 bits."""
        return self.sinks + 3

    def rank(self, model: Model) -> tuple[Head, ...]:
        """The heads with the highest induction scores, then those with the highest echo scores, then the others."""
        return choose(find_profile(model, self.probe), self.induction, self.echo)

    def most_retrieval(self, heads: int) -> int:
        """Both shares of all heads."""
        return sum(_shares(heads, self.induction, self.echo))

    def least_window(self, rows: int) -> int:
        """A share of the mean entries per head."""
        return max(self.sinks + 1, rows // LEAST_SHARE)

    def paper(self, heads: int, length: int) -> tuple[int, int]:
        """Both shares, and a window of max(S0, N / C) entries after the sinks."""
        return self.most_retrieval(heads), self.sinks + max(self.buffer, math.ceil(length / self.compression))


def choose(profile: HeadProfile, induction: Share, echo: float) -> tuple[Head, ...]:
    """Every head, in the order in which they are given all entries."""
    ranked = by_score(profile.induction)
    first, second = _shares(len(ranked), induction, echo)
    top = ranked[:first]
    echoing = [x for x in by_score(profile.echo) if x not in top][:second]
    return (*top, *echoing, *(x for x in ranked[first:] if x not in echoing))


def _shares(heads: int, induction: Share, echo: float) -> tuple[int, int]:
    """How many heads two shares amount to, at least one each, together no more than there are."""
    first, second = (max(1, round(share * heads)) if share else 0 for share in (induction, echo))
    return first, min(second, heads - first)
