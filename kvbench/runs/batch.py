"""Samples whose answers are decoded together: `--batch`."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import zip_longest
from typing import TYPE_CHECKING

import torch

from kvbench.diffusion.sample import fill_sample
from kvbench.engine.passes import finish, merge
from kvbench.engine.recording import InexactPrefillError
from kvbench.errors import UndeclaredError, UserError
from kvbench.hf import attached
from kvbench.log import say, say_progress
from kvbench.machine import GB, ram_bytes
from kvbench.runs.journal import BatchLine, Line
from kvbench.runs.lines import SampleFailedError, stop_if_lost
from kvbench.runs.sample import converse, run_sample
from kvbench.task import Encoded, Example, Mode, prompt_tokens

if TYPE_CHECKING:
    from kvbench.budget import Shape
    from kvbench.engine.shared import SharedPrefill
    from kvbench.hf import Model
    from kvbench.method import Method
    from kvbench.runs.job import Job
    from kvbench.runs.spec import RunSpec

MOST_AUTO = 64
"""The largest batch that `auto` chooses."""
SHARE_OF_MEMORY = 0.5
"""The share of the memory left by the weights that the predicted caches of a batch may take."""
Sample = tuple[int, Example, Encoded]


def describe_alone(method: Method) -> str | None:
    """Why the answers of a batch are decoded one at a time; None: they are decoded together."""
    return f"{method.card.name} generates answers in its own way" if method.generates_alone else None


def answers_apart(spec: RunSpec) -> bool:
    """Whether no question follows the method's own answer to another, so that a context's answers can run together."""
    return spec.history == "reference"


def divide_batch(batch: int, spec: RunSpec) -> tuple[int, int]:
    """Contexts at a time, and questions about each: a batch takes the questions of a context first."""
    questions = min(batch, spec.turns) if answers_apart(spec) else 1
    return batch // questions, questions


def count_contexts(job: Job, shared: SharedPrefill | None, first: Encoded) -> int:
    """How many samples run together; with shared prefills as many as are in memory at the same time.

    first: of these samples. If it is too long to be shared, there is no recording for which to run fewer.
    """
    contexts = divide_batch(job.spec.batch, job.spec)[0]
    tokens = len(first.context) if job.spec.visibility == "hidden" else prompt_tokens(first)
    if contexts > 1 and shared is not None and shared.fits(job.model, tokens):
        return shared.keep(contexts, job.model, job.spec.task.length)
    return contexts


def run_batch(
    job: Job, group: Sequence[Sample], shared: SharedPrefill | None, *, compare: bool
) -> list[tuple[list[Line], str | None]]:
    """Run samples together. Returns the lines of each, without times, and the traceback of its failure.

    If one raises, each is run alone, so that it fails alone. compare: answer the first question alone, too, and count
    the tokens that differ.
    """
    begun, started = time.perf_counter(), datetime.now(UTC).isoformat(timespec="seconds")
    alone = describe_alone(job.method)
    found = None if alone is not None else _run_together(job, group, shared)
    if found is None:
        size, alone = 1, alone or "a batch raised an error"
    else:
        questions = divide_batch(job.spec.batch, job.spec)[1]
        size = sum(min(questions, len(example.turns)) for _, example, _ in group)  # a record may have fewer than asked
    done = [run_one(job, x, shared) for x in group] if found is None else [(lines, None) for lines in found]
    tokens = different = None
    if compare and size > 1:
        lines, failure = run_one(job, cut_to_first(group[0]), shared, agreement=False)
        if failure is None:
            tokens, different = count_different(done[0][0][:1], lines)
        else:
            say(f"sample {group[0][0]} alone failed, so the batch is not compared with it: {lines[-1].error}")
    update: dict[str, object] = {"times": None, "batch": BatchLine(size=size, alone=alone)}
    if found is not None:
        # Shares of the batch's time, from its start on: a sample that starts late would seem to end after the batch.
        seconds = (time.perf_counter() - begun) / sum(len(lines) for lines, _ in done)
        update |= {"started": started, "seconds": seconds}
    marked = [([x.model_copy(update=update) for x in lines], failure) for lines, failure in done]
    if tokens is not None:
        compared = BatchLine(size=size, tokens=tokens, different=different)
        marked[0][0][0] = marked[0][0][0].model_copy(update={"batch": compared})
    return marked


def _run_together(job: Job, group: Sequence[Sample], shared: SharedPrefill | None) -> list[list[Line]] | None:
    questions = divide_batch(job.spec.batch, job.spec)[1]
    try:
        with attached(job.model.module):  # until the last session is closed, in whatever order
            parts = (converse(job, *x, shared, width=questions) for x in group)
            told = say_progress(parts, lambda number: f"prefilled {number} of {len(group)} contexts")
            return finish(merge(told, len(group)))
    except InexactPrefillError as error:
        assert shared is not None
        shared.refuse(job.spec, str(error))
        return _run_together(job, group, None)
    except Exception as error:  # noqa: BLE001  # of a method, on one of the samples
        numbers = ", ".join(str(x[0]) for x in group)
        stop_if_lost(job, f"samples {numbers}", error)
        say(f"a batch of samples {numbers} raised {type(error).__name__}: they are run one at a time.")
    gc.collect()
    return None


def run_one(
    job: Job, sample: Sample, shared: SharedPrefill | None = None, *, agreement: bool = True
) -> tuple[list[Line], str | None]:
    """Run one sample, one question at a time. Returns its lines and the traceback of its failure."""
    try:
        if job.model.masking is None:
            return run_sample(job, *sample, shared, agreement=agreement), None
        return fill_sample(job, *sample), None
    except SampleFailedError as failure:
        lines, trace = failure.lines, "".join(traceback.format_exception(failure.__cause__))
    gc.collect()  # the exception is gone, whose frames would keep the sample's tensors next to those of the next one
    return lines, trace


def cut_to_first(sample: Sample) -> Sample:
    """A sample with its first question only."""
    index, example, encoded = sample
    return index, replace(example, turns=example.turns[:1]), replace(encoded, turns=encoded.turns[:1])


def count_different(ours: Sequence[Line], theirs: Sequence[Line]) -> tuple[int, int]:
    """Tokens of two sets of answers, and how many of them differ; a token that only one has differs."""
    pairs = [pair for a, b in zip_longest(ours, theirs) for pair in zip_longest(a.ids if a else (), b.ids if b else ())]
    return len(pairs), sum(x != y for x, y in pairs)


# The size of a batch


def resolve_batch(asked: int | None, job: Job, fitted: Method, shape: Shape, capacity: int) -> int:
    """The number of answers that are decoded together. asked: None chooses it by the predicted memory.

    Raises:
        UserError: the caches of that many answers would not fit.
    """
    spec = job.spec
    if job.model.masking is not None:
        if asked == 1:
            return 1
        raise UserError("on a diffusion model every answer runs alone, and no batch is possible. Leave --batch out.")
    weights = sum(x.nbytes for x in job.model.module.parameters() if x.device.type == spec.device)
    limit = max(0.0, SHARE_OF_MEMORY * (_total_bytes(job.model) - weights))
    most = 1
    answers = spec.samples * (spec.turns if answers_apart(spec) else 1)
    largest = min(MOST_AUTO, answers) if asked is None else asked
    while most < largest and predict_bytes(2 * most, spec, fitted, shape, capacity) <= limit:
        most *= 2
    if asked is None:
        return min(most, largest)
    need = predict_bytes(asked, spec, fitted, shape, capacity)
    if asked > 1 and need > limit:
        contexts, questions = divide_batch(asked, spec)
        raise UserError(
            f"batch {asked} needs about {need / GB:.2f} GB for {contexts} contexts with {questions} answers each, and "
            f"{limit / GB:.2f} GB are allowed ({SHARE_OF_MEMORY:.0%} of {spec.device} memory left by the weights). "
            f"Use --batch {most} or less, or --batch auto."
        )
    return asked


def predict_bytes(batch: int, spec: RunSpec, fitted: Method, shape: Shape, capacity: int) -> int:
    """Bytes of a batch's caches: two full caches during prefill and comparison, and what is held of each context.

    An answer has its own entries after the context, and a copy of them, and of what its store overwrites.
    """
    try:
        stored = fitted.declared_bytes(shape)
    except UndeclaredError:
        stored = shape.full_bytes
    later = (capacity - shape.length) * shape.full_bytes // shape.length
    stores = [fitted.layer(x) for x in range(len(shape.layers))]
    copied = stored if any(x.bounded or x.entry_state for x in stores) else fitted.copied_bytes(shape)
    contexts, questions = divide_batch(batch, spec)
    forks = spec.turns if spec.mode is Mode.MULTI_TURN and questions > 1 else questions  # one for each turn (ask_ahead)
    full = 2 * shape.full_bytes + fitted.running_bytes(shape)
    return full + contexts * (stored + later + forks * (2 * later + copied))


def _total_bytes(model: Model) -> int:
    """Bytes of the machine's memory or, on GPUs, of all that hold a part of the model."""
    if model.device.type == "cpu":
        return ram_bytes()
    places = [str(model.device)] if model.device_map is None else model.device_map.values()
    gpus = {torch.device(x).index or 0 for x in places if x.startswith("cuda")}
    return sum(int(torch.cuda.get_device_properties(x).total_memory) for x in gpus)
