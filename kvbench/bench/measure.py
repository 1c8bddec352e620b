"""Rounds of every method at one length and batch: beside the anchors, or by itself where they would not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from kvbench.bench.answer import time_answers
from kvbench.bench.decode import Timed, open_attention, open_steps
from kvbench.bench.job import OUT_OF_TIME, Job
from kvbench.bench.outcome import Failure, attempt
from kvbench.bench.records import Clock, DeviceMemory
from kvbench.bench.state import Stand, count_bytes, open_stand
from kvbench.bench.timing import WARM_UPS, Call, interleave, make_cold, time_calls
from kvbench.kernels.choice import using
from kvbench.log import say
from kvbench.method import Method
from kvbench.runs.journal import CacheBytes

T = TypeVar("T")
STEPS = 128
"""Decode steps that are timed at least, or calls of the attention."""
TRIES = 4
"""Of the largest batch, which plan predicts."""
OPENERS = {"kernel": ("attention", open_attention), "step": ("step", open_steps)}
"""Of the clocks that go step by step: what they time, and how it is opened."""
Rounds = dict[str, list[float]]
"""Seconds by quantity."""


@dataclass(frozen=True)
class Measured:
    """One method's rounds, those of the anchors that ran in turn with it, and what else its cell says."""

    batch: int
    rounds: Rounds
    anchors: dict[str, Rounds]
    """As if of the same batch: seconds for as many sequences."""
    paired: bool
    """Whether anchors ran in turn with it."""
    memory: CacheBytes | None
    device_memory: DeviceMemory | None
    read_bytes: int | None
    """Of caches, by a decode step."""
    steps: int
    graph: bool | None
    graph_reason: str | None
    kernels: dict[str, str]
    eager: Rounds | None = None
    """Of an anchor by itself, without a graph: for those beside it that cannot be one."""

    def scaled(self, batch: int, *, graph: bool) -> Rounds | None:
        """Its rounds as an anchor's: seconds for so many sequences, with a graph or without."""
        rounds = self.rounds if self.graph is None or self.graph == graph else self.eager
        return rounds and {quantity: [x * batch / self.batch for x in seconds] for quantity, seconds in rounds.items()}


def measure(
    job: Job, clock: Clock, methods: Mapping[str, Method], length: int, batches: Mapping[str, int], *, alone: bool
) -> Iterator[tuple[str, Measured | Failure]]:
    """Every method by name, at a batch of its own, as soon as it is measured.

    In turn with the anchors, which hold their contexts meanwhile. Alone, or where memory would not hold a method beside
    them, by itself: then the anchors' own rounds stand beside it.
    """
    if clock == "user":
        yield from _measure_answers(job, methods, length, batches)
        return
    needs = {name: job.need(method, length) for name, method in methods.items()}
    left = job.memory - job.outline.weight_bytes
    most = {name: need.rows(batches[name], job.setting.state) for name, need in needs.items()}
    held: list[str] = []
    for name in () if alone else job.anchors:
        if name in methods and most[name] <= left:
            held.append(name)
            left -= batches[name] * needs[name].decode
    beside = [x for x in methods if x in held or (held and most[x] <= left)]
    found: dict[str, Measured | Failure] = {}
    with ExitStack() as stack:
        anchors: dict[str, Stand] = {}
        for name in held:
            stand = _attempt(job, partial(_enter, stack, job, methods[name], length, batches[name]))
            if isinstance(stand, Failure):
                found[name] = stand
            else:
                anchors[name] = stand
        for name in beside:
            if name not in found:
                step = partial(_measure_steps, job, clock, name, methods[name], length, batches[name], anchors)
                found[name] = _attempt(job, step)
            yield name, found[name]
    for name, method in methods.items():
        if name not in found:
            found[name] = _measure_alone(job, clock, name, method, length, batches[name], tries=TRIES if alone else 1)
            yield name, _set_beside(job, name, found[name], found)


def _measure_alone(
    job: Job, clock: Clock, name: str, method: Method, length: int, batch: int, tries: int
) -> Measured | Failure:
    """A method by itself; where so many sequences do not fit and several tries are allowed, three quarters of them."""
    while True:
        found = _attempt(job, partial(_measure_steps, job, clock, name, method, length, batch, {}))
        tries, smaller = tries - 1, batch * 3 // 4
        if not isinstance(found, Failure) or found.outcome != "out of memory" or not tries or not smaller:
            return found
        say(f"{clock} {name}, {length} tokens x {batch}: {found.reason}; trying {smaller}")
        batch = smaller


