"""How every claim stands by the runs and clocks in a folder, for the site: nothing is run and nothing is fetched."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path

from kvbench.files import read_file
from kvbench.leaderboard.asked import write_request
from kvbench.registry import find_task, list_entries
from kvbench.reproduce.claims import list_claims
from kvbench.reproduce.paper import Paper, list_papers
from kvbench.reproduce.plan import Missing, Plan, find_baseline, plan_claim
from kvbench.reproduce.shape import ShapeRecord
from kvbench.reproduce.speed import find_timed, judge_speed
from kvbench.reproduce.verdict import Judgement, judge
from kvbench.request import Request
from kvbench.results import Result
from kvbench.runs import Run, load_run

LOOSE = ("out", "device", "device_map", "trackers", "chunk", "kernels")
"""Options that make another run, and no other number."""
SEVERAL = ("method_settings", "task_settings", "generation")
UNRUN = Missing("run", "no run of it is here")


def list_judgements(
    folder: Path, papers: Mapping[str, Paper] | None = None, results: Iterable[tuple[Path, Result]] | None = None
) -> list[Judgement]:
    """Every number with its verdict, in the order of the files.

    Args:
        folder: with finished runs in it at any depth, and clocks in `bench/`.
        papers: by name; None: those that come with kvbench.
        results: of the runs that count, with their folders; None: all of the folder.
    """
    plans = _plan_all() if papers is None else _plan(papers)
    wanted = {request for plan in plans.values() for request in plan.requests}
    runs = _find_runs(_read_results(folder) if results is None else results, wanted)
    return [_judge(x, plans, runs, folder) for x in plans.values()]


@functools.cache
def _plan_all() -> dict[str, Plan]:
    return _plan(list_papers())


def _plan(papers: Mapping[str, Paper]) -> dict[str, Plan]:
    return {x.id: plan_claim(x) for name, paper in papers.items() for x in list_claims(name, paper)}


def read_findings(folder: Path) -> ShapeRecord | None:
    """The record of the findings that were put to the bundled models; None: there is none."""
    path = folder / "shape" / "findings.json"
    return read_file(path, ShapeRecord) if path.exists() else None


def _judge(plan: Plan, plans: Mapping[str, Plan], runs: Mapping[Request, Run], folder: Path) -> Judgement:
    if plan.claim.table.measure != "score":
        return judge_speed(plan, None if plan.missing else find_timed(plan, folder) or UNRUN)
    if not plan.missing and not any(x in runs for x in plan.requests):
        return Judgement(plan.claim, "not run", missing=(UNRUN,))
    baseline = find_baseline(plan.claim)
    return judge(plan, runs, None if baseline is None else plans[baseline.id])


def _find_runs(results: Iterable[tuple[Path, Result]], wanted: set[Request]) -> dict[Request, Run]:
    """The newest finished run of each request that has one."""
    names = {alias: x.name for x in list_entries("task") for alias in (x.name, *x.aliases)}
    by_kind: dict[tuple[str, str, str], list[Request]] = {}
    for request in wanted:
        by_kind.setdefault((request.method, names.get(request.task, request.task), request.model), []).append(request)
    found: dict[Request, tuple[str, Path]] = {}
    for path, result in results:
        made = write_request(result.spec)
        for request in by_kind.get((made.method, made.task, made.model), []):
            if _answers(made, request):
                found[request] = max(found.get(request, ("", path)), (result.environment.started, path))
    return {request: load_run(path) for request, (_, path) in found.items()}


def _read_results(folder: Path) -> Iterator[tuple[Path, Result]]:
    for path in sorted(folder.rglob("result.json")):
        yield path.parent, read_file(path, Result)


def _answers(made: Request, wanted: Request) -> bool:
    """Whether a run of this task is what was asked for; what was not has its default, or comes from the checkpoint."""
    for field in fields(Request):
        ours, theirs = getattr(made, field.name), getattr(wanted, field.name)
        if field.name in (*LOOSE, "task") or (field.name == "template" and theirs == "own"):
            continue  # a tokenizer or a task may have no template: the verdict names what that changes
        if field.name == "length" and theirs is None:
            theirs = find_task(wanted.task).default_length
        if field.name in SEVERAL:
            if not set(theirs) <= set(ours):
                return False
        elif theirs is not None and ours != theirs:
            return False
    return True
