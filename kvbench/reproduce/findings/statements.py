"""The registered statements: their papers, statistics, rules and figures, read without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import BaseModel, Field, model_validator

from kvbench.errors import unknown
from kvbench.toml import STRICT, read_toml

FILE = Path(__file__).with_name("findings.toml")


class StatisticCheck(BaseModel):
    """A statistic with one bound, another that it exceeds, agreement of its layers between texts, or a linear mean."""

    model_config = STRICT

    value: str
    least: float | None = None
    most: float | None = None
    above: str | None = None
    agreement: float | None = None
    """Least rank correlation of the numbers by layer of two texts."""
    linear: float | None = None
    """Least squared correlation of the mean curve over texts with a line."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if sum(x is not None for x in (self.least, self.most, self.above, self.agreement, self.linear)) != 1:
            raise ValueError(f"check of {self.value} needs exactly one of least, most, above, agreement, linear")
        return self

    @property
    def rule(self) -> str:
        """The rule as text."""
        if self.above is not None:
            return f"{self.value} > {self.above}"
        if self.agreement is not None:
            return f"agreement of {self.value} between texts >= {self.agreement:g}"
        if self.linear is not None:
            return f"fit of a line to the mean {self.value} >= {self.linear:g}"
        return f"{self.value} >= {self.least:g}" if self.least is not None else f"{self.value} <= {self.most:g}"


class Figure(BaseModel):
    """Lines by layer, or along another axis: a label, and the value that has a number per layer."""

    model_config = STRICT

    title: str
    axis: str = "layer"
    lines: dict[str, str] = Field(min_length=1)


class Statement(BaseModel):
    """A statement that holds if all of its checks hold."""

    model_config = STRICT

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    source: str
    arxiv: str
    statement: str
    printed: str
    """The paper's number; empty: it prints none that was read."""
    statistic: str
    definition: str
    """Of the values that the checks name."""
    remark: str = ""
    """Differences that may explain why it does not hold, and whether they were measured."""
    figure: Figure | None = None
    task: str | None = None
    """Of models of which only some layers rotate: the task whose prompts are the texts. None: of models without sliding
    windows, on texts of the standard library."""
    checks: list[StatisticCheck] = Field(min_length=1)


class Statements(BaseModel):
    """The findings file."""

    model_config = STRICT

    finding: list[Statement] = Field(min_length=1)


def find_findings(name: str) -> tuple[Statement, ...]:
    """One finding by name, or `all`.

    Raises:
        UserError: an unknown name.
    """
    every = read_toml(FILE, Statements, "findings file", "See docs/findings.md.").finding
    found = tuple(x for x in every if name in ("all", x.name))
    if not found:
        raise unknown("finding", name, ["all", *(x.name for x in every)])
    return found
