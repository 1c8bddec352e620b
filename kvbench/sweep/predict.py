"""Predicts the time of a sweep from one timed sample of each kind with the full cache."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvbench.diffusion.sample import Uncached, fill_sample
from kvbench.errors import UserError
from kvbench.kernels.choice import using
from kvbench.registry import find_method
from kvbench.runs.examples import make_examples
from kvbench.runs.files import finished_samples, has_journal, read_lines
from kvbench.runs.job import Job
from kvbench.runs.lines import SampleFailedError
from kvbench.runs.prepare import prepare
from kvbench.runs.sample import run_sample
from kvbench.sweep.cell import ModelCache, SweepCell


@dataclass(frozen=True)
class CellPrediction:
    """The missing samples of a cell and their predicted time."""

    cell: SweepCell
    folder: Path | None
    missing: int
    """Samples to run."""
    seconds: float | None
    """Predicted time of the missing samples; None if the cell cannot run, or the full cache cannot on its contexts."""
    error: str | None = None


def predict(cells: Sequence[SweepCell]) -> Iterator[CellPrediction]:
    """Prepare every cell, and time a sample of each kind; nothing is written."""
    cache = ModelCache()
    timed: dict[str, float] = {}
    for cell in cells:
        try:
            job = prepare(cell.request, cache.take(cell))
        except UserError as error:
            yield CellPrediction(cell, None, cell.request.samples, None, str(error))
            continue
        cache.put(cell, job.loaded)
        missing = _missing(job)
        seconds = 0.0
        if missing:
            kind = _kind(job)
            try:
                if kind not in timed:
                    timed[kind] = _time(job, warm=bool(timed))
            except SampleFailedError as error:
                reason = f"a sample with the full cache failed: {error}"
                yield CellPrediction(cell, job.folder, missing, None, reason)
                continue
            seconds = timed[kind] * missing
        yield CellPrediction(cell, job.folder, missing, seconds)


def _missing(job: Job) -> int:
    if (job.folder / "result.json").exists():
        return 0
    path = job.folder / "samples.jsonl"
    done = finished_samples(read_lines(path)) if has_journal(path) else set()
    return len(set(range(job.spec.samples)) - done)


def _kind(job: Job) -> str:
    """A key that is equal for cells with the same predicted time per sample."""
    return job.spec.model_dump_json(exclude={
        "method": True, "sources": {"method", "kernels"}, "budget": True, "seed": True, "samples": True,
        "recompress": True, "weights_sha256": True, "bound": True,
    })


def _time(job: Job, *, warm: bool) -> float:
    """Seconds of one sample; a first untimed run warms up, unless one has been timed before."""
    run, method = (run_sample, find_method("full")()) if job.model.masking is None else (fill_sample, Uncached())
    baseline = replace(job, method=method, budget=None)
    sample = next(make_examples(job, [0]))
    with using(job.spec.kernels):
        if not warm:
            run(baseline, *sample)
        before = time.perf_counter()
        run(baseline, *sample)
        return time.perf_counter() - before
