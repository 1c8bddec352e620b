"""The findings of `kvbench reproduce --shape`: test published findings on the bundled models."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kvbench.cli.output import print_json
from kvbench.errors import UserError

if TYPE_CHECKING:
    from kvbench.reproduce.shape import FindingRecord
    from kvbench.sweep.cell import CellReport

RECORD = Path("results/shape/findings.json")


def check_findings(name: str, samples: int | None, out: Path, *, dry_run: bool, as_json: bool) -> int:
    """Run and test findings; with `all`, write the record of all findings."""
    from kvbench.cli.sweep import run_cells, show_prediction
    from kvbench.reproduce.shape import Finished, find_findings, make_record, read_shape
    from kvbench.sweep.cell import SweepCell

    shape = read_shape()
    findings = find_findings(shape, name)
    requests = {
        key: replace(x, out=out, samples=min(samples or x.samples, x.samples))
        for key, x in shape.requests(findings).items()
    }
    cells = [SweepCell(i, 1, key, x, {}) for i, (key, x) in enumerate(requests.items())]
    if dry_run:
        return show_prediction(cells, 1, as_json=as_json)
    reports = run_cells(cells, workers=len(os.sched_getaffinity(0)))
    record = make_record(findings, {
        key: Finished.load(_folder(report)) for key, report in zip(requests, reports, strict=True)
    })
    _print_findings(record.findings)
    if name == "all" and samples is None:
        from kvbench.runs.files import saving, write_record

        with saving(RECORD):
            RECORD.parent.mkdir(parents=True, exist_ok=True)
        write_record(RECORD, record)
        typer.echo(f"{RECORD}: {len(record.runs)} runs, {record.environment.seconds:.0f} s.")
    if as_json:
        print_json(record.model_dump(mode="json"))
    return 0


def _folder(report: CellReport) -> Path:
    if report.folder is None or report.result is None:
        raise UserError(f"{report.cell.name}: {report.error}")
    return report.folder


def _print_findings(findings: tuple[FindingRecord, ...]) -> None:
    """Print each finding with its comparisons, one row each."""
    from kvbench.analysis.formatting import format_p, print_table

    rows: list[tuple[str, ...]] = []
    for finding in findings:
        rows.append((finding.name, finding.statement, "", "", "", finding.verdict))
        for x in finding.comparisons:
            low, high = x.ci95
            stored = ""
            if x.equal_bytes and x.bytes_more is not None and x.bytes_less is not None:
                stored = f", at {x.bytes_more:.1%} and {x.bytes_less:.1%} of the bytes"
            rows.append((
                "", f"{x.more} {x.mean_more:.2f} - {x.less} {x.mean_less:.2f} > {x.by:+.2f}{stored}",
                f"{x.mean_more - x.mean_less:+.2f}  [{low:+.2f}, {high:+.2f}]", format_p(x.p_adjusted),
                str(len(x.contexts)), x.verdict,
            ))
        if finding.remark and finding.verdict != "holds":
            rows.append(("", finding.remark, "", "", "", ""))
    print_table("", ("finding", "", "difference, 95% CI", "p (Holm)", "contexts", "verdict"), rows)
