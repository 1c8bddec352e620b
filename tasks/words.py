"""Random keys and values: English words from the lists of wonderwords, as in RULER, numbers and UUIDs.

A key is `adjective-noun`. RULER draws it uniformly from the sorted set of all pairs; drawing both parts gives the same
distribution without creating six million strings.
"""

from __future__ import annotations

import random
import uuid
from functools import cache
from importlib import resources


@cache
def words(kind: str, longest: int = 0) -> tuple[str, ...]:
    """The sorted words of a kind (`noun`, `adjective`), with at most `longest` letters unless that is 0."""
    text = resources.files("wonderwords").joinpath(f"assets/{kind}list.txt").read_text(encoding="utf-8")
    found = {line.strip() for line in text.splitlines() if line.strip()}
    if longest:
        found = {
            word for word in found if 3 <= len(word) <= longest and word.isascii() and word.isalpha() and word.islower()
        }
    return tuple(sorted(found))


def draw_keys(rng: random.Random, n: int, longest: int = 0) -> list[str]:
    """Draw `n` distinct adjective-noun keys."""
    keys: dict[str, None] = {}
    while len(keys) < n:
        keys[f"{rng.choice(words('adjective', longest))}-{rng.choice(words('noun', longest))}"] = None
    return list(keys)


def draw_numbers(rng: random.Random, n: int) -> list[str]:
    """Draw `n` distinct uniform numbers of seven digits, as text."""
    return [str(number) for number in rng.sample(range(1_000_000, 10_000_000), n)]


def draw_uuids(rng: random.Random, n: int) -> list[str]:
    """Draw `n` UUIDs of version 4, as text."""
    return [str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(n)]
