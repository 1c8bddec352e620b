"""RazorAttention: retrieval heads keep every entry, the others the first, the last, and the mean of the rest."""

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
    """Echo and induction heads keep every entry; the others keep sinks, recent entries and a compensation token."""

    sinks: Natural = 4
    induction: Share = 0.14
    """Share of all KV heads that keep every entry because of their induction score."""
    echo: Share = 0.01
    """Share of all KV heads that keep every entry because of their echo score."""
    buffer: Positive = 4000
    """Fewest recent entries with `--budget paper`."""
    compression: Annotated[float, Ge(1)] = 5.0
    """With `--budget paper`, recent entries are the context's length divided by this, but at least `buffer`."""

    card: ClassVar[Card] = Card(
        name="razor-attention",
        title="RazorAttention: Efficient KV Cache Compression Through Retrieval Heads",
        idea="Only a few heads attend to the whole context: those that attend to earlier copies of the current token. "
        "They keep every entry; the others keep sinks, recent entries and one token with the mean of the dropped ones.",
        arxiv="2407.15891",
        year=2024,
        family="heads",
        stages=("compression",),
        budget=BudgetKind.STORED,
        calibration="head profile",
        paper_budget="15 % of the heads keep every entry, the others `sinks` + max(buffer, length / compression)",
        heads="indexed",
        upstream=None,
        deviations=(
            ("Each share gives at least one head, and echo heads are chosen among the heads that are not induction "
            "heads, so that bytes do not depend on the overlap of the two."),
            ("Only --budget paper follows the paper. Another budget gives as many retrieval heads as possible, up to "
            "the paper's shares, while the others keep a fifth of the mean entries per head; the rest widens their "
            "windows."),
            ("The width of the window depends on the context's length alone, and it slides after a question and with "
            "every token of an answer; entries that leave it go into the mean. With the paper's formula it would grow "
            "with the answer."),
            ("A score is attention summed over all earlier copies, for all queries that have one; the tokens of a copy "
            "are all different."),
        ),
        unverified=(
            ("Models with fewer than 10,001 positions, or fewer than 2,500 tokens in the vocabulary, are profiled on "
            "40 probes of 64 tokens in four copies, not on one of 2,500."),
        ),
        limits=(
            "All heads but the retrieval heads lose the middle of the text.",
            ("A model that does not copy random tokens, such as the bundled one, shows no retrieval heads in a head "
            "profile, so the ranking is noise."),
            "In the mean of rotated keys, channels with fast rotation cancel out, so it preserves few positions.",
            ("Sliding layers whose window is shorter than the context have no compensation token and no sinks, because "
            "dropped entries are outside the window. Layers with longer windows have both. Once the conversation is "
            "longer than the window, the token counts for the dropped entries inside it, but is the mean of all."),
            ("Models without rotary embeddings are profiled in the same way; the paper uses ALiBi's slopes."),
        ),
    )

    compensate: ClassVar[bool] = True

    def minimum_entries(self) -> int:
        """The sinks, a recent entry, and the mean in float32, which takes as much as two 16-bit entries."""
        return self.sinks + 3

    def rank(self, model: Model) -> tuple[Head, ...]:
        """The heads with the highest induction scores, then those with the highest echo scores, then the others."""
        return choose(find_profile(model, self.probe), self.induction, self.echo)

    def most_retrieval(self, heads: int) -> int:
        """The induction and echo shares of all heads."""
        return sum(_shares(heads, self.induction, self.echo))

    def least_window(self, entries: int) -> int:
        """A share of the mean entries per head."""
        return max(self.sinks + 1, entries // LEAST_SHARE)

    def paper(self, heads: int, length: int) -> tuple[int, int]:
        """Both shares of the heads, and max(S0, N / C) recent entries after the sinks."""
        return self.most_retrieval(heads), self.sinks + max(self.buffer, math.ceil(length / self.compression))


def choose(profile: HeadProfile, induction: Share, echo: float) -> tuple[Head, ...]:
    """Every head: induction heads, then echo heads, then the others by induction score."""
    ranked = by_score(profile.induction)
    first, second = _shares(len(ranked), induction, echo)
    top = ranked[:first]
    echoing = [x for x in by_score(profile.echo) if x not in top][:second]
    return (*top, *echoing, *(x for x in ranked[first:] if x not in echoing))


def _shares(heads: int, induction: Share, echo: float) -> tuple[int, int]:
    """Number of induction and echo heads: at least one each if the share is above 0, together at most `heads`."""
    first, second = (max(1, round(share * heads)) if share else 0 for share in (induction, echo))
    return first, min(second, heads - first)
