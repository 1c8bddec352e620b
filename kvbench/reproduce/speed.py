"""Compares printed speeds with cells of `kvbench bench`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.errors import DeviceLostError, UserError
from kvbench.reproduce.claims import Claim
from kvbench.reproduce.paper import slug
from kvbench.reproduce.plan import ClaimPlan, Missing
from kvbench.reproduce.verdict import Judgment, Number, Verdict
from kvbench.runs.files import read_file

if TYPE_CHECKING:
    from kvbench.bench.records import Bench, BenchCell
    from kvbench.bench.run import BenchRequest

QUANTITY = {"kernel": "attention", "step": "step", "end-to-end": "answer"}
"""The quantity that is compared, by timing level."""
ENGINE = "the code and kernels are kvbench's, and the weights are random"


@dataclass(frozen=True)
class TimedClaim:
    """The cell of a number, and the job that it belongs to."""

    cell: BenchCell
    bench: Bench

    @property
    def regime(self) -> str:
        """Hardware and settings of the measurement."""
        cell, bench = self.cell, self.bench
        how = "" if cell.graph is None else ", as a CUDA graph" if cell.graph else ", launched from Python"
        return (
            f"{bench.environment.gpu or bench.environment.cpu}: {bench.model.id} in {bench.model.dtype}, "
            f"{cell.length:,} tokens x {cell.batch}, {cell.timing} timing{how}, {bench.kernels} kernels"
        )


def time_claim(plan: ClaimPlan, out: Path) -> TimedClaim | Missing:
    """Time the cell of a number, or read it if it was timed before. Every number has its own job and file.

    Raises:
        DeviceLostError: the GPU has become unusable by this process.
    """
    from kvbench.bench.run import run_bench

    try:
        found = find_timed(plan, out)
        if found is None:
            _job_file(plan, out).parent.mkdir(parents=True, exist_ok=True)
            found = _pick(plan, run_bench(_request(plan, out)))
    except DeviceLostError:
        raise
    except UserError as error:
        return Missing("run", str(error))
    return found


def find_timed(plan: ClaimPlan, out: Path) -> TimedClaim | Missing | None:
    """Read the cell of a number from an earlier job; None if there is none with the same options.

    Raises:
        UserError: the file is not a file of `kvbench bench`.
    """
    path = _job_file(plan, out)
    if plan.timing is None or not path.exists():
        return None
    from kvbench.bench.earlier import list_options  # with torch and transformers
    from kvbench.bench.records import Bench

    bench = read_file(path, Bench)
    same = bench.status == "done" and bench.command == list_options(_request(plan, out))
    return _pick(plan, bench) if same else None


def _request(plan: ClaimPlan, out: Path) -> BenchRequest:
    from kvbench.bench.run import BenchRequest

    timing = plan.timing
    assert timing is not None
    return BenchRequest(
        methods=(timing.method,), model=timing.model, lengths=(timing.length,), batches=(str(timing.batch),),
        timings=(timing.timing,), state="prefill" if timing.timing == "end-to-end" else "synthetic",
        budget=timing.budget, settings=timing.settings, out=_job_file(plan, out),
    )


def _job_file(plan: ClaimPlan, out: Path) -> Path:
    return out / "bench" / f"{slug(plan.claim.id)}.json"


def _pick(plan: ClaimPlan, bench: Bench) -> TimedClaim | Missing:
    """The method's cell, without those of the anchors."""
    assert plan.timing is not None
    cell = next((x for x in bench.cells if x.method.name == plan.timing.method), None)
    if cell is None or cell.outcome != "ok":
        return Missing("run", "nothing was timed" if cell is None else f"{cell.outcome}: {cell.reason}")
    return TimedClaim(cell, bench)


def judge_speed(plan: ClaimPlan, timed: TimedClaim | Missing | None) -> Judgment:
    """The verdict on a speed: at most `shape only` on another GPU than the paper's."""
    claim = plan.claim
    missing = (*plan.missing, *((timed,) if isinstance(timed, Missing) else ()))
    if missing or timed is None or isinstance(timed, Missing):
        return Judgment(claim, "not run", missing=missing or (Missing("run", "nothing was timed"),))
    ours = _number(claim, timed.cell)
    if ours is None:
        return Judgment(claim, "not run", missing=(Missing("run", "it was not timed together with the full cache"),))
    verdict: Verdict = "shape only"
    if _same_gpu(claim, timed.bench):
        verdict = "partly" if ours.holds(claim.value, claim.rounding) else "not reproduced"
    return Judgment(claim, verdict, ours, differs=(ENGINE, *claim.protocol.differs), regime=timed.regime)


def _number(claim: Claim, cell: BenchCell) -> Number | None:
    """The measured time in the unit of the table."""
    time = cell.times[QUANTITY[cell.timing]]
    if claim.table.measure == "times":
        found = time.speedups.get("full") or time.speedups.get("none")
        return None if found is None else Number(found.median, (found.low, found.high))
    seconds = time.seconds
    if claim.table.measure == "ms":
        return Number(1e3 * seconds.median, (1e3 * seconds.low, 1e3 * seconds.high))
    if cell.tokens_per_s is None:
        return None
    seconds = cell.times["step" if cell.timing == "step" else "token"].seconds  # the time that the rate is of
    rate = cell.tokens_per_s * seconds.median
    return Number(cell.tokens_per_s, (rate / seconds.high, rate / seconds.low))


def _same_gpu(claim: Claim, bench: Bench) -> bool:
    return claim.table.gpu is not None and claim.table.gpu in (bench.environment.gpu or "")
