"""KIVI: keys are rounded per channel, where their outliers are, and values per token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from kvbench.budget import BUDGET_TOLERANCE
from kvbench.errors import UserError
from kvbench.kernels.pack import BITS
from kvbench.method import Budget, BudgetKind, Card, Method, Shape, Upstream
from kvbench.methods.quantization.around import go_around
from kvbench.methods.quantization.packed import PackedMethod


@dataclass(frozen=True)
class Kivi(PackedMethod):
    """Keeps every row in 2 to 8 bits, but for the last ones: keys in groups of tokens, values in groups of channels."""

    card: ClassVar[Card] = Card(
        name="kivi",
        title="KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache",
        idea="Keys have a few channels of large values, values have none. So keys share scales per channel over groups "
        "of tokens, values per token over groups of channels, and the last entries stay exact.",
        arxiv="2402.02750",
        year=2024,
        family="quantization",
        stages=("compression",),
        budget=BudgetKind.BITS,
        heads="independent",
        upstream=Upstream(repo="jy-yuan/KIVI", commit=None, license="MIT"),
        deviations=(
            ("Minima are rounded down and scales up to float16, so that codes cover their range and every element is "
            "within half a scale; the authors' code rounds both to nearest."),
            "Codes are packed along the channels, for keys too; the authors' code packs keys along the tokens.",
            ("A later turn attends to its own entries exactly and packs them at its end, so that chunks do not matter. "
            "SCBench's port never packs them: scbench_compat."),
            "A group of one value has scale 0 and comes back exactly; the authors' code divides by zero.",
            ("Left out, group is the paper's 32, or the whole of a value that is narrower; its models have no "
            "such."),
        ),
        limits=(
            "The last 32 values and up to 31 keys stay exact: short contexts amount to more than 18.8 %.",
            "In plain PyTorch on a CPU unpacking costs more than reading exact entries: a step is slower than full's.",
        ),
    )

    def fit(self, budget: Budget | None, shape: Shape) -> Self:
        """What the settings amount to is the only budget."""
        self.check_groups(shape)
        if budget is None:
            return self
        if budget.kind == "fraction" and self._reaches(budget.value, shape):
            return self
        alike = {x: replace(self, key_bits=x, value_bits=x) for x in BITS}  # type: ignore[arg-type]  # the literal's values
        reached = ", ".join(f"{y.ratio(shape):.1%} ({x} bits)" for x, y in alike.items())
        raise UserError(
            f"kivi cannot reach a budget of {budget}: its settings come to {self.ratio(shape):.1%} of the dense bytes. "
            f"With key_bits and value_bits alike it reaches {reached}. Leave --budget out, or change these settings "
            "with --set."
        )

    def ratio(self, shape: Shape) -> float:
        """Declared bytes as a share of those of the full cache."""
        return self.declared_bytes(shape) / shape.full_bytes

    def _reaches(self, share: float, shape: Shape) -> bool:
        """Whether a share is reached at this length, or by as many whole blocks of keys: samples differ in length."""
        whole = max(1, shape.length - shape.length % self.residual)
        ratios = [self.ratio(replace(shape, length=x)) for x in (whole, shape.length, whole + self.residual - 1)]
        return min(ratios) - BUDGET_TOLERANCE <= share <= max(ratios) + BUDGET_TOLERANCE

    @classmethod
    def over(cls, inner: type[Method]) -> type[Method]:
        """Around a method that evicts or trims heads: what it keeps is packed."""
        return go_around(inner, cls.card)