def _attempt(job: Job, make: Callable[[], T]) -> T | Failure:
    """What a call returns, unless there is no time for it."""
    return Failure("skipped", OUT_OF_TIME) if job.late else attempt(make)


def _set_beside(
    job: Job, name: str, ours: Measured | Failure, found: Mapping[str, Measured | Failure]
) -> Measured | Failure:
    """With the rounds of the anchors before it that were timed in the same way."""
    if isinstance(ours, Failure):
        return ours
    anchors = {}
    for other in job.anchors:
        theirs = found.get(other)
        if other == name:
            break
        if isinstance(theirs, Measured) and (rounds := theirs.scaled(ours.batch, graph=bool(ours.graph))) is not None:
            anchors[other] = rounds
    return replace(ours, anchors=anchors)


def _enter(stack: ExitStack, job: Job, method: Method, length: int, batch: int) -> Stand:
    with using(job.kernels):
        return stack.enter_context(open_stand(job.setting, method, length, batch))


def _measure_steps(
    job: Job, clock: Clock, name: str, method: Method, length: int, batch: int, anchors: Mapping[str, Stand]
) -> Measured:
    """A method's steps, or their attention, in turn with those of the anchors before it."""
    quantity, opener = OPENERS[clock]
    with ExitStack() as stack, using(job.kernels) as ran:
        stand = anchors.get(name) or _enter(stack, job, method, length, batch)
        eager = None
        if name in job.anchors and not anchors and job.device.type == "cuda":
            with opener(job.setting, stand.session, graph=False) as plain:
                _warm_up(plain)
                eager = {quantity: _time(job, clock, {name: plain})[name]}
        ours = stack.enter_context(opener(job.setting, stand.session, graph=True))
        _warm_up(ours)
        timed = {name: ours}
        with using(job.kernels):  # what anchors run is none of the method's own
            for other, anchor in anchors.items():
                if other == name:
                    break
                beside = stack.enter_context(opener(job.setting, anchor.session, graph=ours.reason is None))
                if (beside.reason is None) == (ours.reason is None):  # a graph is compared with graphs alone
                    _warm_up(beside)
                    timed[other] = beside
            rounds = _time(job, clock, timed)
        read = sum(store.read_bytes() for store in ours.session.layers)
        stand.session.credit(ours.session)
        return Measured(
            batch=batch, rounds={quantity: rounds.pop(name)}, eager=eager,
            anchors={other: {quantity: x} for other, x in rounds.items()}, paired=bool(anchors),
            memory=count_bytes(stand.session), device_memory=stand.device_memory, read_bytes=read,
            steps=job.rounds[clock] * _calls(job, clock), graph=ours.reason is None, graph_reason=ours.reason,
            kernels=dict(sorted(ran.items())),
        )


def _warm_up(timed: Timed) -> None:
    for _ in range(WARM_UPS):
        timed.prepare()
        timed.call()


def _calls(job: Job, clock: Clock) -> int:
    """Of a round."""
    return -(-STEPS // job.rounds[clock])


def _time(job: Job, clock: Clock, timed: Mapping[str, Timed]) -> Rounds:
    """Seconds per call by name."""
    cold = make_cold(job.device) if clock == "kernel" else None
    timers = {
        name: partial(time_calls, job.device, x.call, _calls(job, clock), partial(_prepare, x, cold))
        for name, x in timed.items()
    }
    return interleave(timers, job.rounds[clock])


def _prepare(timed: Timed, cold: Call | None) -> None:
    timed.prepare()
    if cold is not None:
        cold()


def _measure_answers(
    job: Job, methods: Mapping[str, Method], length: int, batches: Mapping[str, int]
) -> Iterator[tuple[str, Measured | Failure]]:
    """Whole answers of all methods in turn."""
    answers = time_answers(job, methods, length, batches)
    found: dict[str, Measured | Failure] = {
        name: x if isinstance(x, Failure) else Measured(
            batch=batches[name], rounds=x.seconds, anchors={}, paired=True, memory=x.memory,
            device_memory=x.device_memory, read_bytes=None if x.memory is None else x.memory.read_bytes_per_step,
            steps=len(x.seconds["answer"]) * STEPS, graph=None, graph_reason=None,
            kernels=dict(sorted(x.kernels.items())),
        ) for name, x in answers.items()
    }
    yield from ((name, _set_beside(job, name, x, found)) for name, x in found.items())
