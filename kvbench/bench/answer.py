"""End-to-end timing: whole prompts and answers as a user runs them, including Python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from kvbench.bench.job import OUT_OF_TIME, BenchJob
from kvbench.bench.outcome import Failure, attempt
from kvbench.bench.records import DeviceMemory
from kvbench.bench.state import Setting, open_context
from kvbench.diffusion.policy import Policy, denoise
from kvbench.diffusion.sample import count_bytes
from kvbench.diffusion.sampling import Sampling
from kvbench.engine.timing import now, rotate
from kvbench.kernels.choice import using
from kvbench.log import say
from kvbench.method import Method
from kvbench.runs.journal import CacheBytes

STEPS = 128
"""Decode steps of an answer, which no stop token ends; other timing levels time at least as many steps."""
BLOCK = 32
"""Block length of a diffusion model's answer, which is made with one denoising step per token."""


@dataclass
class AnswerTimes:
    """Seconds of every round by quantity, and the memory of the last round."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    memory: CacheBytes | None = None
    device_memory: DeviceMemory | None = None
    kernels: dict[str, str] = field(default_factory=dict)

    def add(self, **seconds: float) -> None:
        """Add one round."""
        for name, value in seconds.items():
            self.seconds.setdefault(name, []).append(value)

    @property
    def rounds(self) -> int:
        """Rounds so far."""
        return min(map(len, self.seconds.values()), default=0)

    def keep(self, rounds: int) -> None:
        """Drop all rounds but the first ones: the warm-up, or those that other methods lack."""
        self.seconds = {name: x[:rounds] for name, x in self.seconds.items()} if rounds else {}


def time_answers(
    job: BenchJob, methods: Mapping[str, Method], length: int, batches: Mapping[str, int]
) -> dict[str, AnswerTimes | Failure]:
    """Time answers of all methods in turn, round by round, after one warm-up round.

    No round is started after the deadline.
    """
    found: dict[str, AnswerTimes | Failure] = {name: AnswerTimes() for name in methods}
    run = _denoise if job.setting.model.kind == "diffusion" else _answer
    names = list(methods)
    rounds = job.rounds["end-to-end"]
    for number in range(rounds + 1):
        if job.late or any(isinstance(x, Failure) and x.device_lost for x in found.values()):
            break
        say(f"end-to-end, {length} tokens: {f'round {number} of {rounds}' if number else 'warm-up round'}")
        for name in rotate(names, number):
            answers = found[name]
            if isinstance(answers, Failure):
                continue
            with using(job.kernels) as ran:
                failure = attempt(partial(run, job.setting, methods[name], length, batches[name], answers))
            answers.kernels = ran
            if failure is not None:
                found[name] = failure
                if failure.device_lost:
                    break
            elif number == 0:
                answers.keep(0)
    timed = [x for x in found.values() if isinstance(x, AnswerTimes)]
    for answers in timed:  # a lost device may have ended the last round before some of them
        answers.keep(min(x.rounds for x in timed))
    return {
        name: Failure("skipped", OUT_OF_TIME) if isinstance(x, AnswerTimes) and not x.seconds else x
        for name, x in found.items()
    }


def _answer(setting: Setting, method: Method, length: int, batch: int, answers: AnswerTimes) -> None:
    device = setting.model.device
    with open_context(setting, method, length, batch) as context:
        assert context.prefill_s is not None, "end-to-end timing runs the prompt"
        started = now(device)
        context.session.answer(STEPS + 1, stop=frozenset())  # the last token is chosen but not run
        seconds = now(device) - started
        answers.add(
            prefill=context.prefill_s, compression=context.session.compress_seconds, token=seconds / STEPS,
            answer=context.prefill_s + seconds,
        )
        answers.memory, answers.device_memory = context.session.memory(), context.device_memory


def _denoise(setting: Setting, method: Method, length: int, batch: int, answers: AnswerTimes) -> None:
    device = setting.model.device
    prompt, sampling = setting.tokens(batch, length, seed=1), Sampling(steps=STEPS, block=BLOCK)
    started = now(device)
    made = denoise(setting.model, cast("Policy", method), prompt, STEPS, sampling)
    seconds = now(device) - started
    answers.add(token=seconds / STEPS, answer=seconds)
    answers.memory = count_bytes(made, batch * setting.model.shape(made.sequence_length).full_bytes)
