"""Keys and values of RULER's needles, of three kinds."""

from __future__ import annotations

import random
from functools import cache
from typing import TYPE_CHECKING, Literal

from kvbench.tasks.words import draw_keys, draw_numbers, draw_uuids, words

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Kind = Literal["words", "numbers", "uuids"]
LONGEST_UUID = "8e8e8e8e-8e8e-4e8e-8e8e-8e8e8e8e8e8e"
"""Alternating letters and digits: one token per character in tokenizers that separate letters from digits."""


def draw(rng: random.Random, kind: Kind, n: int) -> list[str]:
    """Draw `n` distinct keys or values as in RULER: adjective-noun, seven digits, or UUID of version 4."""
    if kind == "words":
        return draw_keys(rng, n)
    if kind == "numbers":
        return draw_numbers(rng, n)
    return draw_uuids(rng, n)


@cache
def longest(kind: Kind, tokenizer: PreTrainedTokenizerBase) -> str:
    """A key or value of a kind with the most tokens."""
    if kind != "words":
        return "7777777" if kind == "numbers" else LONGEST_UUID

    def most(part: str) -> str:
        choices = list(words(part))
        sizes = [len(ids) for ids in tokenizer(choices, add_special_tokens=False).input_ids]
        return choices[sizes.index(max(sizes))]

    return f"{most('adjective')}-{most('noun')}"
