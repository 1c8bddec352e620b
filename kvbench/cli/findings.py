"""The findings of `kvbench reproduce --shape`: on runs of the bundled models, or on texts with any model."""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.cli.output import echo, print_json
from kvbench.errors import UserError

if TYPE_CHECKING:
    from kvbench.reproduce.findings.records import FindingResult, FindingsRecord
    from kvbench.reproduce.shape import FindingRecord, ShapeRecord
    from kvbench.sweep.cell import CellReport

RECORD = Path("results/shape/findings.json")
LAYERS = 4
"""Layers below which statistics over layers say nothing."""


def check_findings(name: str, samples: int | None, out: Path, *, dry_run: bool, as_json: bool) -> int:
    """Run and test findings; with `all`, write the record of all findings."""
    from kvbench.cli.sweep import run_cells, show_prediction
    from kvbench.reproduce.findings import statements
    from kvbench.reproduce.needs import has_gpu
    from kvbench.reproduce.shape import Finished, find_findings, make_record, read_shape
    from kvbench.sweep.cell import SweepCell

    shape = read_shape()
    on_texts = {x.name for x in statements.find_findings("all")} - {x.name for x in shape.finding}
    if name in on_texts:
        raise UserError(f"{name} is a finding on texts: add --model MODEL.")
    findings = find_findings(shape, name)
    requests = {
        key: replace(x, out=out, samples=min(samples or x.samples, x.samples))
        for key, x in shape.requests(findings).items()
    }
    cells = [SweepCell(i, key, x, {}) for i, (key, x) in enumerate(requests.items())]
    workers = None if has_gpu() else len(os.sched_getaffinity(0))  # on a GPU as many as its memory allows
    if dry_run:
        return show_prediction(cells, workers or 1, as_json=as_json)
    reports = run_cells(cells, workers=workers)
    record = make_record(findings, {
        key: Finished.load(_folder(report)) for key, report in zip(requests, reports, strict=True)
    })
    _print_findings(record.findings)
    if name == "all" and samples is None:
        _save(record, RECORD)
        echo(f"{RECORD}: {len(record.runs)} runs, {record.environment.seconds:.0f} s.")
    if as_json:
        print_json(record.model_dump(mode="json"))
    return 0


def measure_findings(name: str, model: str, texts: int | None, out: Path, *, dry_run: bool, as_json: bool) -> int:
    """Test statements of papers on texts of the standard library.

    With `all`, write the record of the model, unless one of more texts is there. One finding on as many texts as a
    record that is there replaces its part of it.
    """
    from kvbench.reproduce.findings.records import FindingsRecord
    from kvbench.reproduce.findings.run import (
        LENGTH,
        STATISTICS_VERSION,
        TEXTS,
        Plan,
        choose_findings,
        judge,
        measure,
        read_journal,
    )
    from kvbench.reproduce.findings.statements import find_findings

    if dry_run:
        from kvbench.hf import predict_memory

        predict_memory(model)  # refuses a model that does not exist
        names = ", ".join(dict.fromkeys(x.statistic for x in find_findings(name)))
        echo(f"{texts or TEXTS} texts of {LENGTH:,} tokens. Statistics, where they fit the model: {names}.")
        return 0
    started, begin = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    from kvbench.hf import load_model
    from kvbench.log import say
    from kvbench.registry import find_task
    from kvbench.runs.environment import find_environment
    from kvbench.runs.files import read_file
    from kvbench.runs.spec import ModelSpec
    from kvbench.text.stdlib import library, name_revision

    loaded = load_model(model)
    if loaded.kind != "autoregressive" or not loaded.entries_move:
        raise UserError(f"{model} has no causal attention with rotary embeddings that kvbench can invert. Use another.")
    if len(loaded.layers) < LAYERS:
        raise UserError(f"{model} has {len(loaded.layers)} layers. These findings need {LAYERS}: use another model.")
    plan = Plan(choose_findings(name, loaded), texts or TEXTS, LENGTH)
    data = name_revision(library()[1])
    if plan.task is not None:
        data = f"{find_task(plan.task)().prompt_id}, {data}"
    key = hashlib.sha256(f"{STATISTICS_VERSION} {LENGTH} {data} {loaded.sha256} {loaded.dtype}".encode()).hexdigest()
    name_of_model = loaded.id.replace("/", "-")  # that of a folder is its path
    path = RECORD.with_name(f"{name_of_model}.json")
    journal = out / "findings" / f"{name_of_model}-{key[:12]}.jsonl"
    for text, statistic in measure(loaded, plan, journal):
        say(f"text {text + 1} of {plan.texts}: {statistic}")
    record = FindingsRecord(
        version=STATISTICS_VERSION, model=ModelSpec.of(loaded), texts=plan.texts, length=LENGTH, data=data,
        environment=find_environment("cpu", started=started, seconds=time.monotonic() - begin),
        findings=judge(plan, read_journal(journal)),
    )
    _print_measured(record.findings, plan.texts)
    held = read_file(path, FindingsRecord) if path.exists() else None
    if held is not None and held.texts > record.texts:
        echo(f"{path} is of {held.texts} texts and stays as it is.")
    elif name == "all" or held is not None:
        whole = record if name == "all" or held is None else held.renew(record)
        if whole is None:
            echo(f"{path} is of other weights, texts or statistics and stays as it is.")
        else:
            order = [x.name for x in find_findings("all")]
            found = sorted((x for x in whole.findings if x.name in order), key=lambda x: order.index(x.name))
            _save(whole.model_copy(update={"findings": tuple(found)}), path)
            echo(f"{path} is written.")
    if as_json:
        print_json(record.model_dump(mode="json"))
    return 0


def _save(record: ShapeRecord | FindingsRecord, path: Path) -> None:
    from kvbench.runs.files import saving, write_record

    with saving(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_record(path, record)


def _print_measured(findings: tuple[FindingResult, ...], texts: int) -> None:
    """Print a table for each finding, with its checks."""
    from kvbench.analysis.formatting import print_table

    for x in findings:
        print_table(_title(x), (f"it holds if, over {texts} texts", "mean, 95% CI", "verdict"), [
            (y.rule, f"{y.mean:.3f}  [{y.ci95[0]:.3f}, {y.ci95[1]:.3f}]", y.verdict) for y in x.checks
        ])


def _title(finding: FindingResult | FindingRecord) -> str:
    return f"{finding.name}: {finding.verdict}. {finding.statement}"


def _folder(report: CellReport) -> Path:
    if report.folder is None or report.result is None:
        raise UserError(f"{report.cell.name}: {report.error}")
    return report.folder


def _print_findings(findings: tuple[FindingRecord, ...]) -> None:
    """Print a table for each finding, with its comparisons."""
    from kvbench.analysis.formatting import format_p, print_table

    for finding in findings:
        rows: list[tuple[str, ...]] = []
        for x in finding.comparisons:
            low, high = x.ci95
            stored = ""
            if x.equal_bytes and x.bytes_more is not None and x.bytes_less is not None:
                stored = f", at {x.bytes_more:.1%} and {x.bytes_less:.1%} of the bytes"
            rows.append((
                f"{x.more} {x.mean_more:.2f} - {x.less} {x.mean_less:.2f} > {x.by:+.2f}{stored}",
                f"{x.mean_more - x.mean_less:+.2f}\n[{low:+.2f}, {high:+.2f}]", format_p(x.p_adjusted),
                str(len(x.contexts)), x.verdict,
            ))
        print_table(_title(finding), ("it holds if", "difference, 95% CI", "p (Holm)", "contexts", "verdict"), rows)
        if finding.remark and finding.verdict != "holds":
            echo(finding.remark)
