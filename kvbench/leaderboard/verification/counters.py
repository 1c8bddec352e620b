"""Lists the counters that a registered method's stores can have, from its source."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator, Sequence

from kvbench.leaderboard.submission.outcome import RefusedError, quote
from kvbench.method import Method
from kvbench.runs.journal import Effect, Line
from kvbench.runs.provenance import find_files

EARLY = Effect.model_fields["maxima"].default
"""The maxima of lines that do not name theirs."""
COUNTER = re.compile(r"[a-z]+(_[a-z]+)*")
HOLDERS = {"facts", "reads", "host_fact"}
"""Functions that return counters, and attributes that hold them."""


def check_counters(method: type[Method], lines: Sequence[Line]) -> None:
    """Check that every counter is one that the method's stores can have.

    Raises:
        RefusedError: one is not; a counter above 0 is what shows that a method acts.
    """
    sources = [x.read_bytes() for x in find_files(method)]
    known, maxima = list_counters(sources), list_maxima(sources)
    for x in lines:
        if x.effect is not None and x.effect.maxima != EARLY:
            wanted = sorted(x.effect.facts.keys() & maxima)
            if sorted(x.effect.maxima) != wanted:
                raise RefusedError(
                    "measurements", f"sample {x.index} turn {x.turn}: its maxima are {quote(x.effect.maxima)}, and of "
                    f"its counters {', '.join(wanted) or 'none'} is one"
                )
        if strange := sorted(set() if x.effect is None else x.effect.facts.keys() - known):
            raise RefusedError(
                "measurements", f"sample {x.index} turn {x.turn}: its counter {quote(strange[0])} is none that the "
                f"stores of {method.card.name} have"
            )


def list_counters(sources: Iterable[bytes]) -> frozenset[str]:
    """Names that the files of a method and of its stores write into their counters."""
    return frozenset(x for source in sources for x in _read_names(source))


def list_maxima(sources: Iterable[bytes]) -> frozenset[str]:
    """Names of the counters whose totals are maxima."""
    return frozenset(x for source in sources for x in _read_maxima(source))


@functools.cache
def _read_maxima(source: bytes) -> frozenset[str]:
    """The keys of dictionaries with a value `Fact(..., maximum=True)`."""
    tables = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Dict)]
    return frozenset(
        key.value for x in tables for key, value in zip(x.keys, x.values, strict=True)
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
        and isinstance(value, ast.Call) and any(y.arg == "maximum" for y in value.keywords)
    )


@functools.cache
def _read_names(source: bytes) -> frozenset[str]:
    found = {x for node in ast.walk(ast.parse(source)) for part in _list_parts(node) for x in _list_texts(part)}
    return frozenset(x for x in found if COUNTER.fullmatch(x))


def _list_parts(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a syntax node that name counters."""
    if isinstance(node, ast.FunctionDef) and node.name in HOLDERS:
        yield node
    elif isinstance(node, ast.Assign) and any(_is_holder(x) for x in node.targets):
        yield node.value
    elif isinstance(node, ast.Subscript) and _is_holder(node.value):
        yield node.slice
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_holder(node.func.value):
        yield from node.args


def _is_holder(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in HOLDERS


def _list_texts(node: ast.AST) -> Iterator[str]:
    yield from (x.value for x in ast.walk(node) if isinstance(x, ast.Constant) and isinstance(x.value, str))
