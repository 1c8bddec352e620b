"""`kvbench reproduce`: compare published numbers and findings with measurements."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvbench.cli.findings import check_findings, measure_findings
from kvbench.cli.options import Json, RunsOut
from kvbench.cli.output import echo, print_json
from kvbench.errors import MOST_SAMPLES, UserError, check_number
from kvbench.log import say

if TYPE_CHECKING:
    from kvbench.reproduce.plan import ClaimPlan, Missing
    from kvbench.reproduce.verdict import Judgment, Number
    from kvbench.runs.options import Request
    from kvbench.sweep.cell import SweepCell

Text = str | None


def reproduce_command(
    claim: Annotated[
        Text, typer.Argument(help="paper:table/model/row/column from --list, or a prefix; see docs/reproducing.md.")
    ] = None,
    *,
    listed: Annotated[bool, typer.Option("--list", help="List the published tables and findings.")] = False,
    method: Annotated[
        Text, typer.Option(help="List the published numbers of a method, or say why there are none.")
    ] = None,
    shape: Annotated[
        Text, typer.Option(help="Finding to test, or all: on the bundled models, or with --model on texts.")
    ] = None,
    model: Annotated[
        Text, typer.Option(help="Use this model instead of the paper's; only the direction is compared.")
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(help="Most samples per task (only the direction is compared); with --shape and --model: texts."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List what is missing, and predict time and memory; run nothing.")
    ] = False,
    out: RunsOut = Path("runs"),
    as_json: Json = False,
) -> int:
    """Compare a paper's numbers with measured ones. The same command resumes."""
    if sum((claim is not None, listed, method is not None, shape is not None)) != 1:
        raise UserError(
            "reproduce takes exactly one of: a claim, --list, --method, --shape. See `kvbench reproduce --help`."
        )
    if samples is not None:
        check_number("samples", samples, most=MOST_SAMPLES)
    if listed:
        return _list(as_json=as_json)
    if method is not None:
        return _list_method(method, as_json=as_json)
    if shape is not None:
        if model is not None:
            return measure_findings(shape, model, samples, out, dry_run=dry_run, as_json=as_json)
        return check_findings(shape, samples, out, dry_run=dry_run, as_json=as_json)
    from kvbench.reproduce.claims import find_claims
    from kvbench.reproduce.needs import look_around
    from kvbench.reproduce.plan import plan_claim, with_baselines

    assert claim is not None
    plans = look_around([plan_claim(x, model, samples, out) for x in with_baselines(find_claims(claim))])
    if dry_run:
        return _show_plan(plans, as_json=as_json)
    return _run(plans, out, as_json=as_json)


def _list(*, as_json: bool) -> int:
    """Print one row per published table and per finding."""
    say("reading the claims of papers ...")
    from kvbench.analysis.formatting import print_table
    from kvbench.reproduce.claims import list_claims
    from kvbench.reproduce.findings.statements import find_findings
    from kvbench.reproduce.paper import list_papers
    from kvbench.reproduce.plan import plan_claim
    from kvbench.reproduce.shape import read_shape

    tables = [
        (name, paper, table, [plan_claim(x) for x in list_claims(name, paper) if x.table is table])
        for name, paper in list_papers().items() for table in paper.table
    ]
    findings, on_texts = read_shape().finding, find_findings("all")
    print_table("numbers", ("claim", "title", "has code here", "copied from"), [
        (
            f"{name}:{table.name}", table.title, f"{sum(not x.missing for x in plans)} of {len(plans)}",
            {"verified": "the paper", "secondary": "a secondary source", "memory": "memory"}[table.evidence],
        )
        for name, _, table, plans in tables
    ])
    print_table("findings, for --shape", ("finding", "statement", "source"), [
        (x.name, x.statement, x.source) for x in findings
    ])
    print_table("findings, for --shape with --model", ("finding", "statement", "source"), [
        (x.name, x.statement, x.source) for x in on_texts
    ])
    if as_json:
        print_json({
            "tables": [
                {"id": f"{name}:{table.name}", "paper": paper.title, "arxiv": paper.arxiv, "title": table.title,
                 "evidence": table.evidence, "where": table.where, "claims": [x.claim.id for x in plans],
                 "runnable": [x.claim.id for x in plans if not x.missing]}
                for name, paper, table, plans in tables
            ],
            "findings": [x.model_dump(mode="json") for x in findings],
            "findings_on_texts": [x.model_dump(mode="json") for x in on_texts],
        })
    return 0


