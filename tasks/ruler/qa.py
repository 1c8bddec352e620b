"""RULER's questions about documents: `qa_1` of SQuAD, `qa_2` of HotpotQA, and `qa-facts`, which needs neither.

With one turn the prompt equals RULER's byte for byte. Intended differences: documents are shuffled with a new seed for
each sample, while RULER's fresh `Random(42)` puts the document with the answer at the same rank in all prompts with the
same number of documents; the last document is cut to whole words, so that a prompt comes within one word of its length;
and questions are in random order, with every fifth question of the file reserved for the split `dev`.

With several turns, several questions are asked about the same documents, each in RULER's wording. All paragraphs with
answers are included whole; for HotpotQA these are the supporting paragraphs. Other documents follow: first those that
come with a question of HotpotQA or from the same article of SQuAD, then any.
"""

from __future__ import annotations

import itertools
import random
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, ClassVar

from kvbench.errors import UserError
from kvbench.task import Example, Mode, Scorer, Split, Task, Turn, count_prompt
from kvbench.tasks.length import LengthEstimate, largest_fit
from kvbench.tasks.ruler.documents import Library, SquadQuestion, read_hotpot, read_squad
from kvbench.tasks.ruler.scoring import STRICT_PART, STRING_MATCH_PART

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ASK = "Answer the question based on the given documents. Only give me the answer and do not output any other words."
INTRO = f"{ASK}\n\nThe following are given documents.\n\n"
DOCUMENT = "Document {number}:\n{text}"
QUESTION = f"{ASK}\n\nQuestion: {{query}}"
PREFIX = " Answer:"
MAX_NEW_TOKENS = 32
STRETCH = 300
"""Words between the two measurements for the initial estimate of a length."""
DEV = 5
"""Every fifth question of a file belongs to the split `dev`."""


def gather(documents: Iterable[str], words: int) -> list[str]:
    """The first documents, with `words` words in total; the last one may be cut."""
    taken: list[str] = []
    for text in documents:
        parts = text.split(" ", words)
        if len(parts) > words:
            return [*taken, " ".join(parts[:words])] if words else taken
        taken.append(text)
        words -= len(parts)
    return taken


def count_words(documents: Iterable[str]) -> int:
    """Words as `gather` counts them."""
    return sum(text.count(" ") + 1 for text in documents)


@dataclass(frozen=True)
class Pile:
    """The material of one sample."""

    asked: tuple[tuple[str, tuple[str, ...]], ...]
    """Questions with their answers."""
    gold: tuple[str, ...]
    """Documents that are always included whole."""
    others: Sequence[str]
    """Documents that fill the rest of the length, repeated if necessary."""
    seed: int
    """Random seed for the order of documents."""


@dataclass(frozen=True)
class DocumentQa(Task):
    """Base class of the three tasks."""

    version: ClassVar[str] = "1"
    suite: ClassVar[str] = "ruler"
    scorers: ClassVar[tuple[Scorer, ...]] = (STRING_MATCH_PART, STRICT_PART)
    default_length: ClassVar[int] = 4096
    joint: ClassVar[str] = "\n\n"
    separator: ClassVar[str] = "\n\n"

    def compose(self, pile: Pile, n: int, *, id: str) -> Example:
        """Build the example with `n` words of documents."""
        found = gather(itertools.chain(pile.gold, itertools.cycle(pile.others or pile.gold)), n)
        order = list(range(len(found)))
        random.Random(pile.seed).shuffle(order)
        text = "\n\n".join(DOCUMENT.format(number=rank, text=found[i]) for rank, i in enumerate(order, 1))
        turns = tuple(
            Turn(QUESTION.format(query=query), PREFIX, f" {answers[0]}", answers, MAX_NEW_TOKENS)
            for query, answers in pile.asked
        )
        facts = {"documents": len(found), "gold": [order.index(i) + 1 for i in range(len(pile.gold))]}
        return Example(id, INTRO + text, turns, facts)

    def fill(self, pile: Pile, *, id: str, length: int, tokenizer: PreTrainedTokenizerBase) -> Example:
        """The example whose first prompt and 32 generated tokens fill `length`; UserError where it is too short."""
        frame = self.frame(tokenizer)

        def count(n: int) -> int:
            return count_prompt(self, self.compose(pile, n, id=id), tokenizer, frame)

        turns = len(pile.asked)
        what = f"{self.name} with {turns} question{'s' if turns > 1 else ''} of example {id}"
        least = count_words(pile.gold)
        line = LengthEstimate.through(count, least, least + STRETCH)
        n = largest_fit(count, length - MAX_NEW_TOKENS, least=least, line=line, what=what)
        return self.compose(pile, n, id=id)

    def measure(self, pile: Pile, tokenizer: PreTrainedTokenizerBase) -> int:
        """Tokens of the example with its gold documents only, generation included."""
        example = self.compose(pile, count_words(pile.gold), id="minimum")
        return count_prompt(self, example, tokenizer, self.frame(tokenizer)) + MAX_NEW_TOKENS


