"""KIVI: keys are quantized per channel, because their outliers are in few channels, and values per token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from kvbench.budget import BUDGET_TOLERANCE
from kvbench.errors import UserError
from kvbench.kernels.pack import BITS
from kvbench.method import Budget, BudgetKind, Card, Method, Shape, Upstream, resolved
from kvbench.methods.quantization.around import go_around
from kvbench.methods.quantization.packed import PackedMethod

PAPER_RESIDUAL = 128


@dataclass(frozen=True)
class Kivi(PackedMethod):
    """Stores all but the last entries in 2 to 8 bits: keys in groups of tokens, values in groups of channels."""

    paper_residual: int | None = resolved()
    """The residual in place of the setting's, where the budget is `paper`."""

    card: ClassVar[Card] = Card(
        name="kivi",
        title="KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache",
        idea="A few channels of the keys have outliers, and values have none. So keys share a scale per channel over a "
        "group of tokens, values per token over a group of channels, and the last entries stay exact.",
        arxiv="2402.02750",
        year=2024,
        family="quantization",
        stages=("compression",),
        budget=BudgetKind.BITS,
        paper_budget=f"residual={PAPER_RESIDUAL}",
        heads="independent",
        upstream=Upstream(repo="jy-yuan/KIVI", commit="876b4d2", license="MIT"),
        deviations=(
            ("Minima are rounded down and scales up to float16, so that codes cover the range and every element is "
            "within half a scale; the authors' code rounds both to nearest."),
            "Codes are packed along the channels, for keys too; the authors' code packs keys along the tokens.",
            ("A later turn attends to its own entries exactly and packs them at its end, so that results do not depend "
            "on chunks. SCBench's port never packs them; scbench_compat=true does the same."),
            ("A group of equal elements has scale 0 and is restored exactly where float16 holds them; the authors' "
            "code divides by zero."),
            ("The default of residual is 32, as in the authors' example.py and in SCBench; their LongBench tables and "
            "the default of their command line are 128, which --budget paper takes."),
            ("The default of group is the paper's 32, or the whole value where it is narrower, which none of the "
            "paper's models has."),
        ),
        limits=(
            "The last 32 values and up to 31 keys stay exact, so short contexts take more than 18.8 %.",
            "In plain PyTorch on a CPU a step is slower than with the full cache: unpacking costs more than it saves.",
        ),
    )

    def fit(self, budget: Budget | None, shape: Shape) -> Self:
        """Accept only the budget that the settings reach, or take the paper's residual (`UserError`)."""
        self.check_groups(shape)
        if budget is None:
            return self
        if budget.kind == "paper":
            if self.residual != type(self).residual:
                raise UserError(
                    f"kivi: residual is set to {self.residual}, and --budget paper sets it to {PAPER_RESIDUAL}. Leave "
                    "one of the two out."
                )
            return replace(self, residual=PAPER_RESIDUAL, paper_residual=PAPER_RESIDUAL)
        if budget.kind == "fraction" and self._reaches(budget.value, shape):
            return self
        uniform = {x: replace(self, key_bits=x, value_bits=x) for x in BITS}  # type: ignore[arg-type]  # the literal's values
        reached = ", ".join(f"{y.ratio(shape):.1%} ({x} bits)" for x, y in uniform.items())
        raise UserError(
            f"kivi cannot reach a budget of {budget}: its settings store {self.ratio(shape):.1%} of the full "
            f"cache. With equal key_bits and value_bits it reaches {reached}. Leave --budget out, or change these "
            "settings with --set."
        )

    def ratio(self, shape: Shape) -> float:
        """Declared bytes as a share of the full cache."""
        return self.declared_bytes(shape) / shape.full_bytes

    def _reaches(self, share: float, shape: Shape) -> bool:
        """Whether a share is reached at any length with as many whole key blocks: samples differ in length."""
        whole = max(1, shape.length - shape.length % self.residual)
        ratios = [self.ratio(replace(shape, length=x)) for x in (whole, shape.length, whole + self.residual - 1)]
        return min(ratios) - BUDGET_TOLERANCE <= share <= max(ratios) + BUDGET_TOLERANCE

    @classmethod
    def over(cls, inner: type[Method]) -> type[Method]:
        """Pack the entries that an eviction or head method keeps."""
        return go_around(inner, cls.card)
