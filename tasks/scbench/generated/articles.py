"""A summary of one of several articles, after SCBench's En.Sum.

SCBench's articles are papers, and its summaries were written by GPT-4. Here an article describes a plan for a place
(owner, work, cost, start, duration, an opinion) in a few sentences among generated prose. The summary is these
sentences. All summaries have the same wording, so even the summary of another article has a high ROUGE score; the
second scorer, the share of the right details, gives another article's summary little.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvbench.task import Example, Scorer, Turn
from kvbench.tasks.prose import sentences
from kvbench.tasks.ruler.facts import PEOPLE, PLACES, TOWNS, draw_pair
from kvbench.tasks.scbench.generated.generator import Generated
from kvbench.tasks.scoring.scbench import SCORERS

QUESTION = (
    'Summarise the article "{title}": who will do what, what it costs, when it begins, and who says what of it.\n'
    "Summary:\n"
)
TITLE = "The {place} of {town}"
FACTS = (
    "{owner} will {plan} the {place} of {town}.",
    "The work costs {cost} crowns.",
    "It begins in {month} and takes {weeks} weeks.",
    "{speaker} says that it {opinion}.",
)
PLANS = (
    "close", "enlarge", "heat", "insure", "light", "move", "paint", "rebuild", "reopen", "rent out", "repair", "sell",
)  # fmt: skip
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
OPINIONS = (
    "comes too late", "costs too much", "helps the market", "is long overdue", "makes too much noise",
    "should be put to a vote", "was promised for years", "will bring visitors",
)  # fmt: skip
DETAILS = ("{owner}", "{plan} the {place}", "{cost} crowns", "in {month}", "{weeks} weeks", "{speaker}", "{opinion}")
MOST = 8
"""Articles of a long context, as in SCBench."""
SENTENCES = 100
"""Sentences of prose per article, if a context has more articles than are asked for."""


def share(prediction: str, references: Sequence[str], details: Sequence[str]) -> float:  # noqa: ARG001  # a scorer
    """Share of an article's details that the prediction contains as whole words."""
    found = sum(re.search(rf"(?<!\w){re.escape(x)}(?!\w)", prediction) is not None for x in details)
    return found / len(details)


@dataclass(frozen=True)
class Article:
    """A title, and the sentences and details of the summary.

    Another article may share a detail: a month, a number of weeks, an opinion.
    """

    title: str
    facts: tuple[str, ...]
    details: tuple[str, ...]


def draw_articles(rng: random.Random, n: int) -> list[Article]:
    """Draw `n` articles with distinct titles."""
    drawn: dict[str, Article] = {}
    while len(drawn) < n:
        owner, speaker = (draw_pair(rng, PEOPLE, " ") for _ in range(2))
        parts = {
            "owner": owner, "speaker": speaker, "place": rng.choice(PLACES), "town": draw_pair(rng, TOWNS),
            "plan": rng.choice(PLANS), "cost": str(rng.randrange(10_000, 100_000)), "month": rng.choice(MONTHS),
            "weeks": str(rng.randrange(3, 100)), "opinion": rng.choice(OPINIONS),
        }
        title = TITLE.format(**parts)
        facts, details = (tuple(x.format(**parts) for x in templates) for templates in (FACTS, DETAILS))
        drawn.setdefault(title, Article(title, facts, details))
    return list(drawn.values())


@dataclass(frozen=True)
class ArticleSummary(Generated):
    """Summaries of generated articles about plans."""

    name: ClassVar[str] = "article-summary"
    summary: ClassVar[str] = "SCBench En.Sum format: the summary of one of several generated articles"
    scorers: ClassVar[tuple[Scorer, ...]] = (
        *SCORERS["scbench_summary"], Scorer("article-details@2", "details", share, facts=("details",)),
    )
    default_length: ClassVar[int] = 4096
    needs: ClassVar[str | None] = "a larger model"
    max_new_tokens: ClassVar[int] = 200
    unit_tokens: ClassVar[int] = 6

    @property
    def prompt_id(self) -> str:
        """The prompt's id."""
        return "article-summary/plans@1"

    def least(self, turns: int) -> int:
        """One sentence of prose for each article; there is one article more than are asked for."""
        return turns + 1

    def compose(
        self, articles: Sequence[Article], asked: Sequence[int], prose: Sequence[str], *, seed: int, id: str
    ) -> Example:
        """Build the example; the sentences of prose are distributed over all articles, of which some are asked for.

        seed: random seed for the places of an article's facts.
        """
        rng = random.Random(seed)
        texts = []
        for i, article in enumerate(articles):
            lines = list(prose[i :: len(articles)])
            places = sorted(rng.choices(range(len(lines) + 1), k=len(article.facts)))
            for before, (place, fact) in enumerate(zip(places, article.facts, strict=True)):
                lines.insert(place + before, fact)
            texts.append(f"{article.title}\n{' '.join(lines)}")
        text = "\n\n".join(texts)
        reference = [articles[i] for i in asked]
        turns = tuple(
            Turn(
                QUESTION.format(title=x.title), "", "\n".join(x.facts), ("\n".join(x.facts),), self.max_new_tokens,
                facts={"details": list(x.details)},
            )
            for x in reference
        )
        places = [text.index(texts[i]) + texts[i].index(fact) for i in asked for fact in articles[i].facts]
        facts = {
            "keys": [x.title for x in reference], "depths": [round(place / len(text), 4) for place in places],
            "articles": len(articles),
        }
        return Example(id, text, turns, facts)

    def prepare(self, rng: random.Random, *, id: str, turns: int, most: int) -> Callable[[int], Example]:
        """Draw everything but the number of units; a unit is a sentence of prose."""
        articles = draw_articles(rng, max(turns + 1, min(MOST, most // SENTENCES)))
        asked, seed = rng.sample(range(len(articles)), turns), rng.getrandbits(64)
        prose = list(itertools.islice(sentences(rng), most))
        return lambda n: self.compose(articles, asked, prose[:n], seed=seed, id=id)