@dataclass(frozen=True)
class FileQa(DocumentQa):
    """Questions from a file. data: path of the file."""

    data: str = ""

    fixed_examples: ClassVar[bool] = True  # its questions are; other documents may stand around them
    whose: ClassVar[str]
    where: ClassVar[str]
    """Name of the file and its web site."""

    @staticmethod
    @abstractmethod
    def read(path: str) -> Library:
        """Read the documents and questions of the file."""

    @property
    def library(self) -> Library:
        """The documents and questions of the file, read once."""
        if not self.data:
            raise UserError(
                f"{self.name} needs {self.whose} questions, which kvbench may not redistribute. Give the file, "
                f"--task-set data=PATH of {self.where}. Without a network, use qa-facts: RULER's prompt over generated "
                "documents."
            )
        return self.read(self.data)

    @property
    def dataset_revision(self) -> str:
        """`sha256:` and the hash of the file."""
        return f"sha256:{self.library.sha256}"

    def examples(
        self, *, seed: int, split: Split, n: int, length: int, turns: int, mode: Mode,  # noqa: ARG002  # one wording
        tokenizer: PreTrainedTokenizerBase,
    ) -> Iterator[Example]:
        """Yield the first `n` examples with `turns` questions each, in random order; UserError if there are too few."""
        pool = [x for i, x in enumerate(self.library.questions) if (i % DEV == DEV - 1) == (split is Split.DEV)]
        if turns > len(pool):
            raise UserError(
                f"{self.data} has {len(pool)} questions for split {split}, too few for {turns} about one context. Use "
                "fewer --turns, the other split, or the whole file."
            )
        if n * turns > len(pool):
            raise UserError(
                f"{self.data} has {len(pool)} questions for split {split}: use --samples {len(pool) // turns} or "
                f"fewer with {turns} turn{'s' if turns > 1 else ''}."
            )
        name = f"{self.name}@{self.version}/{split}/{seed}"
        order = random.Random(name).sample(pool, len(pool))
        for index in range(n):
            rng = random.Random(f"{name}/{length}/{turns}/{index}")
            pile = self.pile(order[index * turns : (index + 1) * turns], rng, most=length)
            yield self.fill(pile, id=f"{split}-{seed}-{index}", length=length, tokenizer=tokenizer)

    def pile(self, asked: Sequence[SquadQuestion], rng: random.Random, most: int) -> Pile:
        """The material of a sample with these questions, with at most `most` other documents."""
        library = self.library
        gold = tuple(dict.fromkeys(i for x in asked for i in x.gold))
        near = list(dict.fromkeys(i for x in asked for i in (*x.shown, *x.near)))
        rng.shuffle(near)
        total = len(library.documents)
        others = dict.fromkeys([*near, *rng.sample(range(total), min(total, most))])
        texts = library.documents
        return Pile(
            tuple((x.text, x.answers) for x in asked), tuple(texts[i] for i in gold),
            [texts[i] for i in others if i not in gold], rng.getrandbits(64),
        )

    def minimum_length(self, turns: int, tokenizer: PreTrainedTokenizerBase) -> int:
        """Tokens of an example with the longest gold documents, generation included."""
        return measure_longest(self, turns, tokenizer)


@cache
def measure_longest(task: FileQa, turns: int, tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens of an example of the questions with the longest gold documents, and only these documents."""
    texts = task.library.documents

    def size(question: SquadQuestion) -> int:
        return sum(len(texts[i]) for i in question.gold) + len(question.text)

    longest = {x.gold: x for x in sorted(task.library.questions, key=size)}
    asked = sorted(longest.values(), key=size)[-turns:]
    return task.measure(task.pile(asked, random.Random(0), most=0), tokenizer)


@dataclass(frozen=True)
class SquadQa(FileQa):
    """Questions of SQuAD, each answered by one Wikipedia paragraph."""

    name: ClassVar[str] = "qa_1"
    summary: ClassVar[str] = "RULER: a question of SQuAD about one of many paragraphs"
    needs: ClassVar[str | None] = "SQuAD's file, a larger model"
    whose: ClassVar[str] = "SQuAD's"
    where: ClassVar[str] = "dev-v2.0.json (https://rajpurkar.github.io/SQuAD-explorer)"

    @property
    def prompt_id(self) -> str:
        """The prompt's id, with the source of documents."""
        return "ruler-qa/squad@1"

    @staticmethod
    def read(path: str) -> Library:
        """Read SQuAD v2.0."""
        return read_squad(path)


@dataclass(frozen=True)
class HotpotQa(FileQa):
    """Questions of HotpotQA, each answered by two Wikipedia paragraphs together."""

    name: ClassVar[str] = "qa_2"
    summary: ClassVar[str] = "RULER: a question of HotpotQA that takes two of many paragraphs"
    needs: ClassVar[str | None] = "HotpotQA's file, a larger model"
    whose: ClassVar[str] = "HotpotQA's"
    where: ClassVar[str] = "hotpot_dev_distractor_v1.json (https://hotpotqa.github.io)"

    @property
    def prompt_id(self) -> str:
        """The prompt's id, with the source of documents."""
        return "ruler-qa/hotpotqa@1"

    @staticmethod
    def read(path: str) -> Library:
        """Read HotpotQA's distractor setting."""
        return read_hotpot(path)
