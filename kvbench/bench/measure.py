"""Times every method at one length and batch: in turn with the anchors, or alone where they do not fit together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from kvbench.bench.answer import STEPS, time_answers
from kvbench.bench.decode import Timed, open_attention, open_steps
from kvbench.bench.job import OUT_OF_TIME, BenchJob
from kvbench.bench.outcome import Failure, attempt
from kvbench.bench.records import DeviceMemory, Timing
from kvbench.bench.state import OpenContext, open_context
from kvbench.bench.timing import WARM_UPS, Call, interleave, make_cold, time_calls
from kvbench.kernels.choice import using
from kvbench.log import say
from kvbench.method import Method
from kvbench.runs.journal import CacheBytes

T = TypeVar("T")
TRIES = 4
"""Attempts at the largest batch, each with three quarters of the sequences of the one before."""
OPENERS = {"kernel": ("attention", open_attention), "step": ("step", open_steps)}
"""Quantity and opener of the timing levels that time single steps."""
Rounds = dict[str, list[float]]
"""Seconds by quantity."""


@dataclass(frozen=True)
class Measured:
    """One method's rounds, the anchors' rounds, and everything else that its cell reports."""

    batch: int
    rounds: Rounds
    anchors: dict[str, Rounds]
    """Scaled to the same batch."""
    paired: bool
    """True if the anchors ran in turn with the method."""
    memory: CacheBytes | None
    device_memory: DeviceMemory | None
    read_bytes: int | None
    """Bytes of caches that one decode step reads."""
    steps: int
    graph: bool | None
    graph_reason: str | None
    kernels: dict[str, str]
    eager: Rounds | None = None
    """An anchor's rounds without a graph, for comparison with methods that cannot be a graph."""

    def scaled(self, batch: int, *, graph: bool) -> Rounds | None:
        """An anchor's rounds scaled to a batch, with a graph or without; None if there are none."""
        rounds = self.rounds if self.graph is None or self.graph == graph else self.eager
        return rounds and {quantity: [x * batch / self.batch for x in seconds] for quantity, seconds in rounds.items()}


def measure(
    job: BenchJob, timing: Timing, methods: Mapping[str, Method], length: int, batches: Mapping[str, int], *,
    alone: bool,
) -> Iterator[tuple[str, Measured | Failure]]:
    """Yield each method's name and measurement, each at its own batch, as soon as it is done.

    A method runs in turn with the anchors, whose contexts stay in memory. If `alone` is set, or if memory cannot hold
    method and anchors together, it runs alone and is compared with the anchors' earlier rounds.
    """
    if timing == "end-to-end":
        yield from _measure_answers(job, methods, length, batches)
        return
    needs = {name: job.need(method, length) for name, method in methods.items()}
    left = job.memory - job.outline.weight_bytes
    most = {name: need.device_bytes(batches[name], job.setting.state) for name, need in needs.items()}
    opened: list[str] = []
    for name in () if alone else job.anchors:
        if name in methods and most[name] <= left:
            opened.append(name)
            left -= batches[name] * needs[name].decode
    together = [x for x in methods if x in opened or (opened and most[x] <= left)]
    found: dict[str, Measured | Failure] = {}
    with ExitStack() as stack:
        anchors: dict[str, OpenContext] = {}
        for name in opened:
            context = _attempt(job, partial(_enter, stack, job, methods[name], length, batches[name]))
            if isinstance(context, Failure):
                found[name] = context
            else:
                anchors[name] = context
        for name in together:
            if name not in found:
                step = partial(_measure_steps, job, timing, name, methods[name], length, batches[name], anchors)
                found[name] = _attempt(job, step)
            yield name, found[name]
    for name, method in methods.items():
        if name not in found:
            found[name] = _measure_alone(job, timing, name, method, length, batches[name], tries=TRIES if alone else 1)
            yield name, _add_anchors(job, name, found[name], found)


def _measure_alone(
    job: BenchJob, timing: Timing, name: str, method: Method, length: int, batch: int, tries: int
) -> Measured | Failure:
    """Measure a method alone. While tries are left, an out-of-memory error repeats it with 3/4 of the sequences."""
    while True:
        found = _attempt(job, partial(_measure_steps, job, timing, name, method, length, batch, {}))
        tries, smaller = tries - 1, batch * 3 // 4
        if not isinstance(found, Failure) or found.outcome != "out of memory" or not tries or not smaller:
            return found
        say(f"{timing} {name}, {length} tokens x {batch}: {found.reason}; trying {smaller}")
        batch = smaller


