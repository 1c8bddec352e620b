"""The name, unit and direction of a metric, and the scale on which it is shown."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvbench.runs.results import Score

NATS = "token_nll"
"""The mean negative log-likelihood of a token, in nats; shown as its exponential, the perplexity."""


def share_scale(first: Score, other: Score) -> bool:
    """Whether a difference of two scores means something: they have one metric, or higher is better in both.

    Metrics of which higher is better are shares of right answers, such as a published scorer and its strict one.
    """
    return first.metric == other.metric or (first.higher_is_better and other.higher_is_better)


@dataclass(frozen=True)
class Metric:
    """A metric as tables and charts show it."""

    name: str
    unit: str
    """Unit or range; empty if neither is known."""
    higher_is_better: bool
    exponential: bool = False
    """Whether the exponential of the score is shown, and the percentage by which a difference changes it."""

    @classmethod
    def of(cls, score: Score) -> Metric:
        """The metric of a score."""
        if score.metric == NATS:
            return cls("perplexity", "per token", score.higher_is_better, exponential=True)
        shown = score.mean if score.mean is not None else score.partial_mean
        unit = "0 to 1" if score.higher_is_better and (shown is None or 0 <= shown <= 1) else ""
        return cls(score.metric, unit, score.higher_is_better)

    @property
    def arrow(self) -> str:
        """An arrow up if higher is better, else down."""
        return "↑" if self.higher_is_better else "↓"

    @property
    def title(self) -> str:
        """Name, direction and unit, as in `contains ↑ (0 to 1)`."""
        return f"{self.name} {self.arrow}" + (f" ({self.unit})" if self.unit else "")

    def scale(self, value: float) -> float:
        """A score as it is shown."""
        return math.exp(min(value, 700.0)) if self.exponential else value

    def write(self, value: float) -> str:
        """A score as text: three decimals, or four digits of a perplexity."""
        return _round(self.scale(value)) if self.exponential else f"{value:.3f}"

    def write_interval(self, ends: tuple[float, float]) -> str:
        """A confidence interval of scores."""
        low, high = (_round(self.scale(x)) if self.exponential else f"{x:.2f}" for x in ends)
        return f"[{low}, {high}]"

    def write_difference(self, value: float) -> str:
        """The difference of two scores; of perplexities the change in percent."""
        return f"{math.expm1(min(value, 700.0)):+.1%}" if self.exponential else f"{value:+.3f}"

    def write_difference_interval(self, ends: tuple[float, float]) -> str:
        """A confidence interval of a difference."""
        low, high = (f"{math.expm1(min(x, 700.0)):+.1%}" if self.exponential else f"{x:+.2f}" for x in ends)
        return f"[{low}, {high}]"


def _round(value: float) -> str:
    text = f"{value:#.4g}"
    return f"{value:,.0f}" if float(text) >= 1000 else text
