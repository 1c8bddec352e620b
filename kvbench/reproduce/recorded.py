"""The records of findings in a results folder, and one flat row per check for SQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from kvbench.reproduce.findings.records import Decision, FindingsRecord
from kvbench.reproduce.shape import ShapeRecord
from kvbench.runs.files import read_file
from kvbench.runs.spec import Record

ON_RUNS = "findings.json"


class FindingRow(Record):
    """A check of a finding on texts, or a comparison of a finding on runs."""

    finding: str
    tested_on: Literal["texts", "runs"]
    model: str
    """Of a finding on runs: all bundled models whose runs were compared."""
    source: str
    arxiv: str
    statement: str
    printed: str
    """The paper's number; empty: it prints none that was read."""
    finding_verdict: Decision
    rule: str
    mean: float
    """Over texts; of a comparison: the difference over contexts."""
    ci95: tuple[float, float]
    numbers: tuple[float, ...]
    """By text or by context."""
    verdict: Decision


def read_findings(folder: Path) -> ShapeRecord | None:
    """The record of the findings tested on the bundled models; None if there is none."""
    path = folder / "shape" / ON_RUNS
    return read_file(path, ShapeRecord) if path.exists() else None


def read_measured(folder: Path) -> tuple[FindingsRecord, ...]:
    """The records of findings that were tested on texts, by model."""
    paths = sorted(x for x in (folder / "shape").glob("*.json") if x.name != ON_RUNS)
    return tuple(read_file(x, FindingsRecord) for x in paths)


def list_rows(folder: Path) -> Iterator[FindingRow]:
    """One row per check or comparison of the findings in a results folder."""
    for record in read_measured(folder):
        for x in record.findings:
            for check in x.checks:
                yield FindingRow(
                    finding=x.name, tested_on="texts", model=record.model.id, source=x.source, arxiv=x.arxiv,
                    statement=x.statement, printed=x.printed, finding_verdict=x.verdict, rule=check.rule,
                    mean=check.mean, ci95=check.ci95, numbers=check.texts, verdict=check.verdict,
                )
    runs = read_findings(folder)
    for y in () if runs is None else runs.findings:
        for pair in y.comparisons:
            yield FindingRow(
                finding=y.name, tested_on="runs", model=", ".join(x.id for x in runs.models) if runs else "",
                source=y.source, arxiv=y.arxiv, statement=y.statement, printed="", finding_verdict=y.verdict,
                rule=f"{pair.more} - {pair.less} > {pair.by:+g}", mean=pair.mean_more - pair.mean_less,
                ci95=pair.ci95, numbers=pair.contexts, verdict=pair.verdict,
            )