def _attempt(job: BenchJob, make: Callable[[], T]) -> T | Failure:
    """The result of a call, unless the deadline has passed."""
    return Failure("skipped", OUT_OF_TIME) if job.late else attempt(make)


def _add_anchors(
    job: BenchJob, name: str, ours: Measured | Failure, found: Mapping[str, Measured | Failure]
) -> Measured | Failure:
    """Add the rounds of the anchors before it that were timed in the same way."""
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


def _enter(stack: ExitStack, job: BenchJob, method: Method, length: int, batch: int) -> OpenContext:
    with using(job.kernels):
        return stack.enter_context(open_context(job.setting, method, length, batch))


def _measure_steps(
    job: BenchJob, timing: Timing, name: str, method: Method, length: int, batch: int,
    anchors: Mapping[str, OpenContext],
) -> Measured:
    """Time a method's steps, or their attention, in turn with the anchors before it."""
    quantity, opener = OPENERS[timing]
    with ExitStack() as stack, using(job.kernels) as ran:
        context = anchors.get(name) or _enter(stack, job, method, length, batch)
        eager = None
        if name in job.anchors and not anchors and job.device.type == "cuda":
            with opener(job.setting, context.session, graph=False) as plain:
                _warm_up(plain)
                eager = {quantity: _time(job, timing, {name: plain})[name]}
        ours = stack.enter_context(opener(job.setting, context.session, graph=True))
        _warm_up(ours)
        timed = {name: ours}
        with using(job.kernels):  # keeps the anchors' operations out of the method's list
            for other, anchor in anchors.items():
                if other == name:
                    break
                theirs = stack.enter_context(opener(job.setting, anchor.session, graph=ours.reason is None))
                if (theirs.reason is None) == (ours.reason is None):  # a graph is compared with graphs only
                    _warm_up(theirs)
                    timed[other] = theirs
            rounds = _time(job, timing, timed)
        ours.settle()
        read = sum(store.read_bytes() for store in ours.session.layers)
        context.session.credit(ours.session)
        return Measured(
            batch=batch, rounds={quantity: rounds.pop(name)}, eager=eager,
            anchors={other: {quantity: x} for other, x in rounds.items()}, paired=bool(anchors),
            memory=context.session.memory(), device_memory=context.device_memory, read_bytes=read,
            steps=job.rounds[timing] * _calls(job, timing), graph=ours.reason is None, graph_reason=ours.reason,
            kernels=dict(sorted(ran.items())),
        )


def _warm_up(timed: Timed) -> None:
    for _ in range(WARM_UPS):
        timed.prepare()
        timed.call()


def _calls(job: BenchJob, timing: Timing) -> int:
    """Calls per round."""
    return -(-STEPS // job.rounds[timing])


def _time(job: BenchJob, timing: Timing, timed: Mapping[str, Timed]) -> Rounds:
    """Seconds per call, by name and round."""
    cold = make_cold(job.device) if timing == "kernel" else None
    timers = {
        name: partial(time_calls, job.device, x.call, _calls(job, timing), partial(_prepare, x, cold))
        for name, x in timed.items()
    }
    return interleave(timers, job.rounds[timing])


def _prepare(timed: Timed, cold: Call | None) -> None:
    timed.prepare()
    if cold is not None:
        cold()


def _measure_answers(
    job: BenchJob, methods: Mapping[str, Method], length: int, batches: Mapping[str, int]
) -> Iterator[tuple[str, Measured | Failure]]:
    """Time whole answers of all methods in turn."""
    answers = time_answers(job, methods, length, batches)
    found: dict[str, Measured | Failure] = {
        name: x if isinstance(x, Failure) else Measured(
            batch=batches[name], rounds=x.seconds, anchors={}, paired=True, memory=x.memory,
            device_memory=x.device_memory, read_bytes=None if x.memory is None else x.memory.read_bytes_per_step,
            steps=len(x.seconds["answer"]) * STEPS, graph=None, graph_reason=None,
            kernels=dict(sorted(x.kernels.items())),
        ) for name, x in answers.items()
    }
    yield from ((name, _add_anchors(job, name, x, found)) for name, x in found.items())
