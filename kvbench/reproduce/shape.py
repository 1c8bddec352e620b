"""Tests findings of papers on the bundled models: statements that can fail, on runs under one protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, model_validator

from kvbench.analysis.load import check_complete
from kvbench.analysis.shares import stored_share
from kvbench.analysis.significance import ALPHA, adjust, compare_scores, find_margin_p
from kvbench.errors import UserError, unknown
from kvbench.registry import HERE
from kvbench.reproduce.findings.records import Decision, join_verdicts
from kvbench.reproduce.paper import HINT
from kvbench.runs.files import read_file, read_lines
from kvbench.runs.journal import Line
from kvbench.runs.options import Request
from kvbench.runs.results import Environment, Result
from kvbench.runs.schema import SCHEMA_VERSION
from kvbench.runs.spec import ModelSpec, Record
from kvbench.sweep.file import SweepFile, expand
from kvbench.toml import STRICT, read_toml

FILE = HERE / "reproduce" / "data" / "shape.toml"
PARTS = ("all", "first", "later", "none")
"""Parts of a run: all turns, the first, the later ones, or the baseline `none` of a diffusion run."""
SAME_BYTES = 1.02
"""Allowed ratio of stored bytes in comparisons at equal bytes."""


class Comparison(BaseModel):
    """States that `more` scores above `less` by more than `by`; a negative `by`: falls behind by less than that."""

    model_config = STRICT

    more: str
    less: str
    by: float = Field(gt=-1, lt=1)
    equal_bytes: bool = False
    """True: the comparison is void if `more` stores more bytes, or if bytes were not measured."""


class Finding(BaseModel):
    """A statement that holds if all of its comparisons hold."""

    model_config = STRICT

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    source: str
    arxiv: str
    statement: str
    comparisons: list[Comparison] = Field(min_length=1)
    remark: str = ""
    """Explanation if it does not hold on the bundled models."""


class FindingsFile(BaseModel):
    """The findings file: options of all runs, runs by name, findings."""

    model_config = STRICT

    run: dict[str, Any]
    runs: dict[str, dict[str, Any]]
    finding: list[Finding] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        for finding in self.finding:
            for side in (x for y in finding.comparisons for x in (y.more, y.less)):
                name, part = split(side)
                if name not in self.runs or part not in PARTS:
                    raise ValueError(f"{finding.name}: '{side}' is no run of the file, or no part of one")
        return self

    def requests(self, findings: Sequence[Finding]) -> dict[str, Request]:
        """The runs that the findings need, each once."""
        sides = [x for finding in findings for y in finding.comparisons for x in (y.more, y.less)]
        names = list(dict.fromkeys(split(x)[0] for x in sides))
        return {x: expand(SweepFile(grid=[{**self.run, **self.runs[x]}]))[0].request for x in names}


@dataclass(frozen=True)
class Finished:
    """A finished run with all lines of its journal."""

    result: Result
    lines: tuple[Line, ...]

    @classmethod
    def load(cls, folder: Path) -> Finished:
        """Load a run from its folder.

        Raises:
            UserError: the run is unfinished or damaged, or samples failed.
        """
        result = read_file(folder / "result.json", Result)
        if result.status != "ok":
            raise UserError(f"run {folder} failed: {result.error}. Remove the folder, then run the same command.")
        lines = tuple(read_lines(folder / "samples.jsonl"))
        check_complete(folder, result, lines)
        return cls(result, lines)


class Compared(Record):
    """A comparison and its result."""

    more: str
    less: str
    by: float
    mean_more: float
    mean_less: float
    ci95: tuple[float, float]
    """Interval of the difference over contexts, as in `compare_scores`."""
    p: float
    """Two-sided, by context, of the hypothesis that the difference is `by`: sign flips for 0, else `find_margin_p`."""
    p_adjusted: float
    """Holm's adjustment over all comparisons tested together."""
    contexts: tuple[float, ...]
    """The differences by context, from which all numbers can be recomputed."""
    bytes_more: float | None
    bytes_less: float | None
    """Measured shares of the full cache."""
    equal_bytes: bool
    verdict: Decision


class FindingRecord(Record):
    """A finding and its verdict."""

    name: str
    source: str
    arxiv: str
    statement: str
    verdict: Decision
    remark: str
    comparisons: tuple[Compared, ...]


class ShapeRecord(Record):
    """results/shape/findings.json"""

    schema_version: Literal[2] = SCHEMA_VERSION
    findings: tuple[FindingRecord, ...]
    runs: dict[str, str]
    """Run ids by the names of the findings file."""
    models: tuple[ModelSpec, ...]
    environment: Environment
    """Of the first run, with `seconds` of all runs."""


