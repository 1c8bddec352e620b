"""The registered statements: their papers, statistics, rules and figures, read without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import BaseModel, Field, model_validator

from kvbench.errors import unknown
from kvbench.toml import STRICT, read_toml

FILE = Path(__file__).with_name("findings.toml")


class StatisticCheck(BaseModel):
    """A statistic with one bound, another statistic that it exceeds, or the agreement of its layers between texts."""

    model_config = STRICT

    value: str
    least: float | None = None
    most: float | None = None
    above: str | None = None
    agreement: float | None = None
    """Least rank correlation of the numbers by layer of two texts."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if sum(x is not None for x in (self.least, self.most, self.above, self.agreement)) != 1:
            raise ValueError(f"check of {self.value} needs exactly one of least, most, above, agreement")
        return self

    @property
    def rule(self) -> str:
        """The rule as text."""
        if self.above is not None:
            return f"{self.value} > {self.above}"
        if self.agreement is not None:
            return f"agreement of {self.value} between texts >= {self.agreement:g}"
        return f"{self.value} >= {self.least:g}" if self.least is not None else f"{self.value} <= {self.most:g}"


class Figure(BaseModel):
    """Lines by layer: a label, and the value that has a number per layer."""

    model_config = STRICT

    title: str
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
