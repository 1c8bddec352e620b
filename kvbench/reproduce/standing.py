"""Judges every claim by finished runs, and by timings in a folder, for the leaderboard site. Starts nothing."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path

from kvbench import machine
from kvbench.analysis.load import FinishedRun
from kvbench.errors import UserError
from kvbench.models.sources import result_id
from kvbench.registry import list_entries
from kvbench.reproduce.claims import list_claims
from kvbench.reproduce.memory import judge_bytes
from kvbench.reproduce.paper import Paper, list_papers
from kvbench.reproduce.plan import ClaimPlan, Missing, find_baseline, plan_claim
from kvbench.reproduce.speed import find_timed, judge_speed
from kvbench.reproduce.verdict import Judgment, judge
from kvbench.runs.options import Request
from kvbench.runs.protocol import Protocol
from kvbench.runs.request import check
from kvbench.runs.spec import DenoisingSpec, RunSpec
from kvbench.settings import jsonable_settings

UNRUN = Missing("run", "there is no run of it in this folder")


def list_judgments(
    folder: Path, finished: Iterable[FinishedRun], papers: Mapping[str, Paper] | None = None
) -> list[Judgment]:
    """Every number with its verdict, in the order of the files.

    Args:
        folder: has timings in `bench/`.
        finished: runs; of several with one request, the last counts.
        papers: by name; None: the bundled ones.
    """
    plans = _plan_all() if papers is None else _plan(papers)
    wanted = {request for plan in plans.values() for request in plan.requests}
    runs = _find_runs(finished, wanted)
    return [_judge(x, plans, runs, folder) for x in plans.values()]


@functools.cache
def _plan_all() -> dict[str, ClaimPlan]:
    return _plan(list_papers())


def _plan(papers: Mapping[str, Paper]) -> dict[str, ClaimPlan]:
    return {x.id: plan_claim(x) for name, paper in papers.items() for x in list_claims(name, paper)}


def _judge(
    plan: ClaimPlan, plans: Mapping[str, ClaimPlan], runs: Mapping[Request, FinishedRun], folder: Path
) -> Judgment:
    if plan.prediction is not None:
        return judge_bytes(plan.claim, plan.prediction)
    if plan.claim.table.measure != "score":
        try:
            return judge_speed(plan, None if plan.missing else find_timed(plan, folder) or UNRUN)
        except UserError as error:  # a damaged file hides no other verdict
            return Judgment(plan.claim, "not run", missing=(Missing("run", str(error)),))
    if not plan.missing and not any(x in runs for x in plan.requests):
        return Judgment(plan.claim, "not run", missing=(UNRUN,))
    baseline = find_baseline(plan.claim)
    return judge(plan, runs, None if baseline is None else plans[baseline.id])


def _find_runs(finished: Iterable[FinishedRun], wanted: set[Request]) -> dict[Request, FinishedRun]:
    """The last run of each request that has one."""
    names = {alias: x.name for x in list_entries("task") for alias in x.names}
    by_kind: dict[tuple[str, str, str], list[Request]] = {}
    for request in wanted:
        key = request.method, names.get(request.task, request.task), result_id(request.model)
        by_kind.setdefault(key, []).append(request)
    found: dict[Request, FinishedRun] = {}
    for run in finished:
        spec = run.result.spec
        for request in by_kind.get((spec.method.name, spec.task.name, spec.model.id), []):
            if _answers(spec, request):
                found[request] = run
    return found


def _answers(spec: RunSpec, wanted: Request) -> bool:
    """True if a run matches a request, with defaults for the options that the request leaves out.

    Options that do not change numbers are ignored: device, chunk, kernels. A chat template that the tokenizer or task
    does not have is ignored too; the verdict names the deviation. A checkpoint that is not on this machine counts as 16
    bits, like every checkpoint with a printed number.
    """
    try:
        plan, allowed = check(wanted), _allowed_dtypes(wanted, spec)
    except UserError:  # kvbench refuses this request now, so no earlier run can answer it
        return False
    generation, filling = plan.generation, spec.generation.denoising
    if filling is not None:  # the default number of tokens per step belongs to the model
        asked = generation.denoising or DenoisingSpec()
        generation = generation.model_copy(update={
            "decoding": "denoising", "denoising": asked.model_copy(update={"tokens_per_step": filling.tokens_per_step}),
        })
    protocol = Protocol(**{name: getattr(spec, name) for name in Protocol.model_fields})
    bare = plan.template == "none" and spec.task.chat_template_sha is not None
    own = spec.method.code is not None or spec.task.code is not None  # a file of the user's, whatever its name
    if own or bare or spec.model.dtype not in allowed:
        return False
    return (
        spec.method.settings, spec.task.settings, spec.task.length, spec.task.scorer, spec.budget, spec.generation,
        protocol, spec.split, spec.seed, spec.samples, spec.suite,
    ) == (
        jsonable_settings(plan.method), jsonable_settings(plan.task), plan.length, plan.scorer.id,
        None if plan.budget is None else str(plan.budget), generation,
        plan.protocol, wanted.split, wanted.seed, wanted.samples, wanted.suite,
    )


def _allowed_dtypes(wanted: Request, spec: RunSpec) -> tuple[str, ...]:
    """Element types of a run that the request asks for; `auto` is float32 on a CPU without bfloat16 units."""
    if wanted.dtype not in (None, "auto"):
        return (wanted.dtype,)
    own = _own_dtype(spec.model.id, spec.model.revision)
    found = ("bfloat16", "float16") if own is None else (own,)
    return (*found, "float32") if spec.device == "cpu" and not machine.has_bfloat16_units() else found


@functools.cache
def _own_dtype(name: str, revision: str | None) -> str | None:
    """Data type of a checkpoint; None if it is not on this machine."""
    from kvbench.hf import find_copy
    from kvbench.hf.config import own_dtype, read_config

    folder = Path(name) if Path(name).is_dir() else find_copy(name, revision)
    if folder is None:
        return None
    return str(own_dtype(read_config(name, folder), folder)).removeprefix("torch.")
