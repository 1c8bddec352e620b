"""Budgets, the shape of the full cache of which a budget is a share, and the search for a setting that meets one."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from kvbench.errors import MOST, UserError


class BudgetKind(StrEnum):
    """The quantity that a budget counts. Stored bytes and bytes read are never compared."""

    STORED = "stored"
    READ = "read"
    BITS = "bits"
    PROMPT = "prompt"
    """The prompt's attention that is computed, as the settings have it; `--budget` takes no value."""
    NONE = "none"


@dataclass(frozen=True)
class Budget:
    """A requested budget: a share of the full cache's bytes, tokens per KV head, or the paper's budget."""

    kind: Literal["fraction", "rows", "paper"]
    value: float

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Read `25%`, `1024` or `paper`.

        Raises:
            UserError: anything else, zero, negative, or above 100 %.
        """
        asked = text.strip()
        allowed = "Allowed: a share such as 25%, tokens per KV head such as 1024, or paper."
        if asked == "paper":
            return cls("paper", 0.0)
        try:
            value = float(asked.removesuffix("%"))
        except ValueError:
            raise UserError(f"budget '{text}' is not a number. {allowed}") from None
        if not math.isfinite(value) or value <= 0:
            raise UserError(f"budget '{text}' must be above 0. {allowed}")
        if asked.endswith("%"):
            if value > 100:
                raise UserError(f"budget '{text}' is above 100%. {allowed}")
            return cls("fraction", value / 100)
        if value != int(value):
            raise UserError(f"budget '{text}' is not a whole number of tokens; a share needs a % sign. {allowed}")
        if value > MOST:
            raise UserError(f"budget '{text}' must be {MOST:,} or less. {allowed}")
        return cls("rows", value)

    def __str__(self) -> str:
        """The text that `parse` reads."""
        if self.kind == "paper":
            return "paper"
        return f"{self.value * 100:.12g}%" if self.kind == "fraction" else f"{self.value:.0f}"


DEFAULT_BUDGET = Budget("fraction", 0.25)
BUDGET_TOLERANCE = 0.005
"""Largest difference between a requested and a reached share; users write rounded percentages."""


@dataclass(frozen=True)
class LayerShape:
    """Sizes of one layer's keys and values."""

    kv_heads: int
    query_heads: int
    key_dim: int
    value_dim: int
    window: int | None


@dataclass(frozen=True)
class Shape:
    """The full cache that a budget is a share of: a model's layers at one context length."""

    length: int
    layers: tuple[LayerShape, ...]
    itemsize: int
    """Bytes per element of the model's cache."""

    def entries(self, layer: LayerShape) -> int:
        """Entries per KV head that a full cache of this layer holds."""
        return self.length if layer.window is None else min(self.length, layer.window)

    @property
    def full_bytes(self) -> int:
        """Bytes of a native GQA cache of the same tokens, sliding layers at most their window."""
        return sum(map(self.layer_bytes, self.layers))

    def layer_bytes(self, layer: LayerShape) -> int:
        """Bytes of one layer of the full cache."""
        return self.entries(layer) * layer.kv_heads * (layer.key_dim + layer.value_dim) * self.itemsize


def solve(bytes_at: Callable[[int], float], target: float, candidates: Sequence[int]) -> int | None:
    """The last candidate whose bytes are at most the target; None if there is none.

    candidates: in an order in which their bytes never decrease.
    """
    count = bisect.bisect_right(candidates, target, key=bytes_at)
    return candidates[count - 1] if count else None


def too_small(name: str, budget: Budget, entries: int, length: int, least: int) -> UserError:
    """The error of a budget that a method cannot meet. least: the tokens per KV head that it needs."""
    return UserError(
        f"budget {budget} is {entries} tokens per KV head of {length}, and {name} needs at least {least} with its "
        f"settings. Use --budget {least} or more, or other settings."
    )