def _list_method(method: str, *, as_json: bool) -> int:
    """Print one row per published row of a method, with its protocol; or why there is none."""
    from kvbench.analysis.formatting import print_list
    from kvbench.registry import find_method
    from kvbench.reproduce.coverage import list_claims_of, read_reasons
    from kvbench.reproduce.plan import plan_claim

    find_method(method)
    plans = [plan_claim(x) for x in list_claims_of(method)]
    reason = None if plans else read_reasons().get(method, "The numbers of its paper have not been looked up yet.")
    if reason is not None:
        echo(f"no published number of {method} is in the claims files. {reason}")
    groups: dict[str, list[ClaimPlan]] = {}
    for plan in plans:
        groups.setdefault(plan.claim.id.rpartition("/")[0], []).append(plan)
    if groups:
        tables: dict[str, list[tuple[str, ...]]] = {}
        for name, group in groups.items():
            table, _, row = name.rpartition("/")
            claim = group[0].claim
            tables.setdefault(table, []).append((
                row, claim.table.measure, claim.budget or "-", claim.protocol.visibility or "-", str(len(group)),
                str(sum(not x.missing for x in group)), claim.evidence,
            ))
        print_list(("row", "measure", "budget", "visibility", "numbers", "has code here", "source"), tables)
        echo(f"\nOne row: kvbench reproduce {next(iter(groups))} --dry-run")
    if as_json:
        print_json({
            "method": method, "reason": reason,
            "numbers": [
                {"id": x.claim.id, "printed": x.claim.printed, "measure": x.claim.table.measure,
                 "model": x.claim.block.id or x.claim.model, "tasks": [y.task for y in x.requests],
                 "budget": x.claim.budget, "settings": x.claim.method.set,
                 "protocol": x.claim.protocol.model_dump(mode="json"), "evidence": x.claim.evidence,
                 "where": x.claim.table.where, "missing": [y.why for y in x.missing]}
                for x in plans
            ],
        })
    return 0


def _say_missing(plans: list[ClaimPlan]) -> None:
    """Log what is missing, each requirement once."""
    for missing, count in _count(plans).items():
        say(f"missing for {count} of {len(plans)} numbers: {missing.what}: {missing.why.rstrip('.')}.")


def _count(plans: list[ClaimPlan]) -> Counter[Missing]:
    return Counter(x for plan in plans for x in plan.missing)


def _cells(plans: list[ClaimPlan]) -> list[SweepCell]:
    """The runs of all plans without missing requirements, without duplicates."""
    requests = dict.fromkeys(x for plan in plans if not plan.missing for x in plan.requests)
    return [_cell(i, x) for i, x in enumerate(requests)]


def _cell(index: int, request: Request) -> SweepCell:
    from kvbench.sweep.cell import SweepCell

    options = {"budget": request.budget, "task": request.task, "length": request.length, "model": request.model}
    own = {key: str(value) for key, value in options.items() if value is not None}
    name = " ".join([request.method, *(f"{key}={value}" for key, value in own.items())])
    return SweepCell(index, name, request, own)


def _show_plan(plans: list[ClaimPlan], *, as_json: bool) -> int:
    """Print runs, memory, time and missing requirements for each row of a published table."""
    from kvbench.analysis.formatting import format_bytes, print_list
    from kvbench.reproduce.plan import Missing
    from kvbench.sweep.predict import predict

    cells = _cells(plans)
    found = {x.cell.request: x for x in predict(cells)} if cells else {}
    refused = {x: Missing("run", y.error) for x, y in found.items() if y.error is not None}
    plans = [
        replace(x, missing=(*x.missing, *dict.fromkeys(refused[y] for y in x.requests if y in refused))) for x in plans
    ]
    _say_missing(plans)
    groups: dict[tuple[str, str, str], list[ClaimPlan]] = {}
    for plan in plans:
        groups.setdefault((plan.claim.table.name, plan.claim.model, plan.claim.row), []).append(plan)
    rows: dict[str, list[list[str]]] = {}
    documents = []
    for (table, model, row), group in groups.items():
        requests = list(dict.fromkeys(x for plan in group for x in plan.requests))
        ready = list(dict.fromkeys(x for plan in group if not plan.missing for x in plan.requests))
        predicted = all(x.prediction is not None for x in group)  # nothing is run
        seconds = sum(found[x].seconds or 0.0 for x in ready) if ready or predicted else None
        most = max((x.predicted_bytes for x in group if x.predicted_bytes is not None), default=None)
        lacking = list(dict.fromkeys(x.what for plan in group for x in plan.missing))
        rows.setdefault(f"{table}, {model}", []).append([
            row, str(len(group)), str(len(requests)), f"{sum(x.samples for x in requests):,}",
            "-" if predicted else "unknown" if most is None else format_bytes(most),
            "-" if seconds is None else f"{seconds:.0f} s",
            ", ".join(lacking) or "-",
        ])
        documents.append({
            "table": table, "model": model, "row": row, "claims": [x.claim.id for x in group], "runs": len(requests),
            "samples": sum(x.samples for x in requests), "predicted_bytes": most, "predicted_s": seconds,
            "missing": [{"what": x.what, "why": x.why} for x in _count(group)],
        })
    head = ("row", "numbers", "runs", "samples", "memory", "time", "missing")
    timed = [x["predicted_s"] is not None for x in documents]
    shown = [i for i, name in enumerate(head) if name != "time" or any(timed)]
    print_list([head[i] for i in shown], {name: [[x[i] for i in shown] for x in group] for name, group in rows.items()})
    echo("\nPredicted memory: weights and a full cache.")
    if any(timed):
        echo("Predicted time: one sample of each kind on this machine.")
    if not all(timed):
        echo(
            f"No time for {timed.count(False)} of {len(timed)} rows: kvbench predicts it from one sample of each kind, "
            "which needs what is missing. docs/reproducing.md has hours that are predicted for one H100."
        )
    if as_json:
        print_json(documents)
    return 0


