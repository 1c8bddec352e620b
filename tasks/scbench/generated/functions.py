"""Generated Python functions, each with a description made of the same parts in other words.

A function loops over a collection, skips some items, tests an attribute of the others and does something with those
that pass. No two functions about the same items do the same or test the same attribute, so that a description fits only
one of them, and no other function is so similar that RepoQA's measure accepts it (a BLEU of 0.8).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from kvbench.tasks.words import words

ATTRIBUTES = ("age", "cost", "depth", "height", "length", "price", "rank", "score", "size", "speed", "volume", "weight")
TESTS = (
    ("> limit", "above a given number"),
    ("< limit", "below a given number"),
    ("== limit", "equal to a given number"),
    ("!= limit", "other than a given number"),
    ("% limit == 0", "a multiple of a given number"),
)
"""Tests of an attribute, as code and in words."""
FLAGS = {
    "archived": "were put away", "broken": "do not work", "hidden": "cannot be seen", "locked": "nobody may open",
    "sold": "have a new owner", "spare": "nobody needs",
}  # fmt: skip
"""Flags of items that are skipped, and their description."""


@dataclass(frozen=True)
class Action:
    """The operation on items that pass the test; templates may contain `{item}` and a second attribute, `{other}`.

    start: code before the loop; may be empty.
    """

    verb: str
    purpose: str
    output: str
    start: str
    body: tuple[str, ...]
    end: str


ACTIONS = (
    Action("count", "find out how many there are", "a whole number", "total = 0", ("total += 1",), "return total"),
    Action("add", "sum up their {other}", "a number", "total = 0", ("total += {item}.{other}",), "return total"),
    Action("list", "collect them in order", "a list of items", "found = []", ("found.append({item})",), "return found"),
    Action(
        "name", "gather what they are called, each once", "a set of texts", "names = set()",
        ("names.add({item}.name)",), "return names",
    ),
    Action("first", "get the earliest", "an item, or nothing", "", ("return {item}",), "return None"),
    Action("last", "get the latest", "an item, or nothing", "found = None", ("found = {item}",), "return found"),
    Action("any", "tell whether there is one", "true or false", "", ("return True",), "return False"),
    Action(
        "top", "pick the one with the greatest {other}", "an item, or nothing", "best = None",
        ("if best is None or {item}.{other} > best.{other}:", "    best = {item}"), "return best",
    ),
    Action(
        "low", "pick the one with the least {other}", "an item, or nothing", "best = None",
        ("if best is None or {item}.{other} < best.{other}:", "    best = {item}"), "return best",
    ),
    Action(
        "mean", "work out the average of their {other}", "a number", "values = []", ("values.append({item}.{other})",),
        "return sum(values) / max(1, len(values))",
    ),
    Action(
        "group", "sort them into piles of equal {other}", "a mapping to lists of items", "piles = {{}}",
        ("piles.setdefault({item}.{other}, []).append({item})",), "return piles",
    ),
    Action("mark", "set a sign on each", "what came in", "", ("{item}.marked = True",), "return {item}s"),
)  # fmt: skip
SOURCE = """def {verb}_{item}s({item}s, limit):{start}
    for {item} in {item}s:
        if {item}.{flag}:
            continue
        if {item}.{attribute} {code}:
            {body}
    {end}"""
DESCRIPTION = """Purpose: Of all {item}s whose {attribute} is {test}, {purpose}.
Input: The {item}s, and the number.
Output: {output}.
Procedure: {item}s that {skipped} are passed over."""


@dataclass(frozen=True)
class Function:
    """A function with its name, source and description."""

    name: str
    source: str
    description: str


@cache
def list_nouns() -> tuple[str, ...]:
    """Nouns of at most eight letters with a regular plural."""
    return tuple(word for word in words("noun", 8) if not word.endswith(("s", "x", "z", "h", "y")))


def draw_functions(rng: random.Random, nouns: int) -> Iterator[Function]:
    """Draw functions about `nouns` nouns in rotation, one for each pair of noun and action."""
    chosen = rng.sample(list_nouns(), nouns)
    orders = [
        list(zip(rng.sample(ACTIONS, len(ACTIONS)), rng.sample(ATTRIBUTES, len(ACTIONS)), strict=True)) for _ in chosen
    ]
    for step in range(len(ACTIONS)):
        for noun, order in zip(chosen, orders, strict=True):
            yield write(rng, noun, *order[step])


def write(rng: random.Random, noun: str, action: Action, attribute: str) -> Function:
    """Write a function for this noun, action and tested attribute; the rest is random."""
    other = rng.choice([x for x in ATTRIBUTES if x != attribute])
    code, test = rng.choice(TESTS)
    flag = rng.choice(list(FLAGS))
    body = "\n            ".join(action.body)
    start = action.start and f"\n    {action.start}"
    start, body, end, purpose = (
        x.format(item=noun, other=other) for x in (start, body, action.end, action.purpose)
    )
    source = SOURCE.format(
        verb=action.verb, item=noun, start=start, flag=flag, attribute=attribute, code=code, body=body, end=end
    )
    description = DESCRIPTION.format(
        item=noun, attribute=attribute, test=test, purpose=purpose, output=action.output, skipped=FLAGS[flag]
    )
    return Function(f"{action.verb}_{noun}s", source, description)
