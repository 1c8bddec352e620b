"""Base class of methods with two precisions: solves the share of entries in the higher one from a budget."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from kvbench.budget import BUDGET_TOLERANCE, Budget, Shape, solve
from kvbench.constraints import Share
from kvbench.errors import UserError
from kvbench.method import Method, resolved


@dataclass(frozen=True)
class TwoPrecisions(Method):
    """Stores every entry, important ones in more bits; the number of important entries meets a budget of bytes."""

    important: Share = 0.5
    """Share of entries in the higher precision if there is no budget; each method's default is its paper's."""

    recompressible: ClassVar[str | None] = "every entry is stored, and its precision is chosen as entries are added."

    share: float | None = resolved()
    """Share of entries in the higher precision, solved from the budget; None: `important`."""

    @abstractmethod
    def high_entries(self, entries: int) -> int:
        """How many of this many entries of a KV head are in the higher precision."""

    @property
    def high_share(self) -> float:
        """Share of entries in the higher precision."""
        return self.important if self.share is None else self.share

    def fit(self, budget: Budget | None, shape: Shape) -> Self:
        """Keep `important` without a budget; otherwise take the largest share that the bytes allow (`UserError`)."""
        own = replace(self, length=shape.length)
        name = self.card.name
        if budget is None:
            return own
        if budget.kind == "paper":
            raise UserError(f"{name} has no paper budget: its default settings are the paper's. Leave --budget out.")
        asked = budget.value if budget.kind == "fraction" else budget.value / shape.length
        full, none = replace(own, share=1.0), replace(own, share=0.0)
        if asked >= 1 and full.identity(shape):
            return full
        least, reached, most = (x.declared_bytes(shape) / shape.full_bytes for x in (none, own, full))
        if abs(reached - asked) <= BUDGET_TOLERANCE:
            return own
        if self.important != type(self)().important:
            raise UserError(
                f"{name}: the share of important entries is set to {self.important}, which takes {reached:.1%} of "
                f"the full cache's bytes, not the budget of {budget}. Leave one of the two out."
            )
        if not least - BUDGET_TOLERANCE <= asked <= most + BUDGET_TOLERANCE:
            raise UserError(
                f"{name} cannot reach a budget of {budget}: with its settings it stores from {least:.1%} (no important "
                f"entry) to {most:.1%} (only important entries) of the full cache's bytes. Ask for a budget in "
                "between, or change the bits with --set."
            )
        important = solve(
            lambda x: replace(own, share=x / shape.length).declared_bytes(shape), asked * shape.full_bytes,
            range(shape.length + 1),
        )
        return replace(own, share=(important or 0) / shape.length)
