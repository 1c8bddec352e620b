"""What papers print, and what kvbench says of it, laid out as their tables are."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from kvbench.files import read_file
from kvbench.reproduce.claims import list_claims
from kvbench.reproduce.paper import list_papers
from kvbench.reproduce.plan import Plan, plan_claim
from kvbench.reproduce.shape import ShapeRecord
from kvbench.reproduce.speed import judge_speed
from kvbench.reproduce.verdict import Judgement, Verdict, judge

FINDINGS = Path("shape") / "findings.json"
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


@dataclass(frozen=True)
class Block:
    """The numbers of one model in one table, by row and column."""

    model: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Judgement | None, ...]], ...]

    def missing(self, row: Sequence[Judgement | None]) -> list[str]:
        """What a row lacks, each once."""
        return list(dict.fromkeys(x.why for y in row if y is not None for x in y.missing))

    def differs(self, row: Sequence[Judgement | None]) -> list[str]:
        """What is otherwise in it than in the paper, each once."""
        return list(dict.fromkeys(x for y in row if y is not None for x in y.differs))


@dataclass(frozen=True)
class Source:
    """A paper with the verdicts on its numbers."""

    name: str
    judged: tuple[Judgement, ...]

    @property
    def counts(self) -> list[int]:
        """Numbers with each verdict, in the order of VERDICTS."""
        counts = Counter(x.verdict for x in self.judged)
        return [counts[x] for x in VERDICTS]

    @property
    def tables(self) -> Iterator[tuple[Judgement, list[Block]]]:
        """Any number of each table, and the table by model."""
        tables: dict[str, dict[str, list[Judgement]]] = {}
        for x in self.judged:
            tables.setdefault(x.claim.table.name, {}).setdefault(x.claim.model, []).append(x)
        for models in tables.values():
            yield next(iter(models.values()))[0], [_lay_out(model, some) for model, some in models.items()]


def _lay_out(model: str, judged: Sequence[Judgement]) -> Block:
    columns = tuple(x for x in judged[0].claim.table.columns if any(y.claim.column == x for y in judged))
    cells = {(x.claim.row, x.claim.column): x for x in judged}
    rows = dict.fromkeys(x.claim.row for x in judged)
    return Block(model, columns, tuple((row, tuple(cells.get((row, x)) for x in columns)) for row in rows))


@dataclass(frozen=True)
class Claims:
    """Printed numbers by paper, and findings put to the bundled models."""

    sources: tuple[Source, ...]
    findings: ShapeRecord | None
    """None: they were not tested here."""


def read_claims(results: Path) -> Claims:
    """The verdicts, as far as the results go.

    Raises:
        UserError: the record of the findings cannot be read.
    """
    record = results / FINDINGS
    return Claims(_judge_papers(), read_file(record, ShapeRecord) if record.is_file() else None)


@functools.cache
def _judge_papers() -> tuple[Source, ...]:
    return tuple(
        Source(name, tuple(_judge(plan_claim(x)) for x in list_claims(name, paper)))
        for name, paper in list_papers().items()
    )


def _judge(plan: Plan) -> Judgement:
    return judge(plan, {}) if plan.timing is None else judge_speed(plan, None)
