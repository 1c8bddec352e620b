"""The parts of journal lines that are equal for all models: scores, facts, and turns that failed."""

from __future__ import annotations

import math
from collections.abc import Mapping

from kvbench.errors import DeviceLostError, UserError, describe_error
from kvbench.machine import is_device_lost
from kvbench.runs.job import Job
from kvbench.runs.journal import Line
from kvbench.task import Example


class SampleFailedError(Exception):
    """A turn of a sample raised. The last of `lines` has the error."""

    def __init__(self, lines: list[Line]) -> None:
        super().__init__(lines[-1].error)
        self.lines = lines


def fail(
    example: Example, index: int, turn: int, error: Exception, prompt_hash: str, started: str, seconds: float
) -> Line:
    """The journal line of a turn that raised."""
    message = str(error).splitlines()[0] if isinstance(error, UserError) else describe_error(error)
    return Line(
        sample=example.id, index=index, turn=turn, turns=len(example.turns), prompt_hash=prompt_hash, prediction=None,
        ids=(), question=example.turns[turn].question, references=example.turns[turn].references, score=None, scores={},
        tokens=None, stop_reason=None,
        times=None, bytes=None, effect=None, agreement=None, facts=turn_facts(example, turn), started=started,
        seconds=seconds, error=message,
    )


def stop_if_lost(job: Job, samples: str, error: Exception) -> None:
    """Stop the run, and leave the samples to a later one, if their error made the GPU unusable (`DeviceLostError`)."""
    if is_device_lost():
        raise DeviceLostError(
            f"{samples} of {job.spec.method.name} raised {type(error).__name__}, and this process cannot use the GPU "
            f"any more. Finished samples are saved in {job.folder}; the same command continues with the others."
        ) from error


def turn_facts(example: Example, turn: int) -> dict[str, object]:
    """The facts of a turn, with those of the example on its first turn."""
    return {**(example.facts if turn == 0 else {}), **example.turns[turn].facts}


def score_answer(job: Job, example: Example, turn: int, text: str, found: Mapping[str, object]) -> dict[str, float]:
    """Score an answer with every scorer that applies to it. Empty for models with random weights.

    Raises:
        UserError: a score is not finite.
    """
    asked = example.turns[turn]
    facts = {**example.facts, **asked.facts, **found}
    scores = {} if job.model.random else {x.id: x(text, asked.references, facts) for x in job.task.scorers}
    for name, score in scores.items():
        if score is not None and not math.isfinite(score):
            raise UserError(f"scorer {name} of {job.spec.task.name} gave {score}, which is not a finite number.")
    return {name: score for name, score in scores.items() if score is not None}
