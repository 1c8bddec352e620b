"""Prepares a submission for a rerun with the installed method, task and model of the same names.

No code of the submission is run.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from kvbench.errors import UserError
from kvbench.hf import find_copy, load_model
from kvbench.kernels.choice import using
from kvbench.leaderboard.submission.outcome import RefusedError, quote, refusing_errors
from kvbench.leaderboard.verification.lookup import UnverifiableError, find_known_method, find_known_task
from kvbench.leaderboard.verification.result import allow_rounding, differences
from kvbench.models.sources import RANDOM
from kvbench.runs.batch import run_one
from kvbench.runs.command import write_request
from kvbench.runs.examples import make_examples
from kvbench.runs.job import Job
from kvbench.runs.journal import Line
from kvbench.runs.prepare import prepare
from kvbench.runs.spec import RunSpec

if TYPE_CHECKING:
    from kvbench.hf import Model
    from kvbench.runs.progress import Progress

MAY_DIFFER = ("versions.", "sources.", "device", "suite")
"""Parts of a spec that may differ on another machine or a later kvbench; all others must be equal."""


def load_rerun_model(spec: RunSpec) -> Model:
    """Load the run's model from this machine, in its element type.

    Raises:
        UnverifiableError: it is missing or incomplete.
    """
    folder = find_copy(spec.model.id, spec.model.revision)
    if folder is None:
        raise UnverifiableError(f"model {quote(spec.model.id)} is not on this machine")
    name = f"{RANDOM}{folder}" if spec.model.random else str(folder)
    device = "cuda" if spec.device == "cuda" and torch.cuda.is_available() else "cpu"
    try:
        return replace(load_model(name, device, spec.model.dtype), id=spec.model.id)
    except UserError as error:
        raise UnverifiableError(str(error)) from error


def prepare_rerun(spec: RunSpec, model: Model) -> tuple[Job, tuple[str, ...]]:
    """Prepare the run; also returns the fields of its spec that differ here.

    Raises:
        UnverifiableError: the method or the task is not installed, a setting is a path, or this machine cannot run it.
        RefusedError: a field differs that must be equal.
    """
    find_known_method(spec)
    find_known_task(spec)
    try:
        with refusing_errors("rerun", "it cannot be rerun", but=UserError):
            job = prepare(write_request(spec), model)
    except UserError as error:
        raise UnverifiableError(str(error)) from error
    differs = []
    documents = [x.model_dump(mode="json", exclude={"bound"}) for x in (spec, job.spec)]  # as its result resolves it
    for name, stated, found in differences(documents[0], documents[1], allow_rounding):
        if not name.startswith(MAY_DIFFER) and not (stated is None and name.startswith("method.settings.")):
            raise RefusedError("rerun", f"its {name} is {quote(stated)}, here it is {quote(found)}")
        differs.append(name)
    return job, tuple(differs)


def rerun_samples(job: Job, wanted: Collection[int], progress: Progress) -> list[Line]:
    """Run these samples and return their journal lines in order."""
    lines: list[Line] = []
    progress(0)
    for done, sample in enumerate(make_examples(job, wanted), 1):
        with using(job.spec.kernels):
            lines += run_one(job, sample)[0]
        progress(done)
    return lines