def read_shape() -> FindingsFile:
    """Read the bundled findings.

    Raises:
        UserError: the file is invalid.
    """
    return read_toml(FILE, FindingsFile, "findings file", HINT)


def find_findings(shape: FindingsFile, name: str) -> list[Finding]:
    """One finding by name, or `all`.

    Raises:
        UserError: an unknown name.
    """
    found = [x for x in shape.finding if name in ("all", x.name)]
    if not found:
        raise unknown("finding", name, ["all", *(x.name for x in shape.finding)])
    return found


def split(side: str) -> tuple[str, str]:
    """Split a side into the run's name and its part."""
    name, _, part = side.partition("/")
    return name, part or "all"


def decide(findings: Sequence[Finding], runs: Mapping[str, Finished]) -> list[FindingRecord]:
    """Test every comparison, with p-values adjusted over all of them, and judge each finding.

    Raises:
        UserError: the two sides have different questions.
    """
    tested = [_test(x, runs) for finding in findings for x in finding.comparisons]
    adjusted = adjust([x.p for x in tested])
    judged = iter([_judge(x, p) for x, p in zip(tested, adjusted, strict=True)])
    records = []
    for finding in findings:
        comparisons = tuple(next(judged) for _ in finding.comparisons)
        records.append(FindingRecord(
            name=finding.name, source=finding.source, arxiv=finding.arxiv, statement=finding.statement,
            verdict=join_verdicts([x.verdict for x in comparisons]), remark=finding.remark.strip(),
            comparisons=comparisons,
        ))
    return records


def make_record(findings: Sequence[Finding], runs: Mapping[str, Finished]) -> ShapeRecord:
    """The record for results/shape/.

    Raises:
        UserError: see `decide`.
    """
    results = [x.result for x in runs.values()]
    seconds = sum(x.environment.seconds for x in results)
    return ShapeRecord(
        findings=tuple(decide(findings, runs)), runs={name: x.result.run_id for name, x in runs.items()},
        models=tuple({(x.model.sha256, x.model.dtype): x.model for x in results}.values()),
        environment=results[0].environment.model_copy(update={"seconds": seconds}),
    )


def _test(comparison: Comparison, runs: Mapping[str, Finished]) -> Compared:
    more, less = (_by_context(side, runs) for side in (comparison.more, comparison.less))
    if more.keys() != less.keys():
        raise UserError(
            f"{comparison.more} and {comparison.less} have different questions. Run both with the same task settings "
            "and seed."
        )
    if not all(0 <= x <= 1 for x in (*more.values(), *less.values())):
        raise UserError(
            f"{comparison.more} and {comparison.less} have scores outside 0 to 1. Findings on runs need a task whose "
            "scores are shares."
        )
    paired = compare_scores([[(less[x], more[x])] for x in more])
    assert paired.ci95 is not None, "scores from 0 to 1 have an interval"
    differences = tuple(more[x] - less[x] for x in more)
    return Compared(
        more=comparison.more, less=comparison.less, by=comparison.by, mean_more=fmean(more.values()),
        mean_less=fmean(less.values()), ci95=paired.ci95,
        p=find_margin_p(differences, comparison.by) if comparison.by else paired.p, p_adjusted=1.0,
        contexts=differences, bytes_more=_bytes(comparison.more, runs), bytes_less=_bytes(comparison.less, runs),
        equal_bytes=comparison.equal_bytes, verdict="undecided",
    )


def _judge(tested: Compared, p_adjusted: float) -> Compared:
    """`holds` if significantly above `by`, `does not hold` if significantly below, otherwise `undecided`."""
    verdict: Decision = "undecided"
    more, less = tested.bytes_more, tested.bytes_less
    void = tested.equal_bytes and (more is None or less is None or more > SAME_BYTES * less)
    if p_adjusted < ALPHA and not void:
        verdict = "holds" if fmean(tested.contexts) > tested.by else "does not hold"
    return tested.model_copy(update={"p_adjusted": p_adjusted, "verdict": verdict})


def _by_context(side: str, runs: Mapping[str, Finished]) -> dict[tuple[str, str], float]:
    """Mean score of a part of a run, by sample and hash of its prompt."""
    name, part = split(side)
    scores: dict[tuple[str, str], list[float]] = {}
    for line in runs[name].lines:
        if part in ("all", "none") or (line.turn == 0) == (part == "first"):
            uncached = None if line.denoising is None else line.denoising.baselines["none"].score
            score = uncached if part == "none" else line.score
            assert score is not None
            scores.setdefault((line.sample, line.prompt_hash), []).append(score)
    return {key: fmean(scores[key]) for key in sorted(scores)}


def _bytes(side: str, runs: Mapping[str, Finished]) -> float | None:
    return stored_share(runs[split(side)[0]].result)
