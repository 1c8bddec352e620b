"""How long a grid will take: one sample of each kind, timed with the dense cache, times what is missing."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from kvbench.budget import BudgetKind
from kvbench.diffusion.sample import Uncached, fill_sample
from kvbench.errors import UserError
from kvbench.method import Card, Method
from kvbench.runs.examples import make_examples
from kvbench.runs.files import finished_samples, read_lines
from kvbench.runs.job import Job, prepare
from kvbench.runs.sample import run_sample
from kvbench.sweep.cell import ModelCache, SweepCell


@dataclass(frozen=True)
class Dense(Method):
    """Keeps every row; what a time is measured with."""

    card: ClassVar[Card] = Card(
        name="dense", title="Dense cache", idea="Every row stays. For predictions.", arxiv=None, year=None,
        family="baseline", stages=(), budget=BudgetKind.NONE, heads="independent", upstream=None,
    )


@dataclass(frozen=True)
class CellPrediction:
    """What a cell still has to do."""

    cell: SweepCell
    folder: Path | None
    missing: int
    """Samples."""
    seconds: float | None
    """Of all of them, predicted; None: it cannot run."""
    error: str | None = None


def predict(cells: Sequence[SweepCell]) -> Iterator[CellPrediction]:
    """Prepare every cell, which says whether it can run, and time a sample of each kind; nothing is written."""
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
            if kind not in timed:
                timed[kind] = _time(job, warm=bool(timed))
            seconds = timed[kind] * missing
        yield CellPrediction(cell, job.folder, missing, seconds)


def _missing(job: Job) -> int:
    if (job.folder / "result.json").exists():
        return 0
    path = job.folder / "samples.jsonl"
    done = finished_samples(read_lines(path)) if path.exists() else set()
    return len(set(range(job.spec.samples)) - done)


def _kind(job: Job) -> str:
    """Cells that agree in this take the same time, as far as it is predicted."""
    return job.spec.model_dump_json(exclude={
        "method": True, "sources": {"method", "kernels"}, "budget": True, "seed": True, "samples": True,
        "recompress": True,
    })


def _time(job: Job, *, warm: bool) -> float:
    """Seconds of one sample; the first of all is run once before, because it pays for what is set up once."""
    run, method = (run_sample, Dense()) if job.model.masking is None else (fill_sample, Uncached())
    dense = replace(job, method=method, budget=None)
    sample = next(make_examples(job, [0]))
    if not warm:
        run(dense, *sample)
    before = time.perf_counter()
    run(dense, *sample)
    return time.perf_counter() - before
