"""Questions about documents that occurred in earlier prompts: in another order, before an edit, or in another agent's.

Every document is prose with facts in RULER's wording of a needle. Answers are chosen among all values of the prompt, so
that small models have a graded score, too. Plain concatenation of cached documents loses little on a single fact: it
reads the fact where it stands. `reuse-hops` asks for facts that refer to a fact in another document.
"""

from __future__ import annotations

import itertools
import math
import random
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from kvbench.constraints import Ge
from kvbench.task import Example, Scorer, Task, Turn, count_prompt
from kvbench.tasks.length import LengthEstimate, largest_fit
from kvbench.tasks.prose import sentences
from kvbench.tasks.words import draw_keys, draw_numbers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INSTRUCTION = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the numbers afterwards.\n"
)
AGENT = "You are agent {number}. Read the notes and the reports of the agents before you, and write a report.\n"
FACT = "One of the special magic numbers for {key} is: {value}."
HOP = "One of the special magic names for {key} is: {other}."
QUESTION = "What is the special magic number for {key} mentioned in the provided text?"
PREFIX = " The special magic number for {key} mentioned in the provided text is"
HOPS_INSTRUCTION = (
    "Some special magic names and numbers are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the names and numbers afterwards.\n"
)
HOPS_QUESTION = (
    "What is the special magic name for {key} mentioned in the provided text, "
    "and what is the special magic number for that name?"
)
HOPS_PREFIX = " One of the special magic names for {key} is:"
HOPS_ANSWER = "{other}. One of the special magic numbers for {other} is: {value}"
NOTES = 4
"""Sentences of an agent's notes."""
Parts = tuple[str, ...]


def is_chosen(prediction: str, references: Sequence[str]) -> float:
    """Whether the chosen value is the right one."""
    return float(references[0] in prediction)


def weigh_choices(
    prediction: str, references: Sequence[str], *, logprobs: Sequence[Sequence[float]], answer: int
) -> float:
    """Negative log-probability of the right value among the choices, in nats."""
    del prediction, references
    sums = [sum(x) for x in logprobs]
    most = max(sums)
    return most - sums[answer] + math.log(sum(math.exp(x - most) for x in sums))


@dataclass(frozen=True)
class World:
    """Everything about an example but its length."""

    seed: int
    keys: list[str]
    """As many as facts."""
    values: list[str]
    others: list[str]
    """Keys of the facts that refer to others, in `reuse-hops`."""
    asked: list[int]
    """Facts that the turns ask for."""
    order: list[int]
    """Of the documents."""
    spare: str
    """A value that is no longer in the prompt, or never was."""


@dataclass(frozen=True)
class ReuseTask(Task):
    """Base class; a task says in `arrange` which prompts ran before."""

    documents: Annotated[int, Ge(2)] = 4

    version: ClassVar[str] = "1"
    suite: ClassVar[str] = "reuse"
    scorers: ClassVar[tuple[Scorer, ...]] = (
        Scorer("choice@1", "accuracy", is_chosen),
        Scorer("choice-nll@1", "nll", weigh_choices, higher_is_better=False, facts=("logprobs", "answer")),
    )
    default_turns: ClassVar[int] = 3
    instruction: ClassVar[str] = INSTRUCTION

    @property
    def prompt_id(self) -> str:
        """The prompt's id."""
        return f"{self.name}/{self.documents}@{self.version}"

    @abstractmethod
    def arrange(self, world: World, documents: Parts, prose: list[str]) -> tuple[Parts, tuple[Parts, ...]]:
        """The documents of the prompt, and the prompts that ran before. prose: sentences that are in no document."""

    def state(self, world: World, index: int) -> list[str]:
        """The sentences of a document's facts."""
        mine = range(index, len(world.keys), self.documents)
        return [FACT.format(key=world.keys[i], value=world.values[i]) for i in mine]

    def ask(self, world: World, i: int) -> Turn:
        """The question for a fact: its value, among all values and one that is not in the prompt."""
        key, choices = world.keys[i], tuple(f" {x}." for x in (*world.values, world.spare))
        question, prefix = QUESTION.format(key=key), PREFIX.format(key=key)
        return Turn(question, prefix, choices[i], (world.values[i],), 0, choices, {"answer": i})

    def named(self, world: World) -> list[str]:
        """The keys that questions name, by fact."""
        return world.keys

    def draw(self, rng: random.Random, turns: int) -> World:
        """Draw everything but the prose."""
        count = max(self.documents, turns)
        keys = draw_keys(rng, 2 * count)
        *values, spare = draw_numbers(rng, count + 1)
        return World(
            rng.randrange(2**32), keys[:count], values, keys[count:], rng.sample(range(count), turns),
            rng.sample(range(self.documents), self.documents), spare,
        )

    def compose(self, world: World, n: int, *, id: str) -> Example:
        """Build the example with `n` sentences of prose in its documents."""
        rng = random.Random(world.seed)
        prose = list(itertools.islice(sentences(rng), n + NOTES * self.documents))
        texts = []
        for index in range(self.documents):
            body = prose[index : n : self.documents]
            for fact in self.state(world, index):
                body.insert(random.Random(f"{world.seed}/{fact}").randrange(len(body) + 1), fact)
            texts.append(" ".join(body) + "\n")
        documents, earlier = self.arrange(world, tuple(texts), prose[n:])
        parts, named = (self.instruction, *documents), self.named(world)
        turns = tuple(self.ask(world, i) for i in world.asked)
        return Example(
            id, "".join(parts), turns, {"keys": [named[i] for i in world.asked]}, parts=parts, earlier=earlier
        )

    def minimum_length(self, turns: int, tokenizer: PreTrainedTokenizerBase) -> int:
        """One sentence of prose in each document, with long names."""
        made = (
            self.compose(self.draw(random.Random(seed), turns), self.documents, id="minimum") for seed in range(20)
        )
        return max(self.count(x, tokenizer) for x in made) + 20

    def count(self, example: Example, tokenizer: PreTrainedTokenizerBase) -> int:
        """Tokens of the first prompt with its longest choice."""
        longest = max(len(tokenizer(x, add_special_tokens=False).input_ids) for x in example.turns[0].choices)
        return count_prompt(self, example, tokenizer, self.frame(tokenizer)) + longest

    def example(
        self, rng: random.Random, *, id: str, length: int, turns: int, tokenizer: PreTrainedTokenizerBase
    ) -> Example:
        """Generate an example whose first prompt comes within a sentence of `length`."""
        world = self.draw(rng, turns)

        def count(n: int) -> int:
            return self.count(self.compose(world, n, id=id), tokenizer)

        line = LengthEstimate.through(count, self.documents, 4 * self.documents)
        n = largest_fit(count, length, least=self.documents, line=line, what=self.name)
        return self.compose(world, n, id=id)


