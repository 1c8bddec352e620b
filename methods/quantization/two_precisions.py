"""What methods with two precisions share: which share of the entries gets the higher one, solved from a budget."""

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
    """Holds every entry, important ones in more bits; a budget of bytes is met by the number of important entries."""

    important: Share = 0.5
    """Share of entries in the higher precision, where no budget is asked for; a method's own is its paper's."""

    recompressible: ClassVar[str | None] = "every entry is held, and which ones are important is settled as they come."

    share: float | None = resolved()
    """Share of entries in the higher precision that a budget amounts to; None: the setting's."""

    @abstractmethod
    def high_entries(self, rows: int) -> int:
        """How many of the entries of a KV head are in the higher precision."""

    @property
    def high_share(self) -> float:
        """Share of entries in the higher precision."""
        return self.important if self.share is None else self.share

    def fit(self, budget: Budget | None, shape: Shape) -> Self:
        """The setting's share without a budget, else the largest share that the bytes allow."""
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
                f"{name}: the share of important entries is set to {self.important}, which amounts to {reached:.1%} of "
                f"the full cache's bytes, and a budget of {budget} asks for another. Leave one of the two out."
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