def _run(plans: list[ClaimPlan], out: Path, *, as_json: bool) -> int:
    """Run all plans without missing requirements, then judge every number."""
    from kvbench.analysis.load import load_run
    from kvbench.cli.sweep import run_cells
    from kvbench.reproduce.memory import judge_bytes
    from kvbench.reproduce.plan import Missing, find_baseline
    from kvbench.reproduce.speed import judge_speed, time_claim
    from kvbench.reproduce.verdict import find_unanchored, judge

    _say_missing(plans)
    cells = _cells(plans)
    reports = dict(zip((x.request for x in cells), run_cells(cells) if cells else [], strict=True))
    runs = {x: load_run(report.folder) for x, report in reports.items() if report.result is not None and report.folder}
    by_id = {x.claim.id: x for x in plans}
    judged = []
    for plan in plans:
        if plan.prediction is not None:
            judged.append(judge_bytes(plan.claim, plan.prediction))
            continue
        if plan.claim.table.measure != "score":
            judged.append(judge_speed(plan, None if plan.missing else time_claim(plan, out)))
            continue
        failed = [
            Missing("run", report.error or "failed") for x in plan.requests
            if (report := reports.get(x)) is not None and report.result is None
        ]
        other = find_baseline(plan.claim)
        beside = None if other is None else by_id.get(other.id)
        judged.append(judge(replace(plan, missing=(*plan.missing, *failed)), runs, beside))
    _print(judged)
    for (paper, table, model), points in find_unanchored(judged).items():
        echo(f"{paper}:{table}, {model}: not anchored, the full cache is {points:.2f} points from the paper's.")
    if as_json:
        print_json([x.document for x in judged])
    whole = all(x.status == "ok" for x in reports.values())
    return 0 if whole and any(x.verdict != "not run" for x in judged) else 1


def _print(judged: list[Judgment]) -> None:
    """Print one row per measured number, and one per table row that was not run."""
    from kvbench.analysis.formatting import print_table

    rows: dict[str, list[tuple[str, ...]]] = {}
    waiting: dict[tuple[str, str, str], list[Judgment]] = {}
    differs: dict[str, None] = {}
    for x in judged:
        claim = x.claim
        if x.ours is None:
            waiting.setdefault((claim.table.name, claim.model, claim.row), []).append(x)
            continue
        printed = f"{claim.printed:.{claim.table.decimals}f}"
        if claim.value != claim.printed:
            printed += f", corrected {claim.value:.{claim.table.decimals}f}"
        names, difference, own = "", "", ""
        if x.printed_difference is not None:
            names, difference = "\nless the full cache", f"\n{x.printed_difference:+.2f}"
            own = f"\n{'-' if x.difference is None else _number(x.difference, sign='+')}"
        verdict = f"{x.verdict}: {x.direction}" if x.verdict == "shape only" and x.direction else x.verdict
        rows.setdefault(claim.model, []).append((
            f"{claim.row}, {claim.column}{names}", f"{printed}{difference}", f"{_number(x.ours)}{own}", verdict,
        ))
        differs |= dict.fromkeys(x.differs)
        if x.regime:
            echo(
                f"{claim.id}: claimed {printed} ({claim.table.hardware or 'hardware not stated'}), here "
                f"{_number(x.ours)}: {x.regime}"
            )
    for model, found in rows.items():
        print_table(model, ("row, column", "paper", "here, 95% CI", "verdict"), found)
    if waiting:
        print_table("not run", ("table", "model", "row", "numbers", "missing"), [
            (*key, str(len(group)), ", ".join(dict.fromkeys(x.what for y in group for x in y.missing)))
            for key, group in waiting.items()
        ])
    for text in differs:
        echo(f"differs from the paper: {text}")


def _number(number: Number, sign: str = "") -> str:
    low, high = number.ci95
    if low == high:  # predicted, not measured
        return f"{number.value:{sign}.2f}"
    return f"{number.value:{sign}.2f}  [{low:{sign}.2f}, {high:{sign}.2f}]"