@dataclass(frozen=True)
class ReuseOrder(ReuseTask):
    """The documents stood in two earlier prompts, in other orders."""

    name: ClassVar[str] = "reuse-order"
    summary: ClassVar[str] = "documents that earlier prompts had in other orders; one fact each"

    def arrange(self, world: World, documents: Parts, prose: list[str]) -> tuple[Parts, tuple[Parts, ...]]:
        """In the order of the world, after its reverse and after its rotation by one document."""
        del prose
        now = tuple(documents[i] for i in world.order)
        return now, ((self.instruction, *now[::-1]), (self.instruction, *(now[1:] + now[:1])))


@dataclass(frozen=True)
class ReuseHops(ReuseOrder):
    """Each document has a fact, and one that refers to a fact of another document.

    The answer repeats both facts, as small models cannot combine them without writing the first one down.
    """

    name: ClassVar[str] = "reuse-hops"
    summary: ClassVar[str] = "as reuse-order, where each question needs facts of two documents"
    version: ClassVar[str] = "2"
    needs: ClassVar[str | None] = "a larger model"
    instruction: ClassVar[str] = HOPS_INSTRUCTION

    def named(self, world: World) -> list[str]:
        """The keys of the facts that refer to others."""
        return world.others

    def ask(self, world: World, i: int) -> Turn:
        """The question for both facts. Choices: the right name with every value, and other names with their own."""
        key, keys = world.others[i], world.keys
        pairs = [(keys[i], x) for x in (*world.values, world.spare)]
        pairs += [x for j, x in enumerate(zip(keys, world.values, strict=True)) if j != i]
        texts = [HOPS_ANSWER.format(other=name, value=value) for name, value in pairs]
        choices = tuple(f" {x}." for x in texts)
        question, prefix = HOPS_QUESTION.format(key=key), HOPS_PREFIX.format(key=key)
        return Turn(question, prefix, choices[i], (texts[i],), 0, choices, {"answer": i})

    def state(self, world: World, index: int) -> list[str]:
        """Its own facts, and those that refer to the facts of the document with the next number."""
        other = range((index + 1) % self.documents, len(world.keys), self.documents)
        refers = [HOP.format(key=world.others[i], other=world.keys[i]) for i in other]
        return super().state(world, index) + refers


@dataclass(frozen=True)
class ReuseEdit(ReuseTask):
    """The prompt ran before with another value in one document, and with another document in the place of a second."""

    name: ClassVar[str] = "reuse-edit"
    summary: ClassVar[str] = "a prompt after an edit: a value replaced, a document inserted, another deleted"

    def arrange(self, world: World, documents: Parts, prose: list[str]) -> tuple[Parts, tuple[Parts, ...]]:
        """The document of the first question, or another, had the spare value before."""
        changed = world.asked[0] if world.seed % 2 else world.order[0]
        now = [documents[i] for i in world.order]
        before = [x.replace(world.values[changed], world.spare) for x in now]
        inserted = world.order.index((changed + 1) % self.documents)
        before[inserted] = " ".join(prose[:NOTES]) + "\n"
        return tuple(now), ((INSTRUCTION, *before),)


@dataclass(frozen=True)
class ReuseAgents(ReuseTask):
    """Each document is a report that an agent wrote behind its own notes and the reports before it."""

    name: ClassVar[str] = "reuse-agents"
    summary: ClassVar[str] = "reports of agents that read each other's reports; the question is asked of the last agent"

    def arrange(self, world: World, documents: Parts, prose: list[str]) -> tuple[Parts, tuple[Parts, ...]]:
        """Every agent's prompt, which ends in its report."""
        earlier = []
        for i in range(self.documents):
            notes = " ".join(prose[NOTES * i : NOTES * (i + 1)]) + "\n"
            earlier.append((AGENT.format(number=i + 1), notes, *documents[: i + 1]))
        del world
        return documents, tuple(earlier)
