"""Key-value retrieval in the format of SCBench's Retr.KV, with generated pairs.

`kv` has SCBench's keys and values (36-character UUIDs). `kv-short` has the same text with adjective-noun keys and
numbers of seven digits, which models of a few million parameters can copy. SCBench has 2,500 pairs; here there are as
many as fit `length`: the first prompt and max_new_tokens (150) come within one pair of it and never exceed it.

As in SCBench, the whole question belongs to the user's message; there is no answer prefix.
"""

from __future__ import annotations

import json
import random
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, ClassVar

from kvbench.task import Example, Scorer, Task, Turn, count_prompt, encode, prompt_tokens
from kvbench.tasks.length import LengthEstimate, largest_fit
from kvbench.tasks.scoring.scbench import contains
from kvbench.tasks.words import draw_keys, draw_numbers, draw_uuids
from kvbench.text.scorers import make_strict

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INTRO = "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n"
QUESTION = '\nKey: "{key}"\nThe value associated with the specified key is: '
MAX_NEW_TOKENS = 150
PUBLISHED = Scorer("scbench-kv@1", "contains", contains)
MIN_PAIR_TOKENS = 5
"""Lower bound on the tokens of two quoted strings with punctuation, for any tokenizer."""
SHORT = 6
"""Most letters in each word of a short key."""


@dataclass(frozen=True)
class KeyValue(Task):
    """Base class of the variants, which differ in their keys and values."""

    version: ClassVar[str] = "1"
    suite: ClassVar[str] = "scbench"
    scorers: ClassVar[tuple[Scorer, ...]] = (PUBLISHED, make_strict(PUBLISHED, every=False))
    joint: ClassVar[str] = "\n\n"
    separator: ClassVar[str] = "\n\n"
    @abstractmethod
    def pairs(self, rng: random.Random, n: int) -> list[tuple[str, str]]:
        """Draw `n` pairs with distinct keys and distinct values."""

    def compose(self, pairs: Sequence[tuple[str, str]], asked: Sequence[int], *, id: str) -> Example:
        """Build the example that holds all pairs in this order and asks for those with the indices `asked`."""
        text = json.dumps(dict(pairs))
        turns = tuple(
            Turn(QUESTION.format(key=key), "", value, (value,), MAX_NEW_TOKENS)
            for key, value in (pairs[i] for i in asked)
        )
        facts = {
            "keys": [pairs[i][0] for i in asked],
            "depths": [round(text.index(f'"{pairs[i][0]}"') / len(text), 4) for i in asked],
            "pairs": len(pairs),
        }
        return Example(id, INTRO + text, turns, facts)

    def example(
        self, rng: random.Random, *, id: str, length: int, turns: int, tokenizer: PreTrainedTokenizerBase
    ) -> Example:
        """Generate an example whose first prompt and answer fill `length`.

        Raises:
            UserError: `length` is too short.
        """
        # While searching, the asked pairs come first, so that the prompt's length depends only on the number of pairs.
        # They are shuffled once that number is known.
        frame = self.frame(tokenizer)
        most = max(turns, length // MIN_PAIR_TOKENS) + 1
        drawn = self.pairs(rng, most)

        def count(n: int) -> int:
            return count_prompt(self, self.compose(drawn[:n], range(turns), id=id), tokenizer, frame)

        what = f"{self.name} with {turns} turn{'s' if turns > 1 else ''}"
        n = largest_fit(count, length - MAX_NEW_TOKENS, least=turns, line=measure(self, tokenizer), what=what)
        while True:
            order = rng.sample(range(n), n)
            made = self.compose([drawn[i] for i in order], [order.index(turn) for turn in range(turns)], id=id)
            if n == turns or count_prompt(self, made, tokenizer, frame) <= length - MAX_NEW_TOKENS:
                return made
            n -= 1  # tokens may reach over the border of two pairs, so that an order has more of them

    def minimum_length(self, turns: int, tokenizer: PreTrainedTokenizerBase) -> int:
        """Tokens of an example with the asked pairs only, generation included: the most over 16 draws."""
        lengths = []
        for seed in range(16):
            example = self.compose(self.pairs(random.Random(seed), turns), range(turns), id="minimum")
            lengths.append(prompt_tokens(encode(self, example, tokenizer)))
        # Other draws may have longer keys; the tokens of one more pair are a margin for them.
        return max(lengths) + MAX_NEW_TOKENS + int(measure(self, tokenizer).slope) + 1


@cache
def measure(task: KeyValue, tokenizer: PreTrainedTokenizerBase) -> LengthEstimate:
    """Estimate the tokens of the task's prompts as a line over the number of pairs."""
    drawn, frame = task.pairs(random.Random(0), 40), task.frame(tokenizer)
    return LengthEstimate.through(
        lambda n: count_prompt(task, task.compose(drawn[:n], [0], id=""), tokenizer, frame), 1, len(drawn)
    )


@dataclass(frozen=True)
class KeyValueUuid(KeyValue):
    """Key-value retrieval with UUIDs, as in SCBench."""

    name: ClassVar[str] = "kv"
    summary: ClassVar[str] = "SCBench Retr.KV format: the value of a key in a JSON object of UUIDs"
    @property
    def prompt_id(self) -> str:
        """The prompt's id, with the kind of pairs."""
        return "scbench-kv/uuid@1"

    def pairs(self, rng: random.Random, n: int) -> list[tuple[str, str]]:
        """Draw pairs of UUIDs of version 4 from the sample's own random generator."""
        ids = draw_uuids(rng, 2 * n)
        return list(zip(ids[:n], ids[n:], strict=True))


@dataclass(frozen=True)
class KeyValueShort(KeyValue):
    """Key-value retrieval with short words and numbers."""

    name: ClassVar[str] = "kv-short"
    summary: ClassVar[str] = "SCBench Retr.KV format with adjective-noun keys and numbers of seven digits"
    @property
    def prompt_id(self) -> str:
        """The prompt's id, with the kind of pairs."""
        return "scbench-kv/short@1"

    def pairs(self, rng: random.Random, n: int) -> list[tuple[str, str]]:
        """Draw adjective-noun keys with at most six letters in each word, and numbers of seven digits."""
        return list(zip(draw_keys(rng, n, SHORT), draw_numbers(rng, n), strict=True))
