"""Results of findings: checks, verdicts, and the record of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from kvbench.runs.results import Environment
from kvbench.runs.schema import SCHEMA_VERSION
from kvbench.runs.spec import ModelSpec, Record

Decision = Literal["holds", "does not hold", "undecided"]


def join_verdicts(verdicts: Sequence[Decision]) -> Decision:
    """The verdict on a finding: it holds if all of its checks hold, and does not hold if one does not."""
    if "does not hold" in verdicts:
        return "does not hold"
    return "undecided" if "undecided" in verdicts else "holds"


class CheckResult(Record):
    """A check with its mean over texts; of `linear`, the fit of their mean curve, and of each text's own."""

    rule: str
    mean: float
    ci95: tuple[float, float]
    """Bootstrap interval over texts. Of `above`: of the difference."""
    texts: tuple[float, ...]
    verdict: Decision


class FindingResult(Record):
    """A finding, its checks and the means of all numbers of its statistic."""

    name: str
    source: str
    arxiv: str
    statement: str
    printed: str
    verdict: Decision
    checks: tuple[CheckResult, ...]
    means: dict[str, float | tuple[float, ...]]


class FindingsRecord(Record):
    """results/shape/<model>.json"""

    schema_version: Literal[2] = SCHEMA_VERSION
    version: int
    model: ModelSpec
    texts: int
    length: int
    data: str
    """Python's version and a hash of the standard library, from which the texts are taken."""
    environment: Environment
    """Of the command that finished the record; `seconds` leaves out what an earlier one had measured."""
    findings: tuple[FindingResult, ...]

    def renew(self, newer: FindingsRecord) -> FindingsRecord | None:
        """The newer record with this one's other findings; None: it is of another model, or of other texts."""
        parts = ("version", "model", "texts", "length", "data")
        if any(getattr(self, x) != getattr(newer, x) for x in parts):
            return None
        measured = {x.name for x in newer.findings}
        kept = tuple(x for x in self.findings if x.name not in measured)
        return newer.model_copy(update={"findings": (*kept, *newer.findings)})
