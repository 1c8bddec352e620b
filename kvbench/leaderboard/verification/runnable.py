"""A submission as a job that can run here: the method, the task and the model of its names, at its settings.

What runs is what is here under these names, never code of the submitter's.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from kvbench.diffusion.sample import fill_sample
from kvbench.errors import UserError
from kvbench.hf import find_copy, load_model
from kvbench.kernels.choice import using
from kvbench.leaderboard.verification.account import differences
from kvbench.leaderboard.verification.lookup import StrangerError, find_known_method
from kvbench.leaderboard.verification.outcome import RefusedError, blaming, show
from kvbench.runs.command import write_request
from kvbench.runs.examples import make_examples
from kvbench.runs.job import Job, prepare
from kvbench.runs.journal import Line
from kvbench.runs.sample import SampleFailedError, run_sample
from kvbench.runs.spec import RunSpec

if TYPE_CHECKING:
    from kvbench.hf import Model
    from kvbench.runs.runner import Progress

MAY_DIFFER = ("versions.", "sources.", "device", "suite")
"""Parts of a spec that another machine and a later kvbench have others of; all the rest must be the same."""


def load_again(spec: RunSpec) -> Model:
    """The run's model, from what is here, in its element type.

    Raises:
        StrangerError: it is not here, or not whole.
    """
    folder = find_copy(spec.model.id, spec.model.revision)
    if folder is None:
        raise StrangerError(f"model {show(spec.model.id)} is not on this machine")
    name = f"random:{folder}" if spec.model.id.startswith("random:") else str(folder)
    device = "cuda" if spec.device == "cuda" and torch.cuda.is_available() else "cpu"
    try:
        return replace(load_model(name, device, spec.model.dtype), id=spec.model.id)
    except UserError as error:
        raise StrangerError(str(error)) from error


def prepare_again(spec: RunSpec, model: Model, seed: int | None = None) -> tuple[Job, tuple[str, ...]]:
    """The run as a job, under its own seed or another, and what of its spec is not the same here.

    Raises:
        StrangerError: its method is not here or reads a file of the submitter's, or this machine lacks what it needs.
        RefusedError: more differs than another machine explains.
    """
    find_known_method(spec)
    with blaming("rerun", "it cannot be run again"):
        try:
            job = prepare(write_request(spec if seed is None else spec.model_copy(update={"seed": seed})), model)
        except UserError as error:
            raise StrangerError(str(error)) from error
    differs = []
    documents = [x.model_dump(mode="json", exclude={"seed"}) for x in (spec, job.spec)]
    for name, said, found in differences(documents[0], documents[1]):
        if not name.startswith(MAY_DIFFER) and not (said is None and name.startswith("method.settings.")):
            raise RefusedError("rerun", f"its {name} is {show(said)}, here it is {show(found)}")
        differs.append(name)
    return job, tuple(differs)


def run_again(job: Job, wanted: Collection[int], progress: Progress) -> list[Line]:
    """The lines of these samples, in their order."""
    lines: list[Line] = []
    for done, (index, example, encoded) in enumerate(make_examples(job, wanted), 1):
        with using(job.spec.kernels):
            try:
                lines += (run_sample if job.model.masking is None else fill_sample)(job, index, example, encoded)
            except SampleFailedError as failure:
                lines += failure.lines
        progress.advance(done)
    return lines
