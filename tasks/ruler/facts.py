"""`qa-facts`: RULER's questions about documents with generated documents, so that no file is needed.

Each document is a few sentences of prose with one fact among them: `The keeper of the mill in Elderford is Ada Marsh.`
No two documents have a fact about the same thing, and a person who is asked for occurs in a single document, so that a
question has one answer and one document that contains it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvbench.task import Example
from kvbench.tasks.prose import sentences
from kvbench.tasks.ruler.qa import DocumentQa, Pile

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FACT = "The {role} of the {place} in {town} is {person}."
QUERY = "Who is the {role} of the {place} in {town}?"
ROLES = ("keeper", "owner", "builder", "painter", "founder", "guardian", "manager", "architect")
PLACES = (
    "mill", "lighthouse", "library", "theatre", "observatory", "museum", "brewery", "orchard", "ferry", "windmill",
    "chapel", "school", "bakery", "foundry", "inn", "tollhouse", "greenhouse", "quarry", "shipyard", "aviary",
)
TOWNS = (
    ("Alder", "Amber", "Ash", "Birch", "Black", "Bramble", "Bridge", "Brindle", "Clover", "Copper", "Crane", "Elder",
     "Falcon", "Fern", "Fox", "Glen", "Gold", "Grey", "Hazel", "Heron", "Holly", "Iron", "Juniper", "King", "Lark",
     "Linden", "Maple", "Marsh", "Oak", "Otter", "Raven", "Rowan", "Silver", "Stone", "Thistle", "Willow"),
    ("bury", "combe", "dale", "field", "ford", "gate", "haven", "leigh", "mere", "minster", "moor", "mouth", "stead",
     "stow", "ton", "vale", "wick", "worth"),
)  # fmt: skip
PEOPLE = (
    ("Ada", "Agnes", "Alma", "Basil", "Bruno", "Carl", "Clara", "Conrad", "Doris", "Edgar", "Edith", "Elias", "Emil",
     "Ernest", "Felix", "Flora", "Greta", "Hugo", "Ida", "Ivan", "Jonas", "Julius", "Laura", "Leo", "Lydia", "Magnus",
     "Martha", "Max", "Nora", "Olga", "Oscar", "Otto", "Paula", "Rosa", "Rufus", "Silas", "Theo", "Vera", "Victor",
     "Wanda"),
    ("Abbott", "Archer", "Barlow", "Benson", "Bishop", "Bolton", "Carver", "Chandler", "Cooper", "Dalton", "Dawson",
     "Draper", "Ellis", "Fisher", "Fletcher", "Foster", "Garner", "Gibson", "Harper", "Hudson", "Jarvis", "Keller",
     "Lawson", "Mercer", "Nolan", "Osborne", "Palmer", "Quincy", "Ramsey", "Sawyer", "Sexton", "Spencer", "Sutton",
     "Tanner", "Turner", "Vaughan", "Walton", "Watson", "Weaver", "Wyatt"),
)  # fmt: skip
SENTENCES = (2, 6)
"""Fewest and most sentences of prose around a fact."""
DRAWN = 1000
"""Documents of which the longest determine the minimum length."""


def draw_pair(rng: random.Random, parts: tuple[tuple[str, ...], tuple[str, ...]], between: str = "") -> str:
    """Draw a name of two parts."""
    return f"{rng.choice(parts[0])}{between}{rng.choice(parts[1])}"


def draw_documents(rng: random.Random, asked: int) -> Iterator[tuple[dict[str, str], str]]:
    """An endless stream of facts and documents; the persons of the first `asked` documents do not occur again."""
    prose = sentences(random.Random(rng.getrandbits(64)))
    told: set[tuple[str, str, str]] = set()
    people: set[str] = set()
    while True:
        what, person = (rng.choice(ROLES), rng.choice(PLACES), draw_pair(rng, TOWNS)), draw_pair(rng, PEOPLE, " ")
        if person in people or what in told:
            continue
        told.add(what)
        if len(people) < asked:
            people.add(person)
        fact = dict(zip(("role", "place", "town", "person"), (*what, person), strict=True))
        lines = list(itertools.islice(prose, rng.randint(*SENTENCES)))
        lines.insert(rng.randint(0, len(lines)), FACT.format(**fact))
        yield fact, " ".join(lines)


@dataclass(frozen=True)
class FactsQa(DocumentQa):
    """Questions about generated documents with one fact each."""

    name: ClassVar[str] = "qa-facts"
    summary: ClassVar[str] = "who does what where, in one of many generated documents; RULER's wording, no file"
    needs: ClassVar[str | None] = "a larger model"

    @property
    def prompt_id(self) -> str:
        """The prompt's id, with the source of documents."""
        return "ruler-qa/facts@1"

    def pile(self, rng: random.Random, turns: int, most: int) -> Pile:
        """Draw the material of a sample, with at least `most` words of other documents."""
        drawn = draw_documents(random.Random(rng.getrandbits(64)), turns)
        first = list(itertools.islice(drawn, turns))
        others: list[str] = []
        while most > 0:
            others.append(next(drawn)[1])
            most -= others[-1].count(" ") + 1
        asked = tuple((QUERY.format(**fact), (fact["person"],)) for fact, _ in first)
        return Pile(asked, tuple(text for _, text in first), others, rng.getrandbits(64))

    def example(
        self, rng: random.Random, *, id: str, length: int, turns: int, tokenizer: PreTrainedTokenizerBase
    ) -> Example:
        """Generate an example whose first prompt and answer fill `length`; UserError if it is too short."""
        return self.fill(self.pile(rng, turns, most=length), id=id, length=length, tokenizer=tokenizer)

    def minimum_length(self, turns: int, tokenizer: PreTrainedTokenizerBase) -> int:
        """Tokens of a sample that has only documents with answers, the longest of many."""
        pile = self.pile(random.Random(0), max(turns, DRAWN), most=0)
        sizes = [len(x) for x in tokenizer(list(pile.gold), add_special_tokens=False).input_ids]
        longest = sorted(range(len(sizes)), key=sizes.__getitem__)[-turns:]
        asked, gold = tuple(pile.asked[i] for i in longest), tuple(pile.gold[i] for i in longest)
        return self.measure(Pile(asked, gold, (), pile.seed), tokenizer)
