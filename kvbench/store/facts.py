"""Counters that stores keep of what happened to their entries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Fact:
    """One counter of a store."""

    value: int
    changed: bool = False
    """Whether a value above 0 proves that the method changed what is stored or read."""
    maximum: bool = False
    """Whether the total over layers and samples is the maximum; otherwise it is the sum."""
    restarts: bool = False
    """Whether a fork counts from 0; otherwise it goes on from what its parent counted."""


def add_facts(total: Mapping[str, Fact], facts: Mapping[str, Fact]) -> dict[str, Fact]:
    """The totals of two sets of facts, by name."""
    found = dict(total)
    for name, fact in facts.items():
        before = found[name].value if name in found else 0
        found[name] = replace(fact, value=max(before, fact.value) if fact.maximum else before + fact.value)
    return found
