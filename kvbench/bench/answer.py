"""What the user's clock times: prompts and answers as they are run, Python and all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from kvbench.bench.job import OUT_OF_TIME, Job
from kvbench.bench.outcome import Failure, attempt
from kvbench.bench.records import DeviceMemory
from kvbench.bench.state import Setting, count_bytes, open_stand
from kvbench.diffusion.policy import Policy, denoise
from kvbench.diffusion.sampling import Sampling
from kvbench.engine.timing import now
from kvbench.kernels.choice import using
from kvbench.log import say
from kvbench.method import Method
from kvbench.runs.journal import CacheBytes

STEPS = 128
"""Decode steps of an answer; no token ends it."""
BLOCK = 32
"""Tokens of a diffusion model's block; it takes a pass for every token."""


@dataclass
class Answers:
    """Seconds of every round by quantity, and what was held in the last one."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    memory: CacheBytes | None = None
    device_memory: DeviceMemory | None = None
    kernels: dict[str, str] = field(default_factory=dict)

    def add(self, **seconds: float) -> None:
        """A round."""
        for name, value in seconds.items():
            self.seconds.setdefault(name, []).append(value)

    def forget(self) -> None:
        """What was timed until now was the warm-up."""
        self.seconds = {}


def time_answers(
    job: Job, methods: Mapping[str, Method], length: int, batches: Mapping[str, int]
) -> dict[str, Answers | Failure]:
    """Each method's answers, in turn with the others' from round to round, after one round that does not count.

    When time is up, no further round is begun.
    """
    found: dict[str, Answers | Failure] = {name: Answers() for name in methods}
    run = _denoise if job.setting.model.kind == "diffusion" else _answer
    names = list(methods)
    for number in range(job.rounds["user"] + 1):
        if job.late:
            break
        say(f"user, {length} tokens: round {number} of {job.rounds['user']}{'' if number else ', to warm up'}")
        first = number % len(names)
        for name in names[first:] + names[:first]:
            answers = found[name]
            if isinstance(answers, Failure):
                continue
            with using(job.kernels) as ran:
                failure = attempt(partial(run, job.setting, methods[name], length, batches[name], answers))
            answers.kernels = ran
            if failure is not None:
                found[name] = failure
            elif number == 0:
                answers.forget()
    return {
        name: Failure("skipped", OUT_OF_TIME) if isinstance(x, Answers) and not x.seconds else x
        for name, x in found.items()
    }


def _answer(setting: Setting, method: Method, length: int, batch: int, answers: Answers) -> None:
    device = setting.model.device
    with open_stand(setting, method, length, batch) as stand:
        assert stand.prefill_s is not None, "the prompt was run"
        started = now(device)
        stand.session.answer(STEPS + 1, stop=frozenset())  # the last token is never run
        seconds = now(device) - started
        answers.add(
            prefill=stand.prefill_s, compression=stand.session.compress_seconds, token=seconds / STEPS,
            answer=stand.prefill_s + seconds,
        )
        answers.memory, answers.device_memory = count_bytes(stand.session), stand.device_memory


def _denoise(setting: Setting, method: Method, length: int, batch: int, answers: Answers) -> None:
    device = setting.model.device
    prompt, sampling = setting.tokens(batch, length, seed=1), Sampling(steps=STEPS, block=BLOCK)
    started = now(device)
    made = denoise(setting.model, cast("Policy", method), prompt, STEPS, sampling)
    seconds = now(device) - started
    answers.add(token=seconds / STEPS, answer=seconds)
    shape = setting.model.shape(made.total)
    answers.memory = CacheBytes(
        full_bytes=batch * shape.full_bytes, stored_bytes=made.peak_bytes, spare_bytes=0, host_bytes=0,
        end_bytes=made.peak_bytes, peak_bytes=made.peak_bytes,
        read_bytes_per_step=round(made.read_bytes / made.passes),
    )
